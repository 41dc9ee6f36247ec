"""Statistics of needles found: shares with Wilson intervals, mean log-probabilities, grids."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Z_95 = 1.959963984540054


def wilson_interval(share: float, count: int, z: float = Z_95) -> tuple[float, float]:
    """The score interval of a share p of n trials (Wilson, JASA 22, 1927); 95 % by default.

    (p + z^2 / 2n ± z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    Unlike p ± z sqrt(p (1 - p) / n) it has a width at p = 0 and p = 1. For a mean of values in [0, 1] other than 0
    and 1, such as the share of one prompt's values, it is at least as wide as needed, since their variance is at most
    p (1 - p).
    """
    middle = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def by_length(answers: Sequence[dict[str, Any]], lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Per length: prompts, share found with its interval, mean log-probability (nats per token) with its error.

    Prompts, not values or tokens, are the sample; where answers were generated there are no log-probabilities.
    """
    rows = []
    for length in lengths:
        own = [answer for answer in answers if answer["length"] == length]
        share = float(np.mean([answer["share"] for answer in own]))
        low, high = wilson_interval(share, len(own))
        known = [answer["log_probability"] for answer in own if answer["log_probability"] is not None]
        rows.append(
            {
                "length": length,
                "prompts": len(own),
                "found": share,
                "interval": [low, high],
                "log_probability": float(np.mean(known)) if known else None,
                "log_probability_error": float(np.std(known, ddof=1) / math.sqrt(len(known)))
                if len(known) > 1
                else None,
            }
        )
    return rows


def grid(
    answers: Sequence[dict[str, Any]], lengths: Sequence[int], depths: Sequence[float | None]
) -> list[list[float]]:
    """Shares found, depths x lengths."""

    def share(depth: float | None, length: int) -> float:
        own = [a["share"] for a in answers if a["length"] == length and a["depth"] == depth]
        return sum(own) / len(own)

    return [[share(depth, length) for length in lengths] for depth in depths]
