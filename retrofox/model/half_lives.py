"""Half-lives of forget gates in tokens: the gate bias that has one, and those with which a layer's heads start."""

from __future__ import annotations

import math
from typing import Any

OPEN_BIAS = 30.0
"""Gate bias of `init="open"`: log f = -1e-13 per token, below float32's resolution of a logit at any length. Such a
gate is saturated and hardly trains: it is for proofs and ablations; to train from nearly open, take long half-lives."""


def bias_from_half_life(half_life_tokens: float) -> float:
    """Gate bias b with sigmoid(b)^half_life = 1/2: b = -ln(expm1(ln 2 / half_life))."""
    decay = math.log(2.0) / half_life_tokens
    return -decay - math.log(-math.expm1(-decay))  # without e^decay, which is too large a number under a thousandth


def half_life_ladder(num_heads: int, half_life: tuple[float, float]) -> list[float]:
    """Half-lives in tokens, log-spaced from shortest to longest over the heads of a layer (one head: the longest)."""
    low, high = half_life
    if num_heads == 1:
        return [high]
    shares = [h / (num_heads - 1) for h in range(num_heads)]
    return [low ** (1 - share) * high**share for share in shares]


def half_life_of_time_constants(t_min: Any, t_max: Any, half_life: object = None) -> tuple[float, float]:
    """(t_min ln 2, t_max ln 2): the half-lives of gates with f = exp(-1/T), T from t_min to t_max tokens.

    Raises:
        ValueError: one of them is missing or no number, t_min is above t_max, or a half-life is given as well.
    """
    if half_life is not None:
        raise ValueError(
            f"give half_life, or t_min and t_max (half-life = T ln 2), not both: got half_life {half_life}, "
            f"t_min {t_min}, t_max {t_max}"
        )
    numbers = all(isinstance(t, (int, float)) and not isinstance(t, bool) for t in (t_min, t_max))
    if not numbers or not (0 < t_min <= t_max and math.isfinite(t_max)):
        raise ValueError(
            "t_min and t_max, time constants in tokens, belong together and must be numbers, 0 < t_min <= t_max, "
            f"finite; got t_min {t_min!r} and t_max {t_max!r}"
        )
    return t_min * math.log(2.0), t_max * math.log(2.0)


def alibi_half_lives(num_heads: int) -> list[float]:
    """Half-lives in tokens, ln 2 / slope, of ALiBi's slopes 2^(-8h/H), h = 1..H (Press et al. 2022).

    Where H is no power of two, the slopes of the largest power M below it come first, then every second one of 2M.
    """

    def slopes(heads: int) -> list[float]:
        return [2.0 ** (-8.0 * h / heads) for h in range(1, heads + 1)]

    below = 1 << (num_heads.bit_length() - 1)
    chosen = slopes(below) + slopes(2 * below)[0::2][: num_heads - below]
    return [math.log(2.0) / slope for slope in chosen]
