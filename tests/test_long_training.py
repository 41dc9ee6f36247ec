"""The benchmark of long rows on one GPU: a tiny row on the CPU, and a table whatever happens."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import long_training


def test_a_tiny_row(tmp_path, capsys):
    out = tmp_path / "long.json"
    given = ["--shapes", "pico", "--lengths", "24", "--layers", "1", "--once", "--switches", "tiled_mlp=8"]
    long_training.main([*given, "offload_activations=true", "--out", str(out)])
    (row,) = json.loads(out.read_text())["rows"]
    assert row["switches"] == {
        "gradient_checkpointing": "full",
        "tiled_mlp": 8,
        "offload_activations": True,
        "offload_optimizer": False,
    }
    assert (row["layers"], row["length"], row["steps"], row["warm"], row["speed_ratio"]) == (1, 24, 1, False, 1.0)
    assert row["flops_per_second"] == pytest.approx(row["flops_per_token"] * row["tokens_per_second"], rel=0.01)
    assert row["planned_gb"] >= 0
    assert "pico                    1       24" in capsys.readouterr().out


def test_what_does_not_run_is_in_the_table(monkeypatch, tmp_path, capsys):
    """No switches, no time, no memory: each row says so, and the next one is tried."""
    planned = {"switches": {}, "planned_gb": 1.5, "planned_cpu_gb": 0.0}
    answers = iter([{**planned, "changes": None}, {**planned, "changes": {}}, {**planned, "changes": {}}])
    monkeypatch.setattr(long_training.Bench, "plan", lambda *given: next(answers))
    left = iter([-1.0, -1.0, 1e9])
    monkeypatch.setattr(long_training.Bench, "left", lambda bench: next(left))

    def no_memory(*given, **options):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(long_training, "measure_steps", no_memory)
    result = long_training.main(["--shapes", "pico", "--lengths", "8", "16", "32", "--once"])
    reasons = [row["why_not"] for row in result["rows"]]
    assert reasons[0] == "the plan finds no switches with which it fits 80 GB"
    assert reasons[1].startswith("would take about")
    assert reasons[2] == "out of memory: CUDA out of memory"
    printed = capsys.readouterr().out
    assert all(f"{reason} (planned 1.50 GB)" in printed for reason in reasons)
