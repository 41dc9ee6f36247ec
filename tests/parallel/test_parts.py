"""A part of a softmax by the Triton kernels, in their interpreter, is the part by its formula."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from retrofox.parallel.partial_softmax import Part, attend_part, differentiate_part

PROGRAM = """
import sys
sys.path[:0] = [{folder!r}, {kernels!r}]
import interpreted
interpreted.hasten()
from test_parts import compare
compare()
"""
CASES = {
    # queries, their first place, keys, their first place, window, softcap, horizon
    "keys of an earlier chunk": (33, 100, 40, 20, None, None, None),
    "the same chunk": (40, 100, 40, 100, None, 5.0, None),
    "the same chunk behind its sinks": (40, 100, 37, 103, None, None, None),
    "a window": (33, 80, 70, 10, 64, None, None),
    "a horizon over keys of an earlier chunk": (40, 60, 50, 5, None, None, 4.0),
    "a horizon, a window, the same chunk": (60, 100, 60, 100, 40, 5.0, 2.0),
}


def part_of(name: str, dtype: torch.dtype) -> tuple[Part, torch.Tensor]:
    """A part with gates that fall by a few nats, and a gradient of its output."""
    queries, first_query, keys, first_key, window, softcap, horizon = CASES[name]
    random = torch.Generator().manual_seed(4)
    q, do = (torch.randn(2, 2, queries, 16, generator=random).to(dtype) for _ in range(2))
    k, v = (torch.randn(2, keys, 16, generator=random).to(dtype) for _ in range(2))
    c = -torch.rand(2, 2, 200, generator=random, dtype=torch.float64).cumsum(-1) * 0.2
    rows = c[..., first_query : first_query + queries] - c[..., first_key + keys - 1 :][..., :1]
    cols = c[..., first_key + keys - 1 :][..., :1] - c[..., first_key : first_key + keys]
    return Part(q, k, v, rows, cols, first_query, first_key, 0.3, softcap, window, horizon), do


def with_dc(part: Part, gradients: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """dq, dk, dv and dL/dc of all positions: of a query's own key, whose shares cancel, the kernels leave out both."""
    *states, by_query, by_key = gradients
    dc = by_query.new_zeros(2, 2, 200)
    dc[..., part.first_query : part.first_query + by_query.shape[-1]] += by_query
    dc[..., part.first_key : part.first_key + by_key.shape[-1]] -= by_key
    return [*states, dc]


def compare() -> None:
    """Run with TRITON_INTERPRET=1."""
    from retrofox.parallel import kernels

    for name in CASES:
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 4e-3)):
            part, do = part_of(name, dtype)
            assert kernels._runs(part)
            wanted_o, wanted_lse = attend_part(part)
            o, lse = kernels.attend(part)
            assert o.dtype == torch.float32
            assert torch.equal(lse == -torch.inf, wanted_lse == -torch.inf)
            seen = lse > -torch.inf
            assert (lse - wanted_lse)[seen].abs().max() < 1e-4 + tolerance, name
            assert (o - wanted_o).abs().max() < tolerance * wanted_o.abs().max(), name
            # The rest of the softmax took some of the weight.
            merged, merged_o = wanted_lse.masked_fill(~seen, 3.0) + 0.5, 0.6 * wanted_o + 0.4
            delta = (do.float() * merged_o).sum(-1)
            wanted = with_dc(part, differentiate_part(part, merged, delta, do.float()))
            found = with_dc(part, kernels.differentiate(part, merged_o, merged, delta, do.float()))
            for x, y in zip(found, wanted, strict=True):
                assert x.dtype in (torch.float32, torch.float64)
                assert (x - y).norm() < tolerance * y.norm(), name
    print("compared", len(CASES))


def test_the_kernels_and_the_formula_agree():
    pytest.importorskip("triton")
    folder, kernels = str(Path(__file__).parent), str(Path(__file__).parents[1] / "kernels")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(folder=folder, kernels=kernels)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith(f"compared {len(CASES)}")
