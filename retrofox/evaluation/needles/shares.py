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

    Unlike p ± z sqrt(p (1 - p) / n) it has a width at p = 0 and p = 1.
    """
    middle = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def by_length(answers: Sequence[dict[str, Any]], lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Per length: prompts, share found with its interval, mean log-probability (nats per token) with its error.

    Prompts, not tokens, are the sample.
    """
    rows = []
    for length in lengths:
        own = [answer for answer in answers if answer["length"] == length]
        share = float(np.mean([answer["found"] for answer in own]))
        log_p = [answer["log_probability"] for answer in own]
        error = float(np.std(log_p, ddof=1) / math.sqrt(len(own))) if len(own) > 1 else None
        interval = list(wilson_interval(share, len(own)))
        row = {"length": length, "prompts": len(own), "found": share, "interval": interval}
        rows.append({**row, "log_probability": float(np.mean(log_p)), "log_probability_error": error})
    return rows


def grid(answers: Sequence[dict[str, Any]], lengths: Sequence[int], depths: Sequence[float]) -> list[list[float]]:
    """Shares found, depths x lengths."""
    return [
        [float(np.mean([a["found"] for a in answers if (a["length"], a["depth"]) == (n, d)])) for n in lengths]
        for d in depths
    ]
