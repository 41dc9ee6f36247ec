"""What a ring has to move for one batch, as far as documents and windows say: known to all processes beforehand."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

import torch

from retrofox.parallel.layout import Degrees


@dataclass(frozen=True)
class Head:
    """The document that goes on from an earlier chunk into this one: `tokens` of it lie here, it began at `start`."""

    start: int
    tokens: int


@dataclass(frozen=True)
class Sinks:
    """Sink tokens of a document that several chunks share: their places in the row, and in the buffer of all sinks."""

    row: int
    start: int
    positions: tuple[int, ...]
    first: int


@dataclass(frozen=True)
class Item:
    """Keys that one process sends to another: tokens [low, high) of a row, which lie in `chunk`, of some kv heads."""

    row: int
    chunk: int
    low: int
    high: int
    heads: tuple[int, ...]


@dataclass
class RingPlan:
    """Documents and windows of a batch against the chunks of a ring.

    Attributes:
        documents: of each row, where they begin and, last, its length.
        length: tokens of a row; window, sink: those of the layer.
    """

    documents: list[list[int]]
    length: int
    split: Degrees
    window: int | None
    sink: int
    heads: list[list[Head | None]] = field(init=False)
    sinks: dict[tuple[int, int], Sinks] = field(init=False)

    def __post_init__(self) -> None:
        self.chunk = self.length // self.split.chunks
        self.heads = [[self._head(row, a) for a in range(self.split.chunks)] for row in range(len(self.documents))]
        self.sinks, self.num_sinks = {}, 0
        for row, heads in enumerate(self.heads):
            for head in heads:
                if self.sink and head is not None and (row, head.start) not in self.sinks:
                    end = self.documents[row][bisect.bisect_right(self.documents[row], head.start)]
                    positions = tuple(range(head.start, min(head.start + self.sink, end)))
                    self.sinks[row, head.start] = Sinks(row, head.start, positions, self.num_sinks)
                    self.num_sinks += len(positions)
        self._documents_at: dict[tuple[int, int, torch.device], torch.Tensor | None] = {}

    def _head(self, row: int, chunk: int) -> Head | None:
        starts, first = self.documents[row], chunk * self.chunk
        at = bisect.bisect_right(starts, first) - 1
        if starts[at] == first:
            return None
        return Head(starts[at], min(starts[at + 1], first + self.chunk) - first)

    @property
    def local(self) -> bool:
        """Whether no document reaches over a chunk's end: nothing is moved."""
        return all(head is None for heads in self.heads for head in heads)

    def low(self, row: int, queries: int, keys: int) -> int | None:
        """The first key of chunk `keys` that some query of chunk `queries` may see, sinks aside; None: none."""
        head = self.heads[row][queries]
        if head is None or keys >= queries:
            return None
        low = max(keys * self.chunk, head.start + self.sink)
        if self.window is not None:
            low = max(low, queries * self.chunk - self.window + 1)
        return low if low < (keys + 1) * self.chunk else None

    def own_low(self, row: int, chunk: int) -> int:
        """The first key of a chunk that the head document's queries in it see beside the sinks."""
        head = self.heads[row][chunk]
        assert head is not None, "asked for a chunk that begins with a document of its own"
        return max(chunk * self.chunk, head.start + self.sink)

    def possible(self) -> torch.Tensor:
        """(rows, chunks of queries, chunks of keys) bool: whether `low` is a position."""
        chunks = range(self.split.chunks)
        found = [[[self.low(row, a, b) is not None for b in chunks] for a in chunks] for row in range(len(self.heads))]
        return torch.tensor(found)

    def items(self, sender: int, receiver: int, needed: torch.Tensor) -> list[Item]:
        """What a place on the ring sends to another; needed (rows, chunks, chunks, kv heads) bool, on the CPU."""
        found = []
        for row in range(len(self.heads)):
            for b in self.split.chunks_of(sender):
                asking = [a for a in self.split.chunks_of(receiver) if a > b and bool(needed[row, a, b].any())]
                if asking:
                    heads = needed[row, asking, b].any(0).nonzero()[:, 0].tolist()
                    low = min(low for a in asking if (low := self.low(row, a, b)) is not None)
                    found.append(Item(row, b, low, (b + 1) * self.chunk, tuple(heads)))
        return found

    def rest(self, row: int, chunk: int, device: torch.device) -> tuple[int, torch.Tensor | None]:
        """(tokens of the head document, cu_seqlens of the documents that begin in a chunk, None for a single one)."""
        head = self.heads[row][chunk]
        begin = chunk * self.chunk + (0 if head is None else head.tokens)
        if (row, chunk, device) not in self._documents_at:
            end = (chunk + 1) * self.chunk
            inside = [start - begin for start in self.documents[row] if begin < start < end]
            bounds = [0, *inside, end - begin]
            cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device) if inside else None
            self._documents_at[row, chunk, device] = cu_seqlens
        return begin - chunk * self.chunk, self._documents_at[row, chunk, device]

    def follows(self, row: int, chunk: int) -> list[int]:
        """Chunks behind one into which its last document goes on."""
        found, a = [], chunk + 1
        while a < self.split.chunks and self.heads[row][a] is not None:
            found.append(a)
            head = self.heads[row][a]
            assert head is not None, "just looked at"
            if head.tokens < self.chunk:
                break
            a += 1
        return found
