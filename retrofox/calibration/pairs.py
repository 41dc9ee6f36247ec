"""Which rotary pairs each layer keeps: those whose turning its attention needs most, measured on text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from retrofox.anatomy import attentions
from retrofox.calibration.capture import Operands, converted_operands, enter, run_original
from retrofox.calibration.source import LayerSource
from retrofox.model.configuration_fox import FoxSpec
from retrofox.model.rope import RotaryFade

WINDOWS, LENGTH = 2, 8192
"""How many windows pairs are chosen on, and their most tokens."""
QUERIES = 48
"""Queries of a window whose attention is looked at, evenly spread over it."""
ELEMENTS = 2**30
"""Most numbers held at once: pairs x heads x queries x tokens of all windows, in half precision. Fewer queries are
looked at where there would be more."""
HIDDEN = -1e30
"""Logit of a key that a query may not see: finite, so that no attention times it is nothing."""
OUTPUT_WEIGHT = 8.0
"""Of the heads' output errors beside their KL. The fit, whose errors are small, has less (`fit.OUTPUT_WEIGHT`)."""
TRIED = 4
"""Pairs tried at each step: those that cost least when they were tried last, as a pair's cost hardly falls."""


@torch.no_grad()
def choose_pairs(
    source: LayerSource,
    windows: torch.Tensor,
    *,
    refit: bool = True,
    advance: Callable[[int], Any] | None = None,
) -> dict[int, tuple[int, ...]]:
    """As many pairs as each layer of a model with rope "partial" keeps, but those that its attention needs most.

    In each layer, on its own inputs in the original, pairs stop turning one after the other, each time the one that
    then costs least:

        mean_i KL(p_i || p'_i) + w |sum_j (p'_ij - p_ij) v_j|^2 / mean_j |v_j|^2

    p_i the original's attention of query i, p'_i without the turning of the pairs that went, w = OUTPUT_WEIGHT. A
    pair that doesn't turn gives q_p z_hp conj(k_p) as its part of a logit, the pair's two channels taken as one complex
    number; z_hp = sum_ij p_ij e^(i w_p (i - j)) / N is its mean turn where head h looks.

    Source: partial RoPE by what a pair contributes is from MHA2MLA (Ji et al., arXiv 2502.14837), which keeps the pairs
    of the largest |q_p| |k_p|; here it is what attention loses that decides, the pairs that went before counted in.

    Args:
        source: the converted model, its pairs kept by wavelength so far; nothing of it is changed.
        windows: (N, T) int64 tokens, each row of one document.
        refit: whether queries will be refitted, which makes up for the mean turns; if not, z = 1.
        advance: called after each layer with 1.

    Returns:
        layer -> pairs kept, ascending, pair 0 the fastest; layers that keep all of them, or none, or have a wavelength
        of their own, are not in it.
    """
    hidden, calls = enter(source.model, windows)
    chosen = {}
    named = FoxSpec.from_dict(source.model.config.fox).layer_max_wavelength
    for number, (_, attention) in enumerate(attentions(source.model)):
        fade = attention.rotary_fade
        with source.layer(number) as layer:
            hidden, captured = run_original(layer, hidden, calls[number])
            if fade is not None and {*fade.fade} == {0.0, 1.0} and number not in named:
                samples = [Sample.of(attention, *entry, len(windows), refit) for entry in captured]
                chosen[number] = tuple(left_of(samples, sum(f == 1.0 for f in fade.fade)))
        if advance is not None:
            advance(1)
    return chosen


@dataclass
class Sample:
    """Some queries of one window: the original's attention, and what becomes of it as pairs stop turning.

    attention, logits (H, n, T), the latter uncapped and without the turning of the pairs that went; changes
    (P, H, n, T), half precision, of logits as a pair stops turning; value (H, T, D); output (H, n, D), the original's;
    hidden (n, T), keys a query may not see.
    """

    attention: torch.Tensor
    logits: torch.Tensor
    changes: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    hidden: torch.Tensor
    softcap: float | None

    @classmethod
    def of(cls, attention: Any, original: Operands, block: dict[str, Any], windows: int, refit: bool) -> Sample:
        fade: RotaryFade = attention.rotary_fade
        before = fade.fade
        fade.take([0.0] * len(before))
        try:
            still = converted_operands(attention, block)
        finally:
            fade.take(before)
        heads, length, _ = original.query.shape
        pairs = len(before)
        count = min(QUERIES, max(1, ELEMENTS // (windows * pairs * heads * length)), length)
        rows = torch.linspace(length // (count + 1), length - 1, count, device=original.query.device).long()
        distance = rows[:, None] - torch.arange(length, device=rows.device)
        hidden = (distance < 0) | (distance >= (original.window or length))
        groups = heads // original.key.shape[0]
        turned = [as_complex(x, fade) for x in (original.query[:, rows], original.key)]
        unturned = [as_complex(x, fade) for x in (still.query[:, rows], still.key)]
        keys = original.key.repeat_interleave(groups, 0)
        logits = original.query[:, rows] @ keys.transpose(1, 2) * original.scaling
        shown = _capped(logits, original.softcap).masked_fill(hidden, HIDDEN).softmax(-1)
        changes = logits.new_empty((pairs, *logits.shape), dtype=torch.float16)
        for pair, frequency in enumerate(fade.inv_freq):
            angle = distance * frequency
            mean = torch.complex((shown * angle.cos()).sum((1, 2)), (shown * angle.sin()).sum((1, 2))) / count
            mean = mean if refit else torch.ones_like(mean)
            now = _part(turned[0][..., pair], turned[1][..., pair], groups)
            then = _part(unturned[0][..., pair] * mean[:, None], unturned[1][..., pair], groups)
            changes[pair] = (then - now) * original.scaling
        value = original.value.repeat_interleave(groups, 0)
        return cls(shown, logits, changes, value, shown @ value, hidden, original.softcap)

    def cost(self, stopping: Sequence[int]) -> float:
        """The heads' mean cost where these pairs stop turning, too, up to a constant."""
        logits = self.logits + sum(self.changes[pair] for pair in stopping)
        logits = _capped(logits, self.softcap).masked_fill_(self.hidden, HIDDEN)
        lse = logits.logsumexp(-1)
        divergence = lse - torch.einsum("hnt,hnt->hn", self.attention, logits)
        error = logits.sub_(lse[..., None]).exp_() @ self.value - self.output
        size = self.value.square().sum(-1).mean(-1).clamp_min(1e-30)
        return float((divergence.mean(-1) + OUTPUT_WEIGHT * error.square().sum(-1).mean(-1) / size).mean())


def left_of(samples: list[Sample], kept: int) -> list[int]:
    """The pairs left when all but `kept` went."""
    left = list(range(len(samples[0].changes)))
    costs: dict[int, float] = {}
    while len(left) > kept:
        tried = sorted(left, key=costs.__getitem__)[:TRIED] if costs else left
        costs |= {pair: sum(sample.cost([pair]) for sample in samples) for pair in tried}
        going = min(tried, key=costs.__getitem__)
        left.remove(going)
        for sample in samples:
            sample.logits += sample.changes[going]
    return left


def as_complex(states: torch.Tensor, fade: RotaryFade) -> torch.Tensor:
    """Queries or keys (H, n, D) -> (H, n, P) complex, a number for each rotary pair."""
    channels = torch.tensor(fade.channel_pair, device=states.device).argsort(stable=True)
    first, second = states[..., : len(channels)][..., channels].unflatten(-1, (-1, 2)).unbind(-1)
    return torch.complex(first.float(), second.float())


def _part(query: torch.Tensor, key: torch.Tensor, groups: int) -> torch.Tensor:
    """(H, n, T) Re(q conj(k)) of one pair, query (H, n), key (Hkv, T): its part of a logit, before scaling."""
    key = key.repeat_interleave(groups, 0)
    return query.real[..., None] * key.real[:, None] + query.imag[..., None] * key.imag[:, None]


def _capped(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return logits if softcap is None else (logits / softcap).tanh() * softcap
