"""Packing: best fit to the letter, nothing lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrofox.data.pack import best_fit, pack


def one_by_one(lengths: list[int], capacity: int) -> list[int]:
    """Best-fit-decreasing as in a textbook: the room left in each item's bin before it, in order of placement."""
    rooms: list[int] = []
    fits = []
    for length in sorted(lengths, reverse=True):
        room = min((room for room in rooms if room >= length), default=None)
        if room is None:
            room = capacity
            rooms.append(capacity)
        fits.append(room)
        rooms[rooms.index(room)] -= length
    return sorted(rooms)


@settings(deadline=None, max_examples=200)
@given(capacity=st.integers(2, 40), data=st.data())
def test_best_fit_is_the_textbooks(capacity, data):
    lengths = data.draw(st.lists(st.integers(1, capacity), max_size=80))
    bins, count = best_fit(np.array(lengths, dtype=np.int64), capacity)
    loads = np.bincount(bins, weights=lengths, minlength=count).astype(int)
    assert sorted((capacity - loads).tolist()) == one_by_one(lengths, capacity)


@settings(deadline=None, max_examples=100)
@given(lengths=st.lists(st.integers(1, 100), min_size=1, max_size=60), window=st.integers(2, 33))
def test_plans_cover_each_token_once_and_split_only_long_documents(lengths, window):
    lengths = [2, *lengths]
    bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    plan = pack(bounds, window)
    covered = np.concatenate([np.arange(s, s + n) for s, n in zip(plan.start, plan.length, strict=True)])
    missing = np.setdiff1d(np.arange(bounds[-1]), covered)
    assert len(np.unique(covered)) == len(covered) == bounds[-1] - len(missing)
    assert np.all(np.maximum.reduceat(plan.length, plan.rows[:-1]) > 1)  # every window has something to predict
    owner = np.searchsorted(bounds, missing, side="right") - 1
    assert np.all((missing - bounds[owner]) % window == 0)  # left out: single tokens, which have nothing to predict
    assert np.all(bounds[owner + 1] - missing == 1)
    assert np.all(np.add.reduceat(plan.length, plan.rows[:-1]) <= window)
    document = np.searchsorted(bounds, plan.start, side="right") - 1
    pieces = np.bincount(document, minlength=len(lengths))
    pieces += np.bincount(owner, minlength=len(lengths))
    assert np.array_equal(pieces, -(-np.array(lengths) // window))
    assert np.all(bounds[document + 1] >= plan.start + plan.length)


def test_windows_without_anything_to_predict_are_left_out():
    plan = pack(np.array([0, 9, 10, 11], dtype=np.int64), 8)  # 8 + 1, 1, 1: the single tokens would fill a window
    assert (len(plan), plan.tokens) == (1, 8)
    with pytest.raises(ValueError, match=r"a.jsonl: no document has two tokens"):
        pack(np.array([0, 1, 2, 2], dtype=np.int64), 8, "a.jsonl")
