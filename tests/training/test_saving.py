"""Runs with the switches that save memory: the bits of a run without them, also where they change at a resume."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load

from retrofox.training.train import train

OFFLOAD = {"gradient_checkpointing": "full", "offload_activations": True}


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


def test_switches_may_change_at_a_resume_and_tiles_differ_by_rounding(recipe_for, stop_at, curve, weights):
    plain, saving = recipe_for("plain"), recipe_for("saving", **OFFLOAD)
    train(plain)
    stop_at(saving, 2)
    report = train(recipe_for("saving", tiled_mlp=32))  # a row is one tile
    assert report["stages"][0]["resumed_at"] == 3
    assert curve(plain.output) == curve(saving.output)
    assert weights(plain.output) == weights(saving.output)
    tiled = recipe_for("tiled", tiled_mlp=5, **OFFLOAD)
    train(tiled)
    for one, other in zip(curve(plain.output), curve(tiled.output), strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    found = load(weights(tiled.output))
    for name, tensor in load(weights(plain.output)).items():
        assert torch.allclose(found[name], tensor, atol=2e-4), name
