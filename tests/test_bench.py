"""The kernel benchmark without a GPU: counts, errors, result file and refusals."""

from __future__ import annotations

import json

import bench
import bench_measure
import pytest
import torch
from bench_problems import DECODE, TABLE, Decode, Problem, Task


def row(p: Problem | Decode, contender: str, total: float) -> dict:
    rates = dict.fromkeys(("forward_tflops", "backward_tflops"), 1.0)
    return {"problem": p.name, "contender": contender, "total_ms": total, **rates}


def test_flops_count_the_causal_pairs_that_are_asked_for():
    p = Problem(2, 8192, 16, 8, 64)
    assert p.forward_flops == 4 * 2 * 16 * 64 * 8192**2 / 2
    assert p._replace(document=2048).forward_flops == p.forward_flops / 4


def test_results_are_written_row_by_row(tmp_path):
    data = {"rows": [], "decode": [], "errors": [], "skipped": [], "complete": False}
    results = bench.Results(tmp_path / "deep" / "k.json", data)
    results.add(Task("table", TABLE[0], ("ours", "fla")), [row(TABLE[0], "ours", 1.0)])
    rates = dict.fromkeys(("ms", "gb_s", "of_copy", "graph_of_copy", "live"), 1.0)
    timed = {"problem": DECODE[0].name, "contender": "ours", **DECODE[0]._asdict(), **rates}
    results.add(Task("decode", DECODE[0], ("ours",)), [timed])
    kept = json.loads((tmp_path / "deep" / "k.json").read_text())
    assert kept["rows"][0]["D"] == 64
    assert not kept["complete"]
    assert kept["decode"][0]["live"] == 1.0


def test_relative_error_sees_through_layouts():
    true = torch.randn(2, 6, 2, 4, dtype=torch.float64)
    assert bench_measure.relative_error(true.transpose(1, 2).contiguous(), true) == 0
    repeated = torch.stack((true * 0.25, true * 0.75), 3).flatten(2, 3)
    assert bench_measure.relative_error(repeated.transpose(1, 2), true) == pytest.approx(0, abs=1e-15)
    assert bench_measure.relative_error(true * 1.5, true) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--only", "nothing like it"], "matches nothing"),
        ([], "no CUDA device"),
    ],
)
def test_refusals_exit_with_2(argv, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(argv) == 2
    assert message in capsys.readouterr().err
