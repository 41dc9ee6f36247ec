"""What a ring moves, against all pairs of tokens counted one by one, without a second process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from retrofox.parallel.layout import Degrees, degrees
from retrofox.parallel.offsets import Summary
from retrofox.parallel.plan import RingPlan
from retrofox.parallel.previous_token import _ends, _holder

LENGTH = 48
DOCUMENTS = [[0, LENGTH], [0, 5, 6, 25, 40, LENGTH], [0, 12, 24, 30, LENGTH], [0, 47, LENGTH]]


@pytest.mark.parametrize("split", [Degrees(1, 2), Degrees(2, 2), Degrees(3, 2), Degrees(2, 1), Degrees(1, 3)])
def test_processes_hold_every_token_once_and_equally_many(split):
    length = 24 * split.unit
    held = [[t for s in split.segments(p, length) for t in range(*s)] for p in range(split.context)]
    assert sorted(t for tokens in held for t in tokens) == list(range(length))
    assert {len(tokens) for tokens in held} == {length // split.context}
    assert sorted(c for place in range(split.ring) for c in split.chunks_of(place)) == list(range(split.chunks))
    # A pair of chunks, one early and one late: all places have as many earlier chunks to see.
    assert len({sum(split.chunks_of(place)) for place in range(split.ring)}) == 1
    everyone = [split.segments(p, length) for p in range(split.context)]
    for segments in everyone:
        assert _ends(segments)[-1] == length // split.context
        for start, _ in segments:
            holder = _holder(everyone, start)
            assert (holder is None) == (start == 0)
            assert holder is None or everyone[holder[0]][holder[1]][1] == start


def test_heads_are_traded_as_far_as_they_divide():
    assert degrees(8, 6) == Degrees(2, 4)
    assert degrees(4, 8) == Degrees(4, 1)
    assert degrees(8, 8, ulysses=2) == Degrees(2, 4)
    for context, heads in ((8, 9), (9, 6)):
        with pytest.raises(ValueError, match=r"parallel\.ulysses: 2 must divide both"):
            degrees(context, heads, ulysses=2)


def ring_of(documents, window=None, sink=0, ring=3) -> RingPlan:
    return RingPlan(documents, LENGTH, Degrees(1, ring), window, sink)


def document(starts: list[int], token: int) -> int:
    return max(start for start in starts if start <= token)


@pytest.mark.parametrize("window", [None, 1, 7, 20])
@pytest.mark.parametrize("sink", [0, 1, 3])
def test_keys_that_queries_of_other_chunks_see_are_the_ones_counted(window, sink):
    plan = ring_of(DOCUMENTS, window, sink)
    for row, starts in enumerate(DOCUMENTS):
        for a in range(plan.split.chunks):
            queries = range(a * plan.chunk, (a + 1) * plan.chunk)
            for b in range(plan.split.chunks):
                keys = range(b * plan.chunk, (b + 1) * plan.chunk)
                seen = [
                    j
                    for i in queries
                    for j in keys
                    if b < a and document(starts, i) == document(starts, j) <= j - sink
                    if window is None or i - j < window
                ]
                assert plan.low(row, a, b) == (min(seen) if seen else None), (row, a, b)
            head = plan.heads[row][a]
            going_on = [i for i in queries if document(starts, i) < a * plan.chunk]
            assert (0 if head is None else head.tokens) == len(going_on)
            tokens, bounds = plan.rest(row, a, torch.device("cpu"))
            assert tokens == len(going_on)
            inside = [s for s in starts if queries[0] + tokens < s <= queries[-1]]
            wanted = [s - queries[0] - tokens for s in inside]
            assert (None if bounds is None else bounds.tolist()[1:-1]) == (wanted or None)
            if head is not None:
                assert plan.own_low(row, a) == max(queries[0], head.start + sink)
            last = document(starts, queries[-1])
            beyond = [c for c in range(a + 1, plan.split.chunks) if document(starts, c * plan.chunk) == last]
            beyond = [c for c in beyond if last < c * plan.chunk]
            assert plan.follows(row, a) == beyond
    shared = {(row, head.start) for row, heads in enumerate(plan.heads) for head in heads if head is not None}
    assert set(plan.sinks) == (shared if sink else set())
    numbers = [s.first + n for s in plan.sinks.values() for n in range(len(s.positions))]
    assert sorted(numbers) == list(range(plan.num_sinks))


def test_what_is_sent_reaches_from_the_first_key_that_anyone_asks_for():
    plan = ring_of(DOCUMENTS, window=30)
    needed = plan.possible()[..., None].expand(-1, -1, -1, 2).clone()
    needed[0, 1, 0, 0] = needed[0, 4, 0, 1] = False  # the chunks at place 1 need one head each of the first
    for sender in range(3):
        for receiver in range(3):
            asked = {
                (row, b): {
                    h for a in plan.split.chunks_of(receiver) for h in range(2) if a > b and needed[row, a, b, h]
                }
                for row in range(len(DOCUMENTS))
                for b in plan.split.chunks_of(sender)
            }
            items = plan.items(sender, receiver, needed)
            wanted = {key: heads for key, heads in asked.items() if heads}
            assert {(i.row, i.chunk): set(i.heads) for i in items} == wanted
            for item in items:
                asking = [a for a in plan.split.chunks_of(receiver) if needed[item.row, a, item.chunk].any()]
                lows = [plan.low(item.row, a, item.chunk) for a in asking if a > item.chunk]
                assert item.low == min(low for low in lows if low is not None)
                assert item.high == (item.chunk + 1) * plan.chunk


def summary_of(plan: RingPlan, log_f: torch.Tensor, kv_heads: int, horizon: float | None) -> Summary:
    """What the first of the ring's processes knows after the exchange."""

    def held(place: int) -> torch.Tensor:
        return torch.cat([log_f[:, c * plan.chunk : (c + 1) * plan.chunk] for c in plan.split.chunks_of(place)], 1)

    everyone = [held(place).unflatten(1, (-1, plan.chunk)).sum(2) for place in range(plan.split.ring)]

    def gathered(mine: torch.Tensor, ring_only: bool) -> torch.Tensor:
        assert torch.equal(mine, everyone[0])
        return torch.stack(everyone)

    traffic = SimpleNamespace(hops=0, hops_saved=0)
    mesh: Any = SimpleNamespace(degrees=plan.split, gathered=gathered, ring_rank=0, traffic=traffic)
    return Summary(mesh, plan, held(0), kv_heads, horizon)


def test_keys_come_unless_a_horizon_hides_them_from_all_queries_of_a_chunk():
    generator = torch.Generator().manual_seed(5)
    heads, kv_heads, horizon = 16, 8, 6.0
    rates = torch.logspace(-2, 0.7, heads, dtype=torch.float64)[torch.randperm(heads, generator=generator)]
    log_f = -rates.expand(1, LENGTH, heads) * (0.8 + 0.4 * torch.rand(1, LENGTH, 1, generator=generator).double())
    plan = ring_of([[0, LENGTH]])
    summary = summary_of(plan, log_f, kv_heads, horizon)
    needed, possible = summary.needed[0], plan.possible()[0]
    assert needed[possible].any()
    assert not needed[possible].all()
    c = log_f[0].cumsum(0).T
    near = ~(c[:, :, None] - c[:, None, :] <= -horizon)  # (heads, queries, keys)
    for a in range(plan.split.chunks):
        for b in range(a):
            block = near[:, a * plan.chunk : (a + 1) * plan.chunk, b * plan.chunk : (b + 1) * plan.chunk]
            seen = block.flatten(1).any(1).unflatten(0, (kv_heads, -1)).any(1)
            assert not (seen & ~needed[a, b]).any()
            fall = c[:, a * plan.chunk - 1] - c[:, (b + 1) * plan.chunk - 1]
            torch.testing.assert_close(summary.between(b, a)[0], fall)
    assert summary_of(plan, log_f, kv_heads, None).needed[0][possible].all()
