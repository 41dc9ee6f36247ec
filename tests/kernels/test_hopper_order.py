"""The order in which the Hopper backward adds to dq: every turn that a key tile waits for comes.

A turn too high would be waited for for ever; one too low would make the sums' order, and their bits, chance.
"""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
from fox_kernels.hopper.backward import Edges
from fox_kernels.host.device import KNOWN_TRITON, triton_version
from twins import edges_torch

pytestmark = pytest.mark.skipif(triton_version() not in KNOWN_TRITON, reason="needs a Gluon that is known")


class Pointer:
    """Addresses as the kernels compute them, of a list: reading beyond its ends fails."""

    def __init__(self, values: list[int], at: int = 0):
        self.values, self.at = values, at

    def __add__(self, more: int) -> "Pointer":
        return Pointer(self.values, self.at + more)

    def __sub__(self, less: int) -> "Pointer":
        return Pointer(self.values, self.at - less)

    def load(self) -> int:
        assert 0 <= self.at < len(self.values)
        return self.values[self.at]


@st.composite
def problems(draw):
    """T, S, keys and queries per tile, sinks; what bounds the keys, and of which kind those bounds are."""
    T = draw(st.integers(64, 900))
    S = T + draw(st.sampled_from((0, 0, 1, 64, 100, 128, 705)))
    padding = cuts = window = None
    sink = draw(st.sampled_from((0, 0, 1, 4, 64)))
    bound = draw(st.sampled_from(("none", "padding", "documents", "both", "window", "horizon")))
    if bound in ("padding", "both"):
        padding = torch.tensor([draw(st.one_of(st.integers(0, S), st.sampled_from((0, 127, 128, 129, S - T, S))))])
    if bound in ("documents", "both"):
        cuts = torch.tensor([0, *sorted(draw(st.lists(st.integers(0, S), max_size=9))), S])
    if bound == "window" and sink == 0:
        window = draw(st.integers(1, S))
    found = edges_torch(1, S, cuts, padding, window, "cpu")
    kind = int(found is not None)
    if bound == "horizon" and sink == 0:  # c may rise by its rounding: a query may see more than those before it
        start = torch.tensor(draw(st.lists(st.integers(0, S), min_size=S, max_size=S))).minimum(torch.arange(S))
        kind, found = 2, torch.stack((start, torch.full_like(start, S)))[:, None]
    return T, S, *draw(st.sampled_from(((64, 64), (128, 64), (128, 128)))), sink, found, kind


def walks(start: list[int], T: int, S: int, keys: int, queries: int) -> tuple[list[int], list[int]]:
    """Return what `query_ranges_kernel` finds: query tiles' first key tiles, and key tiles' last query tiles."""
    bounds = [start[S - T + i] // keys for i in range(0, T, 64)]
    low = [min(bounds[i:]) for i in range(0, len(bounds), queries // 64)]
    return low, [sum(x <= n for x in low) for n in range(-(-S // keys))]


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(problems())
def test_a_key_tile_waits_for_as_many_as_add_to_a_query_tile_before_it(problem):
    from fox_kernels.hopper import backward_producer, backward_writer

    T, S, keys, queries, sink, bounds, kind = problem
    start = end = low = high = None
    if bounds is not None:
        start, end = (x.flatten().tolist() for x in bounds)
    if kind == 2:
        assert start is not None
        low, high = map(Pointer, walks(start, T, S, keys, queries))
    START, END = (None if x is None else Pointer(x) for x in (start, end))
    plain = SimpleNamespace(minimum=min, maximum=max, load=Pointer.load, where=lambda yes, a, b: a if yes else b)
    tiles, seen = -(-T // queries), {}
    cut = SimpleNamespace(HAS_START=kind, SINK=sink, BM=queries, KEYS=keys)
    with pytest.MonkeyPatch.context() as patch:
        for module in (backward_producer, backward_writer):
            patch.setattr(module, "gl", plain)
        patch.setattr(backward_producer, "edges_of", lambda edges, *_: edges)
        for n in range(-(-S // keys)):
            lo, hi, _, _ = backward_producer._query_tiles.fn(n, 0, 0, -(-S // keys), Edges(START, END, high), T, S, cut)
            for m in range(lo, hi):
                assert m < tiles
                turn = n - backward_writer._first.fn(m, 0, 0, tiles, START, low, T, S, cut)
                assert turn == seen.setdefault(m, 0)
                seen[m] += 1
    assert len(seen) == tiles or start is not None  # else its dq would be of nobody: only bounded ones begin with zeros
