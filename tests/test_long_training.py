"""The benchmark of long rows on one GPU: its options, a tiny row on the CPU, and a table whatever happens."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import long_training

from retrofox.training import measure


def test_options(capsys):
    options = long_training.arguments([])
    assert options.shapes == ["llama-3.1-8b-lora", "llama-3.2-1b"]
    assert (options.room, options.lengths, options.switches) == (80.0, None, [])
    given = ["--switches", "tiled_mlp=512", "offload_activations=true", "tiled_mlp=auto"]
    assert long_training.arguments(given).switches == [
        ("tiled_mlp", 512),
        ("offload_activations", True),
        ("tiled_mlp", "auto"),
    ]
    for wrong, said in (
        (["--switches", "micro_batch=2"], "give a switch, such as tiled_mlp=auto"),
        (["--shapes", "llama-4"], "invalid choice"),
        (["--lengths", "0"], "--lengths must be 1 or more, got 0"),
        (["--layers", "-1"], "--layers must be 1 or more, got -1"),
    ):
        with pytest.raises(SystemExit):
            long_training.arguments(wrong)
        assert said in capsys.readouterr().err


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


def test_a_later_row_warms_up_with_a_short_step(monkeypatch):
    lengths, plain = [], measure.RandomData.batches

    def batches(self, first_row):
        for batch in plain(self, first_row):
            lengths.append(batch["input_ids"].shape[1])
            yield batch

    monkeypatch.setattr(measure.RandomData, "batches", batches)
    monkeypatch.setattr(long_training, "WARM", 8)
    result = long_training.main(["--shapes", "pico", "--lengths", "16", "32", "--layers", "1"])
    assert [(row["steps"], row["warm"]) for row in result["rows"]] == [(2, True), (2, True)]
    assert lengths == [16, 16, 8, 32]


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
