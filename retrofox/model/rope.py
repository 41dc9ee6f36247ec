"""The rotary dial: each rotary pair has a fade in [0, 1], from kept (1) to gone (0)."""

from __future__ import annotations

import math

import torch
from torch import nn

from .configuration_fox import FoxSpec


def fades(inv_freq: list[float], spec: FoxSpec, layer_idx: int) -> list[float]:
    """Fade of each rotary pair of one layer.

    keep: all 1; drop: all 0; partial: 1 where the wavelength 2 pi / inv_freq is at most `max_wavelength` tokens;
    anneal: pairs that will go fade one after the other, lowest frequency first, as annealed_tokens / anneal_tokens
    goes from 0 to 1. A layer's own `layer_max_wavelength` replaces the mode for that layer.
    """
    override = spec.layer_max_wavelength.get(layer_idx)
    if override is not None:
        return _partial(inv_freq, override)
    if spec.rope == "keep":
        return [1.0] * len(inv_freq)
    if spec.rope == "drop":
        return [0.0] * len(inv_freq)
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


def _known(limit: float | None) -> float:
    if limit is None:
        raise ValueError("max_wavelength is not resolved: call FoxSpec.resolved(trained_length) first")
    return limit


def _partial(inv_freq: list[float], max_wavelength: float) -> list[float]:
    # 1e-6: a wavelength given back by the tool in rounded decimals must select the pair it was read from
    return [1.0 if 2 * math.pi / w <= max_wavelength * (1 + 1e-6) else 0.0 for w in inv_freq]


def rotary_constants(rotary_class: type[nn.Module], config: object, layer_type: str | None) -> tuple[list[float], float]:
    """(inverse frequencies, attention scaling) of a family's rotary module for one layer type, as plain numbers."""
    with torch.device("cpu"):  # models are built on the meta device by from_pretrained
        rotary = rotary_class(config)  # type: ignore[call-arg]
    prefix = "" if layer_type is None or hasattr(rotary, "inv_freq") else f"{layer_type}_"
    scaling = getattr(rotary, f"{prefix}attention_scaling", 1.0)
    return getattr(rotary, f"{prefix}inv_freq").tolist(), float(scaling)


class RotaryFade(nn.Module):
    """Edits a layer's (cos, sin): faded pairs turn by fade * angle, gone pairs not at all.

    cos'_p = cos(fade_p * position * w_p), so a pair stays a rotation at every step of an annealing schedule. Gone
    pairs keep the attention scaling that yarn and longrope put on cos, which is a temperature of the logits.

    Shapes: cos, sin (B, T, 2 P) for P pairs, halves stacked (the transformers layout); position_ids (B, T) int.
    Raises: ValueError when pairs are part-faded and position_ids are missing.
    """

    def __init__(self, inv_freq: list[float], attention_scaling: float, spec: FoxSpec, layer_idx: int):
        super().__init__()
        self.inv_freq, self.attention_scaling, self.layer_idx = inv_freq, attention_scaling, layer_idx
        self.set(spec)

    def set(self, spec: FoxSpec) -> None:
        """Takes the fades of `spec`, whose `annealed_tokens` may have moved."""
        self.fade = fades(self.inv_freq, spec, self.layer_idx)
        self.kept = all(f == 1.0 for f in self.fade)
        self.gone = all(f == 0.0 for f in self.fade)
        self._tensors: dict[torch.device, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def forward(
        self, cos: torch.Tensor, sin: torch.Tensor, position_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.kept:
            return cos, sin
        whole, part, angular = self._on(cos.device)
        if any(0.0 < f < 1.0 for f in self.fade):
            if position_ids is None:
                raise ValueError("annealing rotary pairs needs position_ids to reach the attention layer")
            angle = position_ids[..., None].float() * angular
            cos = torch.where(part, (angle.cos() * self.attention_scaling).to(cos.dtype), cos)
            sin = torch.where(part, (angle.sin() * self.attention_scaling).to(sin.dtype), sin)
        stays = whole | part
        return cos.masked_fill(~stays, self.attention_scaling), sin.masked_fill(~stays, 0.0)

    def _on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if device not in self._tensors:
            fade = torch.tensor(self.fade * 2, device=device)
            angular = torch.tensor(self.inv_freq * 2, device=device) * fade
            self._tensors[device] = (fade == 1.0, (fade > 0.0) & (fade < 1.0), angular)
        return self._tensors[device]
