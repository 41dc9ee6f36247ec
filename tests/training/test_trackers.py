"""A tracker gets what the log gets, gate statistics included, through the Trainer's own integration."""

from __future__ import annotations

from pathlib import Path

import pytest

from retrofox.training.train import train

WANTED = ("loss", "grad_norm", "tokens_per_second", "half_life_mean", "half_life_p90", "gates_saturated", "gates_dead")


@pytest.mark.filterwarnings("ignore")  # of the tracker, not ours
def test_tensorboard(make_recipe):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recipe = make_recipe({"tokens": 256}, log={"every": 1, "report_to": ["tensorboard"]})
    train(recipe)
    (directory,) = {path.parent for path in Path(recipe.output).rglob("events.out.tfevents.*")}
    events = EventAccumulator(str(directory)).Reload()
    for name in WANTED:
        assert [event.step for event in events.Scalars(f"train/{name}")] == [1, 2]
