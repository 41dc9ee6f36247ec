"""The rotary dial: each rotary pair has a fade in [0, 1], from kept (1) to gone (0)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from .configuration_fox import FoxFields

FEW_TURNS, MANY_TURNS = 1.0, 32.0
"""Turns within the trained length below which a pair is slow, and from which it is fast."""


def fades(inv_freq: list[float], spec: FoxFields, layer_idx: int) -> list[float]:
    """Fade of each rotary pair of one layer.

    keep: all 1; drop: all 0; interpolate: see `interpolated`; partial: 1 where the wavelength 2 pi / inv_freq is at
    most `max_wavelength` tokens;
    anneal: pairs that will go fade one after the other, lowest frequency first, as annealed_tokens / anneal_tokens
    goes from 0 to 1. A layer's own `layer_max_wavelength` replaces the mode for that layer, and its
    `layer_pairs`, 1 for each that is named, both.

    Raises:
        ValueError: `layer_pairs` names a pair that there is not.
    """
    named = spec.layer_pairs.get(layer_idx)
    if named is not None:
        if any(pair >= len(inv_freq) for pair in named):
            raise ValueError(
                f"layer_pairs names pair {max(named)} in layer {layer_idx}, which has pairs 0 to {len(inv_freq) - 1}"
            )
        return [float(pair in named) for pair in range(len(inv_freq))]
    override = spec.layer_max_wavelength.get(layer_idx)
    if override is not None:
        return _partial(inv_freq, override)
    if spec.rope == "keep":
        return [1.0] * len(inv_freq)
    if spec.rope == "drop":
        return [0.0] * len(inv_freq)
    if spec.rope == "interpolate":
        return interpolated(inv_freq, _known(spec.rope_length, "rope_length"), _known(spec.rope_factor, "rope_factor"))
    limit = spec.max_wavelength
    if spec.rope == "anneal":
        target = [0.0] * len(inv_freq) if spec.anneal_to == "drop" else _partial(inv_freq, _known(limit))
        going = sorted((i for i, keep in enumerate(target) if not keep), key=lambda i: inv_freq[i])
        progress = min(1.0, spec.annealed_tokens / spec.anneal_tokens) * len(going)
        result = [1.0] * len(inv_freq)
        for rank, pair in enumerate(going):
            result[pair] = min(1.0, max(0.0, 1.0 - (progress - rank)))
        return result
    return _partial(inv_freq, _known(limit))


def interpolated(inv_freq: list[float], trained_length: float, factor: float) -> list[float]:
    """Fades that stretch slow pairs: fade = g + (1 - g) / factor, g = clip((r - 1) / (32 - 1), 0, 1).

    r = trained_length * inv_freq / (2 pi) is how often a pair turns within the trained length. Pairs that turn 32 times
    or more tell near positions apart and stay. Those that turn less than once would, beyond the trained length, meet
    angles they never saw: they turn `factor` times slower. Between them the fade goes linearly in r.

    Source: NTK-by-parts of YaRN (Peng et al., arXiv 2309.00071, section 3.2), with its alpha = 1, beta = 32 for
    LLaMA; without its temperature, which training makes up for.
    """
    turns = [trained_length * w / (2 * math.pi) for w in inv_freq]
    kept = [min(1.0, max(0.0, (r - FEW_TURNS) / (MANY_TURNS - FEW_TURNS))) for r in turns]
    return [g + (1.0 - g) / factor for g in kept]


def _known(value: float | None, name: str = "max_wavelength") -> float:
    if value is None:
        raise ValueError(
            f"the fox section lacks {name}: its config.json is incomplete (in Python: FoxSpec.resolved(trained_length))"
        )
    return value


def _partial(inv_freq: list[float], max_wavelength: float) -> list[float]:
    # 1e-6: a wavelength given back by the tool in rounded decimals must select the pair it was read from
    return [1.0 if 2 * math.pi / w <= max_wavelength * (1 + 1e-6) else 0.0 for w in inv_freq]


def layer_frequencies(rotary: Any, layer_type: str | None) -> tuple[torch.Tensor, float]:
    """(inverse frequencies, attention scaling) that a family's rotary module uses now for one layer type.

    Read at each use: dynamic and longrope RoPE change them with the length of the text.
    """
    prefix = "" if hasattr(rotary, "inv_freq") else f"{layer_type}_"
    return getattr(rotary, f"{prefix}inv_freq"), float(getattr(rotary, f"{prefix}attention_scaling", 1.0))


class Fades:
    """The fades of a model's layers; where these turn different pairs, one edit of (cos, sin) serves a decoding step.

    Edited one after the other, each layer would launch two kernels for a few numbers.
    """

    MOST_ROWS = 64
    """Tokens up to which the edits of all layers are made together: more would fill memory with them."""

    def __init__(self) -> None:
        self.layers: list[RotaryFade] = []
        self._kinds: dict[tuple[str | None, torch.device], tuple[list[RotaryFade], torch.Tensor]] = {}

    def changed(self) -> None:
        """Forgets what was made of the layers' fades."""
        self._kinds = {}

    def edit(
        self, cos: torch.Tensor, sin: torch.Tensor, like: RotaryFade
    ) -> dict[Any, tuple[torch.Tensor, torch.Tensor]] | None:
        """(cos, sin) of all kinds of layers that share them with `like`, by what a layer's kind is.

        cos, sin (B, T, 2 P). Of layers whose pairs turn or don't; where any of `like` is between the two, where there
        is no other kind or where there are more rows than MOST_ROWS: None.
        """
        if cos.shape[:-1].numel() > self.MOST_ROWS:
            return None
        found = self._kinds.get((like.layer_type, cos.device))
        if found is None:
            whole = [x for x in self.layers if x.layer_type == like.layer_type and set(x.fade) == {0.0, 1.0}]
            kinds = list({x._shared_by: x for x in whole}.values())
            gone = torch.tensor([[x.fade[pair] == 0.0 for pair in x.channel_pair] for x in kinds], device=cos.device)
            found = self._kinds[like.layer_type, cos.device] = kinds, gone
        kinds, gone = found
        if len(kinds) < 2 or all(x._shared_by != like._shared_by for x in kinds):
            return None
        gone = gone[:, None, None]
        scaling = layer_frequencies(like._rotary[0], like.layer_type)[1]
        edited = cos.masked_fill(gone, scaling), sin.masked_fill(gone, 0.0)
        return {x._shared_by: (c, s) for x, c, s in zip(kinds, *edited, strict=True)}


class RotaryFade(nn.Module):
    """Edits a layer's (cos, sin): faded pairs turn by fade * angle, gone pairs not at all.

    cos'_p = cos(fade_p * position * w_p), so a pair stays a rotation at every step of an annealing schedule. Gone
    pairs keep the attention scaling that yarn and longrope put on cos, which is a temperature of the logits.

    Args:
        rotary: the family's rotary module of the running model, where current frequencies are read.
        config: to build the same module on the CPU, for the frequencies that fades are decided by (models are built
            on the meta device by from_pretrained).
        together: the fades of all layers of the model; this one joins them.

    Shapes: cos, sin (B, T, 2 P) for P pairs, halves stacked or interleaved as the family has it; position_ids (B, T).
    Raises: ValueError when pairs are part-faded and position_ids are missing.
    """

    def __init__(
        self,
        rotary: nn.Module,
        config: Any,
        layer_type: str | None,
        spec: FoxFields,
        layer_idx: int,
        together: Fades,
    ):
        super().__init__()
        self.together = together
        together.layers.append(self)
        self.layer_type, self.layer_idx = layer_type, layer_idx
        self._rotary = [rotary]  # in a list: the module belongs to the model, not to each layer
        with torch.device("cpu"):
            twin = type(rotary)(config)
            inv_freq, self.attention_scaling = layer_frequencies(twin, layer_type)
            cos, _ = twin(torch.zeros(1), torch.tensor([[1]]), *([] if hasattr(twin, "inv_freq") else [layer_type]))
            halves = torch.arange(len(inv_freq)).repeat(2)
            interleaved = torch.arange(len(inv_freq)).repeat_interleave(2)
            expected = (inv_freq.cos() * self.attention_scaling).to(cos.dtype)
            self.stacked = torch.allclose(cos[0, 0], expected[halves])
            self.channel_pair = (halves if self.stacked else interleaved).tolist()
        self.inv_freq = inv_freq.tolist()
        self.set(spec)

    def set(self, spec: FoxFields) -> None:
        """Takes the fades of `spec`, whose `annealed_tokens` may have moved."""
        self.take(fades(self.inv_freq, spec, self.layer_idx))

    def take(self, faded: list[float]) -> None:
        """Takes a fade for each pair."""
        self.fade = faded
        self.kept = all(f == 1.0 for f in self.fade)
        self.gone = all(f == 0.0 for f in self.fade)
        kept = sum(f == 1.0 for f in self.fade)
        in_order = self.fade == [1.0] * kept + [0.0] * (len(self.fade) - kept) and self.attention_scaling == 1.0
        self.num_leading = kept if in_order else None  # pairs that turn, if the others are exactly left alone
        self._shared_by = (tuple(self.fade), self.layer_type)
        self._tensors: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        self.together.changed()

    @property
    def skippable(self) -> bool:
        """Whether applying the rotary would multiply by one: every pair is gone and no scaling is left on cos."""
        return self.gone and self.attention_scaling == 1.0

    def fits(self, cos: torch.Tensor, head_dim: int) -> bool:
        """Whether `leading` says all that there is to say: halves stacked, over the whole head."""
        return self.stacked and cos.dim() == 3 and cos.shape[-1] == head_dim

    def leading(
        self, cos: torch.Tensor, sin: torch.Tensor, position_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin (B, T, P) of the first P pairs, for the fused rotary, which leaves the others alone."""
        pairs = self.num_leading
        if pairs is None:
            cos, sin = self(cos, sin, position_ids)
            pairs = len(self.fade)
        return cos[..., :pairs], sin[..., :pairs]

    def forward(
        self, cos: torch.Tensor, sin: torch.Tensor, position_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.kept:
            return cos, sin
        if torch.compiler.is_compiling():
            return self._faded(cos, sin, position_ids)
        # Kept on the tensor, which every layer of one forward gets: layers that fade alike edit it once.
        made: dict[Any, Any] = getattr(cos, "_fox_faded", None) or {}
        cos._fox_faded = made  # type: ignore[attr-defined]
        if self._shared_by not in made or made[self._shared_by][0] is not position_ids:
            edits = self.together.edit(cos, sin, self) or {self._shared_by: self._faded(cos, sin, position_ids)}
            made.update((kind, (position_ids, edit)) for kind, edit in edits.items())
        return made[self._shared_by][1]

    def _faded(
        self, cos: torch.Tensor, sin: torch.Tensor, position_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.skippable:
            return cos.new_ones(1).expand_as(cos), sin.new_zeros(1).expand_as(sin)
        fade, pair = self._on(cos.device)
        inv_freq, scaling = layer_frequencies(self._rotary[0], self.layer_type)
        if any(0.0 < f < 1.0 for f in self.fade):
            if position_ids is None:
                raise ValueError("annealing rotary pairs needs position_ids to reach the attention layer")
            part = (fade > 0.0) & (fade < 1.0)
            angle = position_ids[..., None].float() * (inv_freq.to(cos.device).float()[pair] * fade)
            cos = torch.where(part, (angle.cos() * scaling).to(cos.dtype), cos)
            sin = torch.where(part, (angle.sin() * scaling).to(sin.dtype), sin)
        gone = fade == 0.0
        return cos.masked_fill(gone, scaling), sin.masked_fill(gone, 0.0)

    def _on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        if device not in self._tensors:
            pair = torch.tensor(self.channel_pair, device=device)
            self._tensors[device] = (torch.tensor(self.fade, device=device)[pair], pair)
        return self._tensors[device]
