"""Statistics of evaluations and reports: means over documents, intervals, paired tests. All levels are 95 %."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

Z_95 = 1.959963984540054


def mean_over_documents(sums: np.ndarray, counts: np.ndarray) -> dict[str, Any]:
    """The mean m = sum S_d / sum n_d over the tokens of D documents; documents, not tokens, are the sample.

    Its standard error is the delete-one jackknife's, sqrt((D - 1) / D * sum_d ((S_d - m n_d) / (1 - n_d / N))^2) / N
    with N = sum n_d: a document that is most of the tokens sets m, so its own residual says little. The interval is
    m -+ t error, t Student's quantile at N^2 / sum n_d^2 - 1 degrees of freedom, 1 at least: documents of equal length
    that would weigh as these do (Kish 1965), less one.

    Args:
        sums: (D,) float64, S_d; of paired differences, if it is they whose mean is sought.
        counts: (D,) float64, n_d >= 0; a document with 0 has no part in it.

    Returns:
        {"mean", "standard_error", "interval"}; None for what fewer than two documents, or none, can't tell.
    """
    counts = np.asarray(counts, np.float64)
    there = counts > 0
    documents, total = int(there.sum()), float(counts.sum())
    if not documents:
        return {"mean": None, "standard_error": None, "interval": None}
    mean = float(np.sum(sums) / total)
    if documents < 2:
        return {"mean": mean, "standard_error": None, "interval": None}
    spread = float((((sums - mean * counts)[there] / (1 - counts[there] / total)) ** 2).sum())
    error = math.sqrt((documents - 1) / documents * spread) / total
    half = student_t(max(1, int(total**2 / float((counts**2).sum()) + 1e-9) - 1)) * error
    return {"mean": mean, "standard_error": error, "interval": [mean - half, mean + half]}


@cache
def student_t(freedom: int, level: float = 0.95) -> float:
    """t with P(|T| <= t) = level for Student's T at so many degrees of freedom.

    T = sqrt(freedom) tan(a), the density of the angle a in (-pi/2, pi/2) being proportional to cos(a)^(freedom - 1).
    """
    angle = np.linspace(0, math.pi / 2, 200_001)
    density = np.cos(angle) ** (freedom - 1)
    area = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    return math.sqrt(freedom) * math.tan(float(np.interp(level, area / area[-1], angle)))


def side(interval: list[float] | None) -> int:
    """1 or -1 where an interval lies above or below 0, else 0; 0 without one."""
    low, high = interval or (0.0, 0.0)
    return 1 if low > 0 else -1 if high < 0 else 0


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """The score interval of a share p of n trials (Wilson, JASA 22, 1927).

    (p + z^2 / 2n ± z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    Unlike p ± z sqrt(p (1 - p) / n) it has a width at p = 0 and p = 1.
    """
    middle = share + Z_95**2 / (2 * count)
    spread = Z_95 * math.sqrt(share * (1 - share) / count + Z_95**2 / (4 * count * count))
    scale = 1 + Z_95**2 / count
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def paired_difference(scores: Mapping[str, float], reference: Mapping[str, float]) -> dict[str, Any] | None:
    """The mean of d = score - reference over the documents both have, its standard error sd(d) / sqrt(n), and p.

    p is two-sided: for scores of 0 and 1 McNemar's exact test, the binomial one on the documents of which one model
    has 1 and the other 0; for any others the sign-flip test in its normal approximation, z = sum d / sqrt(sum d^2).

    Args:
        scores: by document.

    Returns:
        {"difference", "standard_error", "p", "documents", "test"}; None without a common document. The error is None
        for a single document.
    """
    documents = sorted(scores.keys() & reference.keys())
    if not documents:
        return None
    ours, theirs = (np.array([values[d] for d in documents], dtype=np.float64) for values in (scores, reference))
    d = ours - theirs
    binary = bool(np.isin(np.concatenate([ours, theirs]), (0.0, 1.0)).all())
    return {
        "difference": float(d.mean()),
        "standard_error": float(d.std(ddof=1) / math.sqrt(len(d))) if len(d) > 1 else None,
        "p": _mcnemar(int((d > 0).sum()), int((d < 0).sum())) if binary else _sign_flip(d),
        "documents": len(d),
        "test": "McNemar, exact" if binary else "sign flips, normal approximation",
    }


def _mcnemar(better: int, worse: int) -> float:
    """P(|X - n/2| >= |better - n/2|) for X binomial(n, 1/2), n = better + worse."""
    n = better + worse
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(min(better, worse) + 1)) / 2**n)


def _sign_flip(d: np.ndarray) -> float:
    spread = math.sqrt(float((d**2).sum()))
    return 1.0 if spread == 0.0 else math.erfc(abs(float(d.sum())) / spread / math.sqrt(2.0))
