"""What the heads look at, in the training log."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from retrofox.anatomy import attentions
from retrofox.heads.statistics import copy_scores
from retrofox.loading.converted import load
from retrofox.training.heads import HeadRecorder
from retrofox.training.train import train


@pytest.fixture
def run(tmp_path, make_recipe):
    """run(name, base=False, **log) trains four steps and returns the log's lines and the model's directory."""

    def start(name: str, base: bool = False, **log) -> tuple[list[dict], Path]:
        keys = {"converted": False, "fox": None} if base else {}
        data = {"eval": [str(tmp_path / "text.txt")]}
        train(make_recipe({"sequence_length": 128}, output=name, data=data, log={"every": 1, **log}, **keys))
        lines = (tmp_path / name / "log.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines], tmp_path / name / "model"

    return start


def test_heads_are_logged_when_asked_for_and_change_nothing_else(run):
    plain, _ = run("plain")
    logged, model = run("logged", heads_every=2)
    names = {"copy_score_max", "retrieval_heads", "mass_first", "mass_beyond_64"}
    assert [line["step"] for line in logged if names <= line.keys()] == [2, 4]
    assert not any(names & line.keys() for line in plain)
    for one, other in zip(plain, logged, strict=True):
        for name in ("loss", "grad_norm", "half_life_mean"):
            assert one[name] == other[name]
    scores = [score for layer in copy_scores(load(str(model)), 64, 1) for score in layer]
    assert logged[-1]["copy_score_max"] == pytest.approx(max(scores), rel=1e-4)


def test_an_unconverted_control_is_measured_too(run):
    lines, _ = run("control", base=True, heads_every=4)
    assert 0 <= lines[-1]["copy_score_max"] <= 1
    assert 0 <= lines[-1]["mass_beyond_64"] <= 1


def test_measuring_restores_training_mode_and_leaves_no_gates_behind(pico_fox):
    model = pico_fox().train()
    for _, attention in attentions(model):
        attention.forget_gate.record = True
    row = torch.randint(0, 288, (1, 80), generator=torch.Generator().manual_seed(0))
    found = HeadRecorder(model, 1, 128).statistics(row)
    assert {"mass_beyond_64", "copy_score_max"} <= found.keys()
    assert "mass_beyond_512" not in found  # no query of the row looks so far back
    assert "mass_first" not in HeadRecorder(model, 1, 128).statistics(None)
    assert all(module.training for module in model.modules())
    assert all(attention.forget_gate.last_log_f is None for _, attention in attentions(model))


def test_it_comes_with_log_lines_only(make_recipe):
    with pytest.raises(ValueError, match="heads_every must be a multiple of every, 10; got 15"):
        make_recipe(log={"every": 10, "heads_every": 15})
