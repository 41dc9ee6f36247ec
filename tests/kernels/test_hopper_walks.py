"""Which tiles the Hopper kernels visit under a horizon and sinks: their own functions, run as plain Python."""

import random
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from fox_kernels.hopper import backward_producer, backward_writer, forward_producer
from fox_kernels.hopper.forward import gluon_missing

pytestmark = pytest.mark.skipif(bool(gluon_missing()), reason=str(gluon_missing()))
HORIZON = 8.0


class Pointer:
    """What `load` reads: a list from a place on."""

    def __init__(self, values: list[int], place: int = 0):
        self.values, self.place = values, place

    def __add__(self, more: int):
        return Pointer(self.values, self.place + more)

    def __sub__(self, less: int):
        return self + -less


class Number(int):
    def to(self, dtype):
        return self


@pytest.fixture(autouse=True)
def in_python(monkeypatch):
    gl = SimpleNamespace(int64=int, load=lambda at: at.values[at.place], minimum=min, maximum=max)
    gl.where = lambda condition, a, b: a if condition else b
    for module in (forward_producer, backward_producer, backward_writer):
        monkeypatch.setattr(module, "gl", gl)
        for name in ("edges_of", "origin_of", "_first"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, getattr(module, name).fn)


def make(seed: int, kind: str):
    """A sequence: (T, S, sink, edges as the kernels take them, and whether query t sees key j, (T, S))."""
    r = random.Random(f"{seed} {kind}")
    S = r.randrange(130, 1200)
    T, sink = r.choice([S, r.randrange(64, S + 1)]), r.choice([1, 1, 5, 64])
    cuts = sorted({0, S, *(r.randrange(1, S) for _ in range(r.choice([1, 3, 12])))}) if kind == "packed" else [0, S]
    origin = [max(cut for cut in cuts if cut <= j) for j in range(S)]
    behind = [min(cut for cut in cuts if cut > j) for j in range(S)]
    if kind == "padded":
        first = r.randrange(S - 1)
        origin, behind = [first] * S, [0] * first + [S] * (S - first)
    slope = r.choice([0.6, 0.1, 0.02, 0.004])
    c = -(slope * torch.rand(S, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))).cumsum(0)
    j = torch.arange(S)
    near = (c[None, :] < c[:, None] + HORIZON) & (j[None, :] <= j[:, None])
    start = torch.maximum(near.int().argmax(1), torch.tensor(origin))
    end = torch.minimum(j + near.int().flip(0).argmax(0).neg() + S - j, torch.tensor(behind))
    sinks = (j[None, :] >= torch.tensor(origin)[:, None]) & (j[None, :] < torch.tensor(origin)[:, None] + sink)
    seen = (j[None, :] <= j[:, None]) & ((j[None, :] >= start[:, None]) | sinks)
    edges = SimpleNamespace(start=Pointer(start.tolist()), end=Pointer(end.tolist()), origin=None, behind=None)
    if kind != "one":
        edges.origin, edges.behind = Pointer(origin), Pointer(behind)
    return T, S, sink, edges, seen[S - T :], sinks[S - T :]


@pytest.mark.parametrize("kind", ["one", "packed", "padded"])
@pytest.mark.parametrize("seed", range(6))
def test_the_forward_visits_every_key_that_is_seen_and_masks_all_but_whole_blocks(seed, kind):
    T, S, sink, edges, seen, sinks = make(seed, kind)
    for rows, keys in ((128, 128), (192, 128), (128, 64)):
        for m in range(-(-T // rows)):
            here = slice(m * rows, (m + 1) * rows)
            _, first_end, nb_hi, n_main, sb_hi, n_all, clean_lo = forward_producer.key_blocks.fn(
                m, 0, Number(0), edges.start, edges.origin, T, S, 2, sink, rows, keys
            )
            visited = [nb_hi - 1 - i if i < n_main else sb_hi - 1 - (i - n_main) for i in range(n_all)]
            assert len(set(visited)) == n_all
            assert set((seen[here].any(0).nonzero()[:, 0] // keys).tolist()) <= set(visited)
            for n in visited:
                block = here, slice(n * keys, (n + 1) * keys)
                if n * keys >= clean_lo and (n + 1) * keys - 1 <= first_end:
                    assert seen[block].all()
                    assert not sinks[block].any()


@pytest.mark.parametrize("kind", ["one", "packed", "padded"])
@pytest.mark.parametrize("seed", range(6))
def test_the_backward_visits_every_key_that_is_seen_and_its_turns_count_the_visits(seed, kind):
    T, S, sink, edges, seen, sinks = make(seed, kind)
    for rows, keys in ((128, 128), (64, 128), (64, 64)):
        cut = SimpleNamespace(HAS_START=2, SINK=sink, BM=rows, KEYS=keys)
        tiles, num_n = -(-T // rows), -(-S // keys)
        lo = torch.tensor(edges.start.values[S - T :: 64]).div(keys, rounding_mode="floor")
        lo = lo.flip(0).cummin(0).values.flip(0)[:: rows // 64]
        tile_lo = Pointer(lo.tolist())
        edges.tile_hi = Pointer([int((lo <= n).sum()) for n in range(num_n)])
        visits: list[list[int]] = [[] for _ in range(tiles)]
        for n in range(num_n):
            first, last, clean_lo, clean_hi = backward_producer._query_tiles.fn(
                n, 0, Number(0), num_n, edges, T, S, cut
            )
            for m in range(first, last):
                visits[m].append(n)
                block = slice(m * rows, (m + 1) * rows), slice(n * keys, (n + 1) * keys)
                if m * rows >= clean_lo and (m + 1) * rows <= clean_hi:
                    assert seen[block].all()
                    assert not sinks[block].any()
        for m, visited in enumerate(visits):
            needed = seen[m * rows : (m + 1) * rows].any(0).nonzero()[:, 0] // keys
            assert set(needed.tolist()) <= set(visited)
            turns = [backward_writer._turn.fn(n, m, 0, 0, tiles, edges, tile_lo, T, S, cut) for n in visited]
            assert turns == list(range(len(visited)))
