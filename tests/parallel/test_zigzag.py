"""Which tokens each process holds, and which keys its queries get, without a second process."""

from __future__ import annotations

import pytest

from retrofox.parallel.layout import Degrees, degrees
from retrofox.parallel.zigzag import pieces

LENGTH = 48
DOCUMENTS = [[0, LENGTH], [0, 5, 6, 25, 40, LENGTH], [0, 12, 24, 30, LENGTH], [0, 47, LENGTH]]


@pytest.mark.parametrize("split", [Degrees(1, 2), Degrees(2, 2), Degrees(3, 2), Degrees(2, 1), Degrees(1, 3)])
def test_processes_hold_every_token_once_and_equally_many(split):
    length = 24 * split.unit
    held = [[t for s in split.segments(p, length) for t in range(*s)] for p in range(split.context)]
    assert sorted(t for tokens in held for t in tokens) == list(range(length))
    assert {len(tokens) for tokens in held} == {length // split.context}
    assert sorted(c for place in range(split.zigzag) for c in split.chunks_of(place)) == list(range(split.chunks))
    # A pair of chunks, one early and one late: all places have as many earlier chunks to see.
    assert len({sum(split.chunks_of(place)) for place in range(split.zigzag)}) == 1


def test_heads_are_traded_as_far_as_they_divide():
    assert degrees(8, 6) == Degrees(2, 4)
    assert degrees(4, 8) == Degrees(4, 1)


@pytest.mark.parametrize("documents", DOCUMENTS, ids=str)
def test_queries_get_the_keys_of_their_own_documents(documents):
    for first in range(0, LENGTH, 8):
        seen = {}
        for piece in pieces(documents, first, first + 8):
            bounds = piece.bounds or [0, piece.last - piece.first_key]
            assert piece.first_key + bounds[-1] == piece.last
            for query in range(piece.first, piece.last):
                seen[query] = piece.first_key + max(start for start in bounds if piece.first_key + start <= query)
        begun = {query: max(start for start in documents if start <= query) for query in range(first, first + 8)}
        assert seen == begun
