"""Which key blocks the Hopper forward visits under a horizon and sinks: its own function, run as plain Python."""

import random
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from fox_kernels.hopper import forward_producer
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
    monkeypatch.setattr(forward_producer, "gl", gl)
    for name in ("edges_of", "origin_of"):
        monkeypatch.setattr(forward_producer, name, getattr(forward_producer, name).fn)


def make(seed: int, kind: str):
    """A sequence: T, S, sink, what each position sees first and its document's start, and who sees which key, sinks."""
    r = random.Random(f"{seed} {kind}")
    S = r.randrange(130, 1200)
    T, sink = r.choice([S, r.randrange(64, S + 1)]), r.choice([1, 1, 5, 64])
    cuts = sorted({0, S, *(r.randrange(1, S) for _ in range(r.choice([1, 3, 12])))}) if kind == "packed" else [0, S]
    origin = [max(cut for cut in cuts if cut <= j) for j in range(S)]
    if kind == "padded":
        origin = [r.randrange(S - 1)] * S
    slope = r.choice([0.6, 0.1, 0.02, 0.004])
    c = -(slope * torch.rand(S, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))).cumsum(0)
    j = torch.arange(S)
    near = (c[None, :] < c[:, None] + HORIZON) & (j[None, :] <= j[:, None])
    start = torch.maximum(near.int().argmax(1), torch.tensor(origin))
    sinks = (j[None, :] >= torch.tensor(origin)[:, None]) & (j[None, :] < torch.tensor(origin)[:, None] + sink)
    seen = (j[None, :] <= j[:, None]) & ((j[None, :] >= start[:, None]) | sinks)
    starts = Pointer(start.tolist()), None if kind == "one" else Pointer(origin)
    return T, S, sink, starts, seen[S - T :], sinks[S - T :]


@pytest.mark.parametrize("kind", ["one", "packed", "padded"])
@pytest.mark.parametrize("seed", range(6))
def test_the_forward_visits_every_key_that_is_seen_and_masks_all_but_whole_blocks(seed, kind):
    T, S, sink, starts, seen, sinks = make(seed, kind)
    for rows, keys in ((128, 128), (192, 128), (128, 64)):
        for m in range(-(-T // rows)):
            here = slice(m * rows, (m + 1) * rows)
            _, first_end, nb_hi, n_main, sb_hi, n_all, clean_lo = forward_producer.key_blocks.fn(
                m, 0, Number(0), *starts, T, S, 2, sink, rows, keys
            )
            visited = [nb_hi - 1 - i if i < n_main else sb_hi - 1 - (i - n_main) for i in range(n_all)]
            assert len(set(visited)) == n_all
            assert set((seen[here].any(0).nonzero()[:, 0] // keys).tolist()) <= set(visited)
            for n in visited:
                block = here, slice(n * keys, (n + 1) * keys)
                if n * keys >= clean_lo and (n + 1) * keys - 1 <= first_end:
                    assert seen[block].all()
                    assert not sinks[block].any()
