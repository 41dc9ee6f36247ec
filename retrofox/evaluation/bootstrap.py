"""Intervals over documents: resampled documents, Student's t for few of them."""

from __future__ import annotations

import math
from functools import cache

import numpy as np

RESAMPLES = 2000


class Bootstrap:
    """Documents drawn with replacement, the same draws for every number, so that differences are paired.

    A number theta is a ratio of sums over documents, sum S_d / sum n_d. With s the standard deviation of theta over
    the draws, the interval at level 95 % is theta -+ t s sqrt(D / (D - 1)), t Student's quantile at D - 1 degrees of
    freedom, D the documents that have the number: plain percentiles are too narrow for a handful of documents
    (Hesterberg, "What Teachers Should Know About the Bootstrap", 2015, section 4).
    """

    def __init__(self, documents: int, resamples: int = RESAMPLES, seed: int = 0):
        self.weights = _weights(documents, resamples, seed)

    def ratio(self, sums: np.ndarray, counts: np.ndarray) -> dict[str, float | list[float] | None]:
        """{"mean", "interval"} of sum S_d / sum n_d over documents.

        Args:
            sums: (D,) float64, S_d.
            counts: (D,) float64, n_d >= 0; a document with 0 has no part in it.

        Returns:
            The interval as [low, high]; None with fewer than two documents, and "mean" None with none at all.
        """
        there = np.asarray(counts) > 0
        documents = int(there.sum())
        if not documents:
            return {"mean": None, "interval": None}
        mean = float(np.sum(sums) / np.sum(counts))
        if documents < 2:
            return {"mean": mean, "interval": None}
        drawn = self.weights[:, there].sum(1) > 0
        draws = (self.weights[drawn] @ sums) / (self.weights[drawn] @ counts)
        half = student_t(documents - 1) * float(draws.std()) * math.sqrt(documents / (documents - 1))
        return {"mean": mean, "interval": [mean - half, mean + half]}


@cache
def _weights(documents: int, resamples: int, seed: int) -> np.ndarray:
    """(resamples, documents) float64: how often every document is drawn."""
    draw = np.random.default_rng(seed)
    return draw.multinomial(documents, np.full(documents, 1 / documents), resamples).astype(np.float64)


@cache
def student_t(freedom: int, level: float = 0.95) -> float:
    """t with P(|T| <= t) = level for Student's T at so many degrees of freedom.

    T = sqrt(freedom) tan(a), the density of the angle a in (-pi/2, pi/2) being proportional to cos(a)^(freedom - 1).
    """
    angle = np.linspace(0, math.pi / 2, 200_001)
    density = np.cos(angle) ** (freedom - 1)
    area = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(freedom) * math.tan(float(np.interp(level, area / area[-1], angle)))


def trend(interval: list[float] | None) -> str | None:
    """ "rising" or "falling" where a slope's interval leaves out 0, "flat" where it does not; None without one."""
    if interval is None:
        return None
    low, high = interval
    return "rising" if low > 0 else "falling" if high < 0 else "flat"
