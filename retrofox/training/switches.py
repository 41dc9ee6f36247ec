"""Which of a stage's switches make it fit, cheapest first."""

from __future__ import annotations

from typing import Any

import psutil
import torch

from retrofox.config import Recipe, Stage
from retrofox.parallel.settings import context_of
from retrofox.training.memory import cpu_memory, memory
from retrofox.training.refusals import deepspeed, optimizer_class, weights_are_sharded
from retrofox.training.tiling import untiled_layers

SWITCHES: dict[str, Any] = {
    "micro_batch": 1,
    "tiled_mlp": "auto",
    "offload_activations": True,
    "offload_optimizer": True,
    "gradient_checkpointing": "full",
}
"""Switches that save memory and what they are set to, from the one that costs least time to the one that costs most.

One row at a time costs nothing where a row fills the GPU; tiles and offloaded checkpoints, which only come with
gradient checkpointing, nothing that their copies can't hide; an offloaded optimizer 16 bytes of traffic a trained
parameter in each step; gradient checkpointing a third of the products, every layer's forward once more.
"""


def held_by_one(recipe: Recipe, stage: Stage) -> Stage:
    """A stage with rows of the length that one process holds, where several share them."""
    context = context_of(recipe)
    return stage.model_copy(update={"sequence_length": stage.sequence_length // context}) if context > 1 else stage


def fits(
    recipe: Recipe, stage: Stage, model: Any, devices: int, device: torch.device, teacher: bool, room: float
) -> bool:
    """Whether a stage's memory is at most `room` bytes on each device, and its offloads' at most the machine's."""
    held = held_by_one(recipe, stage)
    used = memory(recipe, held, model, devices, weights_are_sharded(), device, teacher)
    offloaded = sum(cpu_memory(recipe, held, model, device).values())
    return sum(used.values()) <= room and devices * offloaded <= psutil.virtual_memory().total


def switches_that_fit(
    recipe: Recipe, stage: Stage, model: Any, devices: int, device: torch.device, teacher: bool, room: float
) -> dict[str, Any] | None:
    """The cheapest changes with which a stage fits; {} where it fits as it is, None where no switch makes it.

    Args:
        model: on the meta device, requires_grad set as the stage trains it.
        room: bytes of a device.
    """
    free = {key: value for key, value in SWITCHES.items() if _can_change(key, recipe, stage, model, device)}
    cost = {key: 1 << list(SWITCHES).index(key) for key in free}
    sets: list[dict[str, Any]] = [{}]
    for key, value in free.items():
        sets += [{**other, key: value} for other in sets]
    for changes in sorted(sets, key=lambda changes: sum(cost[key] for key in changes)):
        changed = stage.model_copy(update=changes)
        if changed.offload_activations and changed.gradient_checkpointing == "none":
            continue
        if fits(recipe, changed, model, devices, device, teacher, room):
            return changes
    return None


def named(changes: dict[str, Any]) -> str:
    """Changes as a recipe writes them: "gradient_checkpointing: full and offload_activations: true"."""
    parts = [f"{key}: {str(value).lower()}" for key, value in reversed(changes.items())]
    return ", ".join(parts[:-1]) + " and " + parts[-1] if len(parts) > 1 else "".join(parts)


def _can_change(key: str, recipe: Recipe, stage: Stage, model: Any, device: torch.device) -> bool:
    if getattr(stage, key) == SWITCHES[key]:
        return False
    if key == "tiled_mlp":
        layers = stage.tiled_mlp == "none" and not stage.compile and not deepspeed()
        return layers and untiled_layers(model) == 0
    if key == "offload_activations":
        return stage.objective != "align" and device.type != "cpu"
    if key == "offload_optimizer":
        here = device.type != "cpu" and not deepspeed() and not weights_are_sharded()
        return here and _is_torchs_own(recipe.optim)
    return True


def _is_torchs_own(optimizer: str) -> bool:
    try:
        return optimizer_class(optimizer).__module__.startswith("torch.optim")
    except ValueError:  # refused elsewhere
        return False
