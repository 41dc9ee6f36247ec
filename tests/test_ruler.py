"""RULER's scores by length, and how they and an arm without training come into arms.json."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import retrofit_results  # pyright: ignore[reportMissingImports]
import ruler  # pyright: ignore[reportMissingImports]


def test_ruler_and_an_arm_without_training_are_collected(tmp_path):
    scores = {"vt": [0.0, 1.0, 1.0, 1.0], "cwe": [0.5, 0.5, 0.5, 0.5]}
    summary = ruler.summarised([{"length": 4096, "seconds": 1, "scores": scores, "environment": {}}])
    runs, arms = tmp_path / "runs", tmp_path / "arms.json"
    for name in ("known", "self-extend", "unknown"):
        (runs / name).mkdir(parents=True)
        (runs / name / "ruler.json").write_text(json.dumps(summary))
    (runs / "self-extend" / "untrained.json").write_text(json.dumps({"method": {"window": 512, "group": 8}}))
    arms.write_text(json.dumps({"arms": {"known": {"tokens": 5, "loss": [1]}}}))
    retrofit_results.collect(runs, "a note", arms)
    found = json.loads(arms.read_text())["arms"]
    assert set(found) == {"known", "self-extend"}
    assert (found["known"]["tokens"], found["known"]["loss"]) == (5, [1])
    (row,) = found["known"]["ruler"]
    assert (row["length"], row["samples"], row["mean"]) == (4096, 4, 0.625)
    assert row["standard_error"] == pytest.approx(0.125)  # of vt 0.25, of cwe 0; the mean of two tasks has half
    assert found["self-extend"]["ruler"] == [row]
    assert (found["self-extend"]["tokens"], found["self-extend"]["method"]["group"]) == (0, 8)
