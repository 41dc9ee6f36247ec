"""Means over documents, intervals and paired tests, against their definitions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from retrofox.evaluation.statistics import mean_over_documents, paired_difference, student_t, wilson_interval


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.7062), (2, 4.3027), (7, 2.3646), (99, 1.9842)])
def test_students_quantiles_are_the_published_ones(freedom, quantile):
    assert student_t(freedom) == pytest.approx(quantile, abs=1e-3)


def test_a_mean_takes_documents_as_the_sample():
    found = mean_over_documents(np.array([11.0, 10.0, 0.0]), np.array([4.0, 2.0, 0.0]))
    without = [10 / 2, 11 / 4]  # the first, the second
    error = math.sqrt(1 / 2 * sum((mean - 21 / 6) ** 2 for mean in without))
    assert (found["mean"], found["standard_error"]) == (pytest.approx(21 / 6), pytest.approx(error))
    assert found["interval"] == pytest.approx([21 / 6 - 12.7062 * error, 21 / 6 + 12.7062 * error], rel=1e-4)
    alike = np.array([1.0, 4.0, 5.0, 2.0])
    found = mean_over_documents(2 * alike, np.full(4, 2.0))
    error = float(alike.std(ddof=1) / 2)
    assert found["standard_error"] == pytest.approx(error)
    assert found["interval"] == pytest.approx([3 - student_t(3) * error, 3 + student_t(3) * error])


def test_a_note_beside_a_book_makes_no_clear_difference():
    draw = np.random.default_rng(0)
    missed = []
    for _ in range(400):  # no difference but that of documents, and noise of tokens
        counts = np.array([32768.0, *[500.0] * 20])
        sums = counts * draw.normal(0, 0.02, 21) + np.sqrt(counts) * draw.normal(0, 0.5, 21)
        low, high = mean_over_documents(sums, counts)["interval"]
        missed.append(low > 0 or high < 0)
    assert sum(missed) <= 0.05 * len(missed)


def test_too_few_documents_give_no_interval():
    assert mean_over_documents(np.array([4.0]), np.array([2])) == {"mean": 2, "standard_error": None, "interval": None}
    assert mean_over_documents(np.zeros(1), np.zeros(1))["mean"] is None


@pytest.mark.parametrize(
    ("share", "count", "low", "high"),
    [(0.0, 10, 0.0, 0.2775), (1.0, 10, 0.7225, 1.0), (0.5, 10, 0.2366, 0.7634), (0.9, 100, 0.8256, 0.9448)],
)
def test_wilson_intervals_are_the_published_ones(share, count, low, high):
    assert wilson_interval(share, count) == pytest.approx((low, high), abs=1e-4)


def test_differences_are_paired_by_document():
    ours, theirs = {str(n): float(n % 4 == 0) for n in range(20)}, {str(n): float(n % 4 < 2) for n in range(20)}
    found: Any = paired_difference(ours, theirs)
    d = np.array([ours[k] - theirs[k] for k in ours])
    assert found["difference"] == pytest.approx(-0.25)
    assert found["standard_error"] == pytest.approx(d.std(ddof=1) / math.sqrt(20))
    assert paired_difference({"a": 1.0}, {"b": 1.0}) is None


@pytest.mark.parametrize(("better", "worse", "p"), [(5, 0, 2 * 0.5**5), (0, 0, 1), (2, 1, 1), (3000, 3000, 1)])
def test_shares_are_tested_by_mcnemar(better, worse, p):
    ours = {str(n): float(n < better) for n in range(better + worse + 3)}
    theirs = {str(n): float(better <= n < better + worse) for n in range(better + worse + 3)}
    found: Any = paired_difference(ours, theirs)
    assert (found["p"], found["test"]) == (pytest.approx(p), "McNemar, exact")


def test_other_scores_are_tested_by_sign_flips():
    found: Any = paired_difference({str(n): 0.1 * n + 0.3 for n in range(50)}, {str(n): 0.1 * n for n in range(50)})
    assert (found["difference"], found["test"]) == (pytest.approx(0.3), "sign flips, normal approximation")
    assert found["p"] == pytest.approx(math.erfc(math.sqrt(50) / math.sqrt(2)), rel=1e-6)
