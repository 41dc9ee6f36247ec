"""Packing documents into windows of the training length: whole windows first, the rest best-fit.

A document longer than the window T gives floor(L / T) windows of its own; its remainder and every shorter document are
packed best-fit-decreasing, each whole. The tail that nothing fits is padding. Windows of single tokens only, each of
another document, hold nothing to predict and are left out. Best-fit packing for language models:
Ding et al. 2024, "Fewer Truncations Improve Language Modeling", arXiv 2404.10830; here whole classes of equal lengths
at a time instead of one by one.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np

PACKING = 2
"""Version of the packing: part of every fingerprint."""


@dataclass(frozen=True)
class Packing:
    """Which tokens lie in which window: window w holds segments rows[w] .. rows[w + 1] - 1.

    start (S,) int64: a segment's first token in the source's stream; length (S,) int32; rows (windows + 1,) int64.
    """

    start: np.ndarray
    length: np.ndarray
    rows: np.ndarray

    def __len__(self) -> int:
        return len(self.rows) - 1

    @property
    def tokens(self) -> int:
        """Tokens in all windows, padding not counted."""
        return int(self.length.sum(dtype=np.int64))


def best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """The bin of each item by best-fit-decreasing, ties by position.

    Items of one length go to the fullest bins that take them; a bin then takes floor(room / length) of them, which is
    what best fit does one by one, so a whole class of equally full bins is filled in one step.

    Args:
        lengths: (N,) integers in 1..capacity.

    Returns:
        bins (N,) int64, and their number.
    """
    order = np.argsort(-lengths, kind="stable")
    ranked = lengths[order]
    cuts = np.flatnonzero(np.diff(ranked)) + 1
    starts, stops = np.concatenate([[0], cuts]), np.concatenate([cuts, [len(ranked)]])
    placed = np.empty(len(lengths), dtype=np.int64)
    classes: dict[int, np.ndarray] = {}  # room left -> bins
    rooms: list[int] = []  # the keys of classes, ascending
    count = 0

    def put(room: int, bins: np.ndarray) -> None:
        if room and len(bins):
            if room in classes:
                classes[room] = np.concatenate([classes[room], bins])
            else:
                classes[room] = bins
                bisect.insort(rooms, room)

    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True) if len(ranked) else ():
        length = int(ranked[start])
        while start < stop:
            at = bisect.bisect_left(rooms, length)
            if at < len(rooms):
                room = rooms.pop(at)
                bins = classes.pop(room)
            else:
                room, each = capacity, capacity // length
                bins = np.arange(count, count + -(-(stop - start) // each))
                count += len(bins)
            each = room // length
            used = min(len(bins), -(-(stop - start) // each))
            taken = min(used * each, stop - start)
            placed[start : start + taken] = np.repeat(bins[:used], each)[:taken]
            start += taken
            last = taken - (used - 1) * each  # items in the last bin used
            put(room, bins[used:])
            put(room - each * length, bins[: used - 1])
            put(room - last * length, bins[used - 1 : used])
    bins_of = np.empty(len(lengths), dtype=np.int64)
    bins_of[order] = placed
    return bins_of, count


def pack(bounds: np.ndarray, window: int, name: str = "") -> Packing:
    """The packing of documents bounds[d] .. bounds[d + 1] of a stream, (D + 1,) int64; window at least 2.

    Raises:
        ValueError: documents of one token hold no target.
    """
    assert window > 1
    lengths = np.diff(bounds)
    whole, rest = np.divmod(lengths, window)
    windows = int(whole.sum())
    first = np.repeat(bounds[:-1], whole)
    number = np.arange(windows) - np.repeat(np.cumsum(whole) - whole, whole)  # 0, 1, ... within each document
    left = np.flatnonzero(rest)
    bins, count = best_fit(rest[left], window)
    order = np.argsort(bins, kind="stable")
    start = np.concatenate([first + number * window, (bounds[:-1] + whole * window)[left][order]])
    length = np.concatenate([np.full(windows, window), rest[left][order]]).astype(np.int32)
    sizes = np.concatenate([np.ones(windows, dtype=np.int64), np.bincount(bins, minlength=count)])
    if len(sizes):
        kept = np.maximum.reduceat(length, np.cumsum(sizes) - sizes) > 1
        if not kept.all():
            start, length, sizes = start[np.repeat(kept, sizes)], length[np.repeat(kept, sizes)], sizes[kept]
    if not len(sizes):
        raise ValueError(f"{name}: no document has two tokens, so there is nothing to predict")
    rows = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes, dtype=np.int64)])
    return Packing(start.astype(np.int64), length, rows)
