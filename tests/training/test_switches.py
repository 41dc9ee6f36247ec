"""The switches that a plan names: the cheapest that fit, and only those that this run can set."""

from __future__ import annotations

import pytest
import torch

from retrofox.config import validate
from retrofox.training import switches
from retrofox.training.groups import set_trainable
from retrofox.training.memory import cpu_memory, memory
from retrofox.training.switches import named, switches_that_fit

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
SAVED = {  # of 100 bytes
    "micro_batch": 10,
    "tiled_mlp": 20,
    "offload_activations": 25,
    "offload_optimizer": 15,
    "gradient_checkpointing": 30,
}


def recipe_of(optim="adamw_torch_fused", **stage):
    stage = {"objective": "extend", "tokens": 1024, "sequence_length": 64, "micro_batch": 2, **stage}
    return validate({"model": "m", "output": "o", "data": {"train": ["t"]}, "optim": optim, "stages": [stage]})


@pytest.fixture
def found(monkeypatch, pico_fox):
    """found(room, device, cpu_room, **stage) -> the changes, with memory counted by SAVED."""

    def planned(recipe, stage, model, devices, sharded, device, teacher):
        on = [key for key, value in switches.SWITCHES.items() if getattr(stage, key) == value]
        return {"everything": 100.0 - sum(SAVED[key] for key in on)}

    def offloaded(recipe, stage, model, device):
        return {"activations": 50.0 * stage.offload_activations, "optimizer": 20.0 * stage.offload_optimizer}

    monkeypatch.setattr(switches, "memory", planned)
    monkeypatch.setattr(switches, "cpu_memory", offloaded)
    model = pico_fox()

    def find(room, device=CUDA, cpu_room=1000, devices=1, optim="adamw_torch_fused", **stage):
        monkeypatch.setattr(switches.psutil, "virtual_memory", lambda: type("M", (), {"total": cpu_room}))
        recipe = recipe_of(optim, **stage)
        return switches_that_fit(recipe, recipe.stages[0], model, devices, device, False, room)

    return find


def test_the_cheapest_that_fit(found):
    full = {"gradient_checkpointing": "full"}
    assert found(100) == {}
    assert found(90) == {"micro_batch": 1}
    assert found(80) == {"tiled_mlp": "auto"}
    assert found(70) == {"micro_batch": 1, "tiled_mlp": "auto"}
    assert found(65) == {"tiled_mlp": "auto", "offload_optimizer": True}
    assert found(50) == {"tiled_mlp": "auto", **full}
    assert found(5) == {"offload_activations": True, "offload_optimizer": True, "tiled_mlp": "auto", **full} | {
        "micro_batch": 1
    }
    assert found(0) is not None
    assert found(-1) is None
    assert found(35, micro_batch=1, gradient_checkpointing="full") == {"offload_activations": True}


def test_only_what_this_run_can_set(found, monkeypatch):
    rest = {"micro_batch": 1, "gradient_checkpointing": "full"}
    assert "tiled_mlp" not in found(20, compile=True)
    assert found(50, objective="align")["gradient_checkpointing"] == "full"
    assert found(20, objective="align") is None
    assert found(40, device=CPU) == {**rest, "tiled_mlp": "auto"}
    assert found(30, device=CPU) is None
    assert found(20, optim="adafactor") == {**rest, "tiled_mlp": "auto", "offload_activations": True}
    assert found(10, optim="adafactor") is None
    assert found(10, optim="nonsense") is None
    assert found(20, cpu_room=60) == {**rest, "tiled_mlp": "auto", "offload_activations": True}
    assert found(20, cpu_room=60, devices=2) is None  # both want as much
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert found(10) is None


def test_named_as_in_a_recipe():
    assert named({}) == ""
    assert named({"micro_batch": 1}) == "micro_batch: 1"
    changes = {"tiled_mlp": "auto", "offload_activations": True, "gradient_checkpointing": "full"}
    assert named(changes) == "gradient_checkpointing: full, offload_activations: true and tiled_mlp: auto"


def test_each_switch_counts(pico_fox):
    """On a CPU tiles count; what is offloaded on a GPU is here in the same memory."""
    model = pico_fox()

    def planned(**stage):
        recipe = recipe_of(micro_batch=1, sequence_length=4096, tokens=8192, **stage)
        set_trainable(model, recipe.stages[0])
        assert sum(cpu_memory(recipe, recipe.stages[0], model, CPU).values()) == 0
        return memory(recipe, recipe.stages[0], model, 1, False, CPU)

    plain, tiled = planned(), planned(tiled_mlp=1024)
    assert tiled["activations"] < plain["activations"] - 2 * 4096 * 2 * 48 * 2  # two layers, two tensors of the MLP's
    assert planned(tiled_mlp=4096)["activations"] == plain["activations"]  # a row is one tile
    full = planned(gradient_checkpointing="full")
    moved = planned(gradient_checkpointing="full", offload_activations=True, offload_optimizer=True)
    assert moved == full


def test_checkpoints_and_moments_move_to_cpu_memory(pico_fox, monkeypatch):
    """All but two of the checkpoints, which the first probe measures, and all of AdamW's two moments."""
    from retrofox.training import memory as module
    from retrofox.training.memory_probe import Curve, Probe

    none = Curve(0, 0, 0)
    monkeypatch.setattr(module, "probe", lambda *given: Probe(Curve(7, 100, 0), none, none, none))
    model = pico_fox(config={"num_hidden_layers": 5})
    recipe = recipe_of(
        gradient_checkpointing="full", offload_activations=True, offload_optimizer=True, batch_tokens=256
    )
    stage = recipe.stages[0]
    set_trainable(model, stage)
    weights = sum(parameter.numel() for parameter in model.parameters())
    assert cpu_memory(recipe, stage, model, CUDA) == {"activations": 3 * 100 * 128, "optimizer": 8 * weights}
    here = memory(recipe, stage, model, 1, False, CUDA)
    assert here["activations"] == 2 * 100 * 128 + 4 * 128 * 5 * 4  # and the gates that a log line reads
    assert here["optimizer"] == 8 * weights - here["activations"]  # a small model's visits as a whole, in the step
    assert memory(recipe, stage.model_copy(update={"offload_optimizer": False}), model, 1, False, CUDA)[
        "optimizer"
    ] == (8 * weights)
