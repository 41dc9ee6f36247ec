"""Runs with the switches that save memory: the bits of a run without them, also where they change at a resume."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from retrofox.training.offload import Offload
from retrofox.training.train import train
from retrofox.training.trainer import FoxTrainer

OFFLOAD = {"gradient_checkpointing": "full", "offload_activations": True, "offload_optimizer": True}


@pytest.fixture
def recipe_for(tmp_path, make_recipe):
    """recipe_for(output, lora=None, **stage) -> a recipe of 4 steps over packed documents, a checkpoint at step 2."""
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text(f"the fox forgets gate {number} and so on, " * 5)

    def build(output, lora=None, **stage):
        stage = {"tokens": 256, "sequence_length": 32, "batch_tokens": 64, **stage}
        data = {"train": [str(tmp_path / "[0-9].txt")]}
        return make_recipe(stage, output=output, data=data, lora=lora, checkpoint={"every_steps": 2})

    return build


def weights(recipe):
    (file,) = (path for path in (Path(recipe.output) / "model").glob("*.safetensors"))
    return load_file(file)


def losses(recipe):
    lines = (Path(recipe.output) / "log.jsonl").read_text().splitlines()
    return [(v["step"], v["loss"], v["grad_norm"]) for v in map(json.loads, lines)]


def assert_same_bits(one, other):
    assert losses(one) == losses(other)
    wanted, found = weights(one), weights(other)
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_an_offloading_run_has_the_same_bits(recipe_for, lora, monkeypatch):
    moved, copy_out = [], Offload._copy_out
    monkeypatch.setattr(Offload, "_copy_out", lambda self, kept: (moved.append(kept.bytes), copy_out(self, kept)))
    plain, offloading = recipe_for("plain", lora), recipe_for("offloading", lora, **OFFLOAD)
    train(plain)
    assert not moved
    train(offloading)
    assert moved == [32 * 32 * 4] * 4 * 2  # four steps of two rows; of two layers, the last one's stays
    assert_same_bits(plain, offloading)


def test_switches_may_change_at_a_resume(recipe_for, monkeypatch):
    plain, saving = recipe_for("plain"), recipe_for("saving", **OFFLOAD)
    train(plain)
    step, sent = FoxTrainer.training_step, []

    def interrupted(self, *args, **kwargs):
        if self.state.global_step == 2 and not sent:
            sent.append(os.kill(os.getpid(), signal.SIGTERM))
        return step(self, *args, **kwargs)

    monkeypatch.setattr(FoxTrainer, "training_step", interrupted)
    with pytest.raises(SystemExit) as stopped:
        train(saving)
    assert stopped.value.code == 143
    report = train(recipe_for("saving", tiled_mlp=32))  # a row is one tile
    assert report["stages"][0]["resumed_at"] == 3
    assert_same_bits(plain, saving)


def test_a_tiled_run_differs_by_rounding(recipe_for):
    plain = recipe_for("plain")
    tiled = recipe_for("tiled", tiled_mlp=5, **OFFLOAD)
    train(plain)
    train(tiled)
    for one, other in zip(losses(plain), losses(tiled), strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    found = weights(tiled)
    for name, tensor in weights(plain).items():
        assert torch.allclose(found[name], tensor, atol=2e-4), name
