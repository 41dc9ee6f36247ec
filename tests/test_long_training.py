"""The benchmark of long rows on one GPU: a tiny row on the CPU, and a table whatever happens."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

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
    }
    assert (row["layers"], row["length"], row["steps"], row["warm"], row["speed_ratio"]) == (1, 24, 1, False, 1.0)
    assert row["flops_per_second"] == pytest.approx(row["flops_per_token"] * row["tokens_per_second"], rel=0.01)
    assert row["planned_gb"] >= 0
    assert "pico                    1       24" in capsys.readouterr().out
