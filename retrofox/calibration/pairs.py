"""Which rotary pairs each layer keeps: those whose turning its attention needs most, measured on text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from retrofox.anatomy import attentions
from retrofox.calibration.capture import Operands, converted_operands, enter, run_original
from retrofox.calibration.source import LayerSource
from retrofox.fox_spec import FoxSpec
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
BLOCKS = 6
"""Parts that a window's queries are taken in, each with the keys up to its last query: 7 in 12 of all products."""
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
                samples = [
                    sample for entry in captured for sample in samples_of(attention, *entry, len(windows), refit)
                ]
                chosen[number] = tuple(left_of(samples, sum(f == 1.0 for f in fade.fade)))
        if advance is not None:
            advance(1)
    return chosen


@dataclass
class Sample:
    """Some queries of one window: the original's attention, and what becomes of it as pairs stop turning.

    S keys up to the last of n queries. attention, logits (H, n, S), the latter uncapped and without the turning of the
    pairs that went; changes (P, H, n, S), half precision, of logits as a pair stops turning; value (H, S, D); output
    (H, n, D), the original's; hidden (n, S), keys a query may not see; size (H,), mean |v|^2 over the whole window;
    share: of the window's queries that are looked at.
    """

    attention: torch.Tensor
    logits: torch.Tensor
    changes: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    hidden: torch.Tensor
    softcap: float | None
    size: torch.Tensor
    share: float

    def cost(self, stopping: Sequence[int]) -> float:
        """The heads' mean cost where these pairs stop turning, too, up to a constant, times `share`."""
        logits = self.logits + sum(self.changes[pair] for pair in stopping)
        logits = _capped(logits, self.softcap).masked_fill_(self.hidden, HIDDEN)
        lse = logits.logsumexp(-1)
        divergence = lse - torch.einsum("hnt,hnt->hn", self.attention, logits)
        error = logits.sub_(lse[..., None]).exp_() @ self.value - self.output
        cost = divergence.mean(-1) + OUTPUT_WEIGHT * error.square().sum(-1).mean(-1) / self.size
        return self.share * float(cost.mean())


def samples_of(attention: Any, original: Operands, block: dict[str, Any], windows: int, refit: bool) -> list[Sample]:
    """Queries of one window, evenly spread over it, in BLOCKS parts."""
    fade: RotaryFade = attention.rotary_fade
    before = fade.fade
    fade.take([0.0] * len(before))
    try:
        still = converted_operands(attention, block)
    finally:
        fade.take(before)
    heads, length, _ = original.query.shape
    pairs, groups = len(before), heads // original.key.shape[0]
    count = min(QUERIES, max(1, ELEMENTS // (windows * pairs * heads * length)), length)
    rows = torch.linspace(length // (count + 1), length - 1, count, device=original.query.device).long()
    keys, value = (x.repeat_interleave(groups, 0) for x in (original.key, original.value))
    size = value.square().sum(-1).mean(-1).clamp_min(1e-30)
    turned, unturned = ([as_complex(x, fade) for x in (y.query[:, rows], y.key)] for y in (original, still))
    found = []
    for part in torch.arange(count).tensor_split(min(BLOCKS, count)):
        queries, seen = slice(int(part[0]), int(part[-1]) + 1), slice(0, int(rows[part[-1]]) + 1)
        distance = rows[queries, None] - torch.arange(seen.stop, device=rows.device)
        hidden = (distance < 0) | (distance >= (original.window or length))
        logits = original.query[:, rows[queries]] @ keys[:, seen].transpose(1, 2) * original.scaling
        shown = _capped(logits, original.softcap).masked_fill(hidden, HIDDEN).softmax(-1)
        changes = logits.new_empty((pairs, *logits.shape), dtype=torch.float16)
        share, output = len(part) / count, shown @ value[:, seen]
        sample = Sample(shown, logits, changes, value[:, seen], output, hidden, original.softcap, size, share)
        found.append((sample, distance, queries, seen))
    mean = torch.ones((heads, pairs), dtype=torch.complex64, device=rows.device)
    if refit:
        turns = torch.stack([_turns(sample.attention, distance, fade.inv_freq) for sample, distance, *_ in found])
        mean = torch.complex(*turns.sum(0).chunk(2, -1)) / count
    then = unturned[0] * mean[:, None]
    for sample, _, queries, seen in found:
        for pair in range(pairs):
            query = torch.stack([then[:, queries, pair], -turned[0][:, queries, pair]], -1)
            key = torch.stack([unturned[1][:, seen, pair], turned[1][:, seen, pair]], -1).repeat_interleave(groups, 0)
            products = torch.view_as_real(query).flatten(2) @ torch.view_as_real(key).flatten(2).transpose(1, 2)
            sample.changes[pair] = products * original.scaling
    return [sample for sample, *_ in found]


def _turns(attention: torch.Tensor, distance: torch.Tensor, frequencies: list[float]) -> torch.Tensor:
    """Sums over queries and keys of attention (H, n, S) times cos, then sin, of w_p times distance (n, S): (H, 2 P)."""
    angle = distance.reshape(-1, 1) * torch.tensor(frequencies, device=distance.device)
    return attention.flatten(1) @ torch.cat([angle.cos(), angle.sin()], -1)


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


def _capped(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return logits if softcap is None else (logits / softcap).tanh() * softcap
