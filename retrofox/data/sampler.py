"""The order of training windows as a function of their number: nothing is stored but how many were consumed.

Global sample g goes to the same window whatever the number of GPUs, workers or interruptions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np

ORDERING = 2
"""Version of the order: a run that began with another is refused."""
ROUNDS = 8
SMALL = 256
_MASK = (1 << 64) - 1


def _mix(value: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele et al. 2014) on uint64."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def permute(position: np.ndarray, n: int, key: np.ndarray) -> np.ndarray:
    """A permutation of 0..n-1 at the given positions, chosen by `key` (uint64, one per position).

    A Feistel network over 2^(2h) >= n, walked until the value lies below n: four times at most on average (Black and
    Rogaway 2002, "Ciphers with arbitrary finite domains"). Up to SMALL, where few bits would leave few permutations,
    the order of n hashes.
    """
    if n <= SMALL:
        keys, which = np.unique(key, return_inverse=True)
        noise = _mix(_mix(keys)[:, None] + np.arange(n, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
        return np.argsort(noise, axis=1, kind="stable")[which, position]
    half = np.uint64(-(-(n - 1).bit_length() // 2))
    mask = np.uint64((1 << int(half)) - 1)
    value, todo = position.astype(np.uint64), np.arange(len(position))
    result = np.empty(len(position), dtype=np.int64)
    rounds = [np.uint64((0x9E3779B97F4A7C15 * (number + 1)) & _MASK) for number in range(ROUNDS)]
    while len(todo):
        left, right, keys = value >> half, value & mask, key[todo]
        for constant in rounds:
            left, right = right, left ^ (_mix(right + keys + constant) & mask)
        value = (left << half) | right
        inside = value < np.uint64(n)
        result[todo[inside]] = value[inside].astype(np.int64)
        value, todo = value[~inside], todo[~inside]
    return result


def _keys(seed: int, stream: int, epoch: np.ndarray) -> np.ndarray:
    base = np.array([(seed & _MASK), stream], dtype=np.uint64)
    mixed = _mix(_mix(base[:1] + np.uint64(0x9E3779B97F4A7C15)) ^ _mix(base[1:] + np.uint64(0xD1B54A32D192ED03)))
    return _mix(mixed ^ _mix(epoch.astype(np.uint64) + np.uint64(0x8CB92BA72F3D8DD7)))


class Order:
    """A seeded permutation of n samples, another one each epoch, in O(1) time and memory for each number."""

    def __init__(self, n: int, seed: int = 0, stream: int = 0):
        assert n > 0
        self.n, self.seed, self.stream = n, seed, stream

    def take(self, numbers: np.ndarray) -> np.ndarray:
        """Samples at global numbers (int64): epoch g // n, position g % n of its permutation."""
        numbers = np.asarray(numbers, dtype=np.int64)
        epoch, position = np.divmod(numbers, self.n)
        return permute(position, self.n, _keys(self.seed, self.stream, epoch))


class Mixture:
    """Windows of several sources in given shares: exact in the limit, and in every block up to rounding.

    Numbers come in blocks of M. Sources 1..j together have floor(b M P_j) draws before block b, P_j being their summed
    share as an exact fraction; within a block the sources are permuted; a source's k-th draw is its own Order at k, so
    that none of its windows comes again before all have come.
    """

    def __init__(self, counts: Sequence[int], shares: Sequence[float], seed: int = 0):
        assert len(counts) == len(shares) > 0
        assert min(shares) > 0
        exact = [Fraction(float(share)) for share in shares]
        total = sum(exact)
        self.shares = [share / total for share in exact]
        self.summed = [sum(self.shares[: j + 1], Fraction(0)) for j in range(len(counts))]
        needed = max(1024, 4 / min(self.shares))
        self.block = 1 << (int(needed) - 1).bit_length()
        self.seed = seed
        self.orders = [Order(count, seed, stream) for stream, count in enumerate(counts)]
        self.offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.latest: tuple[int, np.ndarray, np.ndarray] | None = None  # numbers come one after the other

    def epochs(self, samples: int) -> float:
        """How many times so many samples go through the source that comes round most often."""
        pairs = zip(self.orders, self.shares, strict=True)
        return max(float(samples * share / order.n) for order, share in pairs)

    def _before(self, block: int) -> list[int]:
        """Draws of each source before a block."""
        summed = [int(block * self.block * share) for share in self.summed]
        return [now - before for now, before in zip(summed, [0, *summed[:-1]], strict=True)]

    def _places(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """(source, number among that source's draws) of each place in a block, (block,) int64 each."""
        if self.latest is None or self.latest[0] != block:
            before, after = self._before(block), self._before(block + 1)
            ends = np.cumsum([late - early for early, late in zip(before, after, strict=True)])
            keys = _keys(self.seed, len(self.orders), np.full(self.block, block))
            source = np.searchsorted(ends, permute(np.arange(self.block), self.block, keys), side="right")
            draw = np.empty(self.block, dtype=np.int64)
            for j, first in enumerate(before):
                mine = np.flatnonzero(source == j)
                draw[mine] = first + np.arange(len(mine))
            self.latest = (block, source, draw)
        return self.latest[1:]

    def take(self, numbers: np.ndarray) -> np.ndarray:
        """Dataset indices at global numbers: the sources' windows one source after the other."""
        numbers = np.asarray(numbers, dtype=np.int64)
        result = np.empty(len(numbers), dtype=np.int64)
        blocks, place = np.divmod(numbers, self.block)
        for block in np.unique(blocks).tolist():
            here = np.flatnonzero(blocks == block)
            sources, draws = (values[place[here]] for values in self._places(block))
            for j in np.unique(sources).tolist():
                mine = sources == j
                result[here[mine]] = self.offsets[j] + self.orders[j].take(draws[mine])
        return result


class StepSampler:
    """Index batches of one rank: of global samples consumed, consumed + 1, ... each step takes batch_size * world.

    Rank r takes those at consumed + (step * world + r) * batch_size + (0 .. batch_size - 1), so a step's samples are
    the same for every world that has the same global batch. Serves as a DataLoader's `batch_sampler`.
    """

    def __init__(self, order: Mixture, batch_size: int, consumed: int = 0, rank: int = 0, world: int = 1):
        assert batch_size > 0
        assert 0 <= rank < world
        self.order, self.batch_size, self.consumed = order, batch_size, consumed
        self.rank, self.world = rank, world

    def __iter__(self) -> Iterator[list[int]]:
        inside = np.arange(self.batch_size)
        for step in itertools.count():
            first = self.consumed + (step * self.world + self.rank) * self.batch_size
            yield self.order.take(first + inside).tolist()
