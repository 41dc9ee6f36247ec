"""Half-lives of gates in tokens: the biases that give them, and those that a conversion starts with."""

from __future__ import annotations

import math
from typing import Any

from retrofox.fox_spec import OPEN
from retrofox.model.configuration_fox import FoxFields

OPEN_BIAS = 30.0
"""Gate bias of `init="open"`: log f = -1e-13 a token, below float32's resolution of a logit at any length."""
DEAD_DECAY = 1e-4
"""Nats: a gate that decays less over a whole row changes no attention weight by more than 0.01 %: it is dead."""


def half_life_tokens(mean_log_f: Any) -> Any:
    """Half-life in tokens of a head: ln 2 / mean(-log f); tensor or float in, the same out."""
    return 0.6931471805599453 / (-mean_log_f)


def bias_from_half_life(half_life_tokens: float) -> float:
    """Gate bias b with sigmoid(b)^half_life = 1/2: b = -ln(expm1(ln 2 / half_life))."""
    decay = math.log(2.0) / half_life_tokens
    return -decay - math.log(-math.expm1(-decay))  # without e^decay, which is too large a number under a thousandth


def initial_bias(spec: FoxFields, num_heads: int) -> list[float]:
    """The gate biases a layer starts with: open, ALiBi's, or half-lives log-spaced over its heads."""
    if spec.init == "open":
        return [OPEN_BIAS] * num_heads
    if spec.init == "alibi":
        return [bias_from_half_life(x) for x in alibi_half_lives(num_heads)]
    assert spec.half_life is not None  # FoxSpec.resolved fills it in
    return [bias_from_half_life(x) for x in log_spaced(*spec.half_life, num_heads)]


def log_spaced(low: float, high: float, count: int) -> list[float]:
    """So many numbers from low to high, each the same multiple of the one before; a single one is high."""
    shares = [n / (count - 1) for n in range(count)] if count > 1 else [1.0] * count
    return [low ** (1 - share) * high**share for share in shares]


def open_half_life(spec: FoxFields, trained_length: int) -> float:
    """Half-life in tokens of a head that starts open: 128 trained lengths, or the longest of the others."""
    return max((OPEN[1] * trained_length, *(spec.half_life or ())))


def alibi_half_lives(num_heads: int) -> list[float]:
    """Half-lives in tokens, ln 2 / slope, of ALiBi's slopes 2^(-8h/H), h = 1..H (Press et al. 2022).

    Where H is no power of two, the slopes of the largest power M below it come first, then every second one of 2M.
    """

    def slopes(heads: int) -> list[float]:
        return [2.0 ** (-8.0 * h / heads) for h in range(1, heads + 1)]

    below = 1 << (num_heads.bit_length() - 1)
    chosen = slopes(below) + slopes(2 * below)[0::2][: num_heads - below]
    return [math.log(2.0) / slope for slope in chosen]
