"""Trackers get what the log gets, gate statistics included, through the Trainer's own integrations."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from retrofox.training.train import train

WANTED = ("loss", "grad_norm", "tokens_per_second", "half_life_mean", "half_life_p90", "gates_saturated", "gates_dead")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the trackers, not ours


@pytest.fixture
def run(tmp_path, make_recipe, monkeypatch):
    """run(tracker) trains two steps with a tracker in the test's own directory."""
    monkeypatch.chdir(tmp_path)

    def start(tracker: str) -> Path:
        if importlib.util.find_spec(tracker) is None:
            pytest.skip(f"{tracker} is not installed (pip install '.[track]' in a clone)")
        recipe = make_recipe({"tokens": 256}, log={"every": 1, "report_to": [tracker]})
        train(recipe)
        return Path(recipe.output)

    return start


def test_tensorboard(run):
    out = run("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (directory,) = {path.parent for path in out.rglob("events.out.tfevents.*")}
    events = EventAccumulator(str(directory)).Reload()
    for name in WANTED:
        assert [event.step for event in events.Scalars(f"train/{name}")] == [1, 2]


def test_wandb_offline(run, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    run("wandb")
    import wandb

    wandb.finish()
    (file,) = tmp_path.rglob("*.wandb")
    stored = file.read_bytes()
    for name in WANTED:
        assert f"train/{name}".encode() in stored


def test_trackio(run, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for module in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, module)  # imported before, it has another folder
    run("trackio")
    stored = b"".join(path.read_bytes() for path in (tmp_path / "trackio").rglob("*.db*"))
    for name in WANTED:
        assert f"train/{name}".encode() in stored or name.encode() in stored
