"""Two models on the same documents: the difference of their scores, its standard error, and a paired test."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np


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
    n, least = better + worse, min(better, worse)
    if better == worse:
        return 1.0
    logs = [
        math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) - n * math.log(2) for k in range(least + 1)
    ]
    return min(1.0, 2.0 * math.fsum(map(math.exp, logs)))


def _sign_flip(d: np.ndarray) -> float:
    spread = math.sqrt(float((d**2).sum()))
    return 1.0 if spread == 0.0 else math.erfc(abs(float(d.sum())) / spread / math.sqrt(2.0))
