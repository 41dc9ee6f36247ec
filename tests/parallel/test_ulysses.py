"""Tokens for heads and back, on processes that are threads here: who gets what, and its gradient."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from retrofox.parallel import ulysses


def on_each(size: int, work, monkeypatch) -> list[Any]:
    """What work(rank, mesh) returns on each of `size` processes."""
    barrier = threading.Barrier(size, timeout=30)
    posted: list[Any] = [None] * size
    results: list[Any] = [None] * size
    here = threading.local()

    def exchange(out, x, group):
        assert x.is_contiguous()  # as the collective requires
        posted[here.rank] = x.clone()
        barrier.wait()
        out.copy_(torch.stack([sent[here.rank] for sent in posted]))
        barrier.wait()

    def run(rank: int) -> None:
        here.rank = rank
        mesh = SimpleNamespace(degrees=SimpleNamespace(ulysses=size), ulysses_group=None)
        results[rank] = work(rank, mesh)

    monkeypatch.setattr(ulysses.dist, "all_to_all_single", exchange)
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("size", [2, 3])
def test_each_process_gets_all_tokens_of_its_heads_in_order(size, monkeypatch):
    B, t, D = 2, 5, 4
    q, k = torch.randn(B, size * t, 2 * size, D), torch.randn(B, size * t, size, D)

    def work(rank, mesh):
        rows = slice(rank * t, (rank + 1) * t)
        return ulysses.heads_for_tokens(mesh, q[:, rows], k[:, rows])

    results = on_each(size, work, monkeypatch)
    for rank, (queries, keys) in enumerate(results):
        assert torch.equal(queries, q[:, :, 2 * rank : 2 * rank + 2])
        assert torch.equal(keys, k[:, :, rank : rank + 1])


@pytest.mark.parametrize("size", [2, 3])
def test_what_comes_back_are_the_own_tokens_of_all_heads(size, monkeypatch):
    o = torch.randn(2, 4 * size, 2 * size, 3)

    def work(rank, mesh):
        return ulysses.tokens_for_heads(mesh, o[:, :, 2 * rank : 2 * rank + 2])

    for rank, tokens in enumerate(on_each(size, work, monkeypatch)):
        assert torch.equal(tokens, o[:, 4 * rank : 4 * rank + 4])


def test_gradients_take_the_way_back(monkeypatch):
    size, t = 2, 3
    weights = torch.randn(1, size * t, 4, 2)

    def work(rank, mesh):
        x = torch.zeros(1, t, 4, 2, requires_grad=True)
        (heads,) = ulysses.heads_for_tokens(mesh, x)
        (heads * weights[:, :, 2 * rank : 2 * rank + 2]).sum().backward()
        return x.grad

    for rank, gradient in enumerate(on_each(size, work, monkeypatch)):
        assert torch.equal(gradient, weights[:, rank * t : rank * t + t])


def test_a_process_alone_keeps_what_it_has():
    mesh: Any = SimpleNamespace(degrees=SimpleNamespace(ulysses=1))
    x = torch.randn(1, 2, 3, 4)
    assert ulysses.heads_for_tokens(mesh, x)[0] is x
    assert ulysses.tokens_for_heads(mesh, x) is x
