"""The kernel benchmark without a GPU: plan, counts, targets, result file, chart and refusals; with one, a pico run."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))

import bench
import bench_measure
import bench_problems
import bench_report
from bench_problems import DECODE, OUTPUTS, TABLE, Decode, Problem, Task, tasks

MACHINE = {"name": "GPU", "versions": {"torch": "2.11.0"}}


def row(p: Problem | Decode, contender: str, total: float) -> dict:
    rates = dict.fromkeys(("forward_tflops", "backward_tflops", "peak_mb"), 1.0)
    return {"problem": p.name, "contender": contender, "total_ms": total, "queued_ms": total, "spread": 0.01, **rates}


def synthetic(times: dict[str, float] | None = None) -> dict:
    """A whole result in which ours takes 1 ms everywhere and the others 10, or what is given."""
    rows = []
    for task in tasks(True, True):
        if task.stage in ("table", "extras"):
            for n in task.contenders:
                rows.append(row(task.problem, n, (times or {}).get(n, 1.0 if n.startswith("ours") else 10.0)))
    decode = [
        {"problem": p.name, "contender": "ours", **p._asdict(), "ms": 1.0, "gb_s": 2400.0, "of_copy": 0.8,
         "graph_of_copy": 0.89, "live": 1.0 if p.gates == "open" else 0.2}
        for p in DECODE
    ]  # fmt: skip
    errors = [
        {"problem": t.problem.name, "contender": n, **dict.fromkeys(OUTPUTS, 2e-3)}
        for t in tasks(True, True)
        if t.stage == "errors"
        for n in t.contenders
    ]
    return {"machine": MACHINE, "rows": rows, "decode": decode, "errors": errors, "skipped": []}


def test_flops_count_the_causal_pairs_that_are_asked_for():
    p = Problem(2, 8192, 16, 8, 64)
    assert p.forward_flops == 4 * 2 * 16 * 64 * 8192**2 / 2
    assert p._replace(document=2048).forward_flops == p.forward_flops / 4


def test_chart_is_drawn_from_the_results_the_same_each_time(tmp_path):
    path = tmp_path / "kernels.json"
    path.write_text(json.dumps(synthetic()))
    drawn = []
    for _ in range(2):
        assert bench.main(["--chart", str(path)]) == 0
        drawn.append([path.with_suffix(s).read_bytes() for s in (".png", ".svg")])
    assert drawn[0] == drawn[1]
    assert drawn[0][0].startswith(b"\x89PNG")
    assert b"<svg" in drawn[0][1]


def test_results_are_written_row_by_row(tmp_path):
    arguments = Namespace(out=str(tmp_path / "deep" / "k.json"), given=["--only", "table"])
    results = bench.start(arguments, MACHINE, {"matmul_tflops": 800.0, "copy_gb_s": 3000.0})
    results.add(Task("table", TABLE[0], ("ours", "fla")), [row(TABLE[0], "ours", 1.0)])
    results.add(Task("decode", DECODE[0], ("ours",)), synthetic()["decode"][:1])
    kept = json.loads((tmp_path / "deep" / "k.json").read_text())
    assert kept["rows"][0]["D"] == 64
    assert not kept["complete"]
    assert kept["decode"][0]["live"] == 1.0
    assert "--only table" in kept["command"]


def test_relative_error_sees_through_layouts():
    true = torch.randn(2, 6, 2, 4, dtype=torch.float64)
    assert bench_measure.relative_error(true.transpose(1, 2).contiguous(), true) == 0
    repeated = torch.stack((true * 0.25, true * 0.75), 3).flatten(2, 3)
    assert bench_measure.relative_error(repeated.transpose(1, 2), true) == pytest.approx(0, abs=1e-15)
    assert bench_measure.relative_error(true * 1.5, true) == pytest.approx(0.5)


def test_contenders_are_timed_in_turn_each_round_in_a_new_order():
    timed = []

    class FakeClock(bench_measure.Clock):
        def __init__(self):
            pass

        def sample(self, run, repeats, flushes=1):
            timed.append((run(), flushes))
            return [1.0] * repeats

    def contender(name):
        calls = {kind: lambda kind=kind: (name, kind) for kind in bench_measure.FLOPS}
        return {"calls": calls, "repeats": dict.fromkeys(calls, 3), "samples": {n: [] for n in (*calls, "queued")}}

    names = "abcd"
    ready = [contender(name) for name in names]
    bench_measure.take_turns(ready, FakeClock())
    turns = [timed[i : i + len(names)] for i in range(0, len(timed), len(names))]
    assert all({name for (name, _), _ in turn} == set(names) for turn in turns)
    assert [turn[0][0][1] for turn in turns] == ["forward", "backward", "total", "total"] * bench_measure.ROUNDS
    assert [turn[0][1] for turn in turns[:4]] == [1, 1, 1, bench_measure.LAUNCHED_AHEAD]
    assert len({"".join(name for (name, _), _ in turn) for turn in turns}) > bench_measure.ROUNDS // 2
    several = {"forward": 3, "backward": 3, "total": 3, "queued": 1}
    assert all(len(e["samples"][n]) == several[n] * bench_measure.ROUNDS for e in ready for n in several)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--only", "nothing like it"], "matches nothing"),
        (["--chart", "missing.json"], "missing.json"),
        ([], "no CUDA device"),
    ],
)
def test_refusals_exit_with_2(argv, message, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(argv) == 2
    assert message in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_pico_run_measures_all_it_promises(tmp_path, monkeypatch):
    plan = [
        Task("table", Problem(1, 256, 4, 2, 64), ("ours", bench_problems.HORIZON, "plain Triton", "cuDNN, no gate")),
        Task("decode", Decode(1, 512), ("ours",)),
        Task("errors", Problem(1, 256, 4, 2, 64, "mixed"), ("ours", "plain Triton")),
    ]
    monkeypatch.setattr(bench, "select", lambda *_: plan)
    out = tmp_path / "k.json"
    assert bench.main(["--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert [r["contender"] for r in result["rows"]] == list(plan[0].contenders)
    assert all(r["total_ms"] > 0 and r["queued_ms"] > 0 and r["peak_mb"] > 0 for r in result["rows"])
    assert all(result["decode"][0][f"{how}of_copy"] > 0 for how in ("", "graph_"))
    assert all(0 < r[n] < 1e-2 for r in result["errors"] for n in bench_report.OUTPUTS)
