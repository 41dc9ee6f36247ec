"""Packing documents into windows of the training length: whole windows first, the rest best-fit.

A document longer than the window T gives floor(L / T) windows of its own; its remainder and every shorter document are
packed best-fit-decreasing, each whole. The tail that nothing fits is padding. Windows of single tokens only, each of
another document, hold nothing to predict and are left out. Best-fit packing for language models:
Ding et al. 2024, "Fewer Truncations Improve Language Modeling", arXiv 2404.10830.
"""

from __future__ import annotations

import bisect
import collections
from dataclasses import dataclass

import numpy as np

PACKING = 2
"""Version of the packing: a run that began with another is refused."""


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
    """The bin of each item by best-fit-decreasing, ties by position: an item goes into the fullest bin that takes it.

    Args:
        lengths: (N,) integers in 1..capacity.

    Returns:
        bins (N,) int64, and their number.
    """
    bins_of = np.empty(len(lengths), dtype=np.int64)
    bins: dict[int, collections.deque[int]] = {}  # room left -> bins, the oldest first
    rooms: list[int] = []  # the keys of `bins`, ascending
    count = 0
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        at = bisect.bisect_left(rooms, length)
        if at < len(rooms):
            room = rooms[at]
            chosen = bins[room].popleft()
            if not bins[room]:
                del bins[rooms.pop(at)]
        else:
            room, chosen, count = capacity, count, count + 1
        bins_of[item] = chosen
        if left := room - length:
            if left not in bins:
                bisect.insort(rooms, left)
            bins.setdefault(left, collections.deque()).append(chosen)
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
