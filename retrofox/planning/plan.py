"""`retrofox plan`: parameters, memory, hours, disk and price of a recipe in closed form, for any machine.

From the recipe and the model's config.json alone, within seconds for any size: nothing is built, torch isn't imported.
"""

from __future__ import annotations

import operator
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from retrofox.config import BudgetedStage, LoraConfig, Recipe, Stage, load_recipe
from retrofox.config.shipped import shipped
from retrofox.config_values import trained_length
from retrofox.planning.hardware import Hardware
from retrofox.planning.hours import hours_of
from retrofox.planning.known import KNOWN, config_of
from retrofox.planning.live_share import live_at_start
from retrofox.planning.memory import cpu_memory, memory, tile_tokens, trained_parameters
from retrofox.planning.refusals import refuse_budget, refused, refused_on
from retrofox.planning.shape import Shape, shape_of
from retrofox.planning.steps import STATE_BYTES, count_steps, readers_of, save_steps, tokens_per_step
from retrofox.spec_values import require_places
from retrofox.support.counts import size
from retrofox.support.files import nearest_existing

SWITCHES: dict[str, Any] = {
    "micro_batch": 1,
    "tiled_mlp": "auto",
    "offload_activations": True,
    "gradient_checkpointing": "full",
}
"""Switches that save memory and their values, from the least to the most costly in time.

One row at a time costs nothing where a row fills the GPU; tiles and offloaded checkpoints, which only come with
gradient checkpointing, nothing that their copies can't hide; gradient checkpointing a third of the products, every
layer's forward once more.
"""
LONGEST = 1 << 24
"""Tokens at which the search for the longest row ends."""


def plan(
    recipe: Recipe, on: Hardware, gpus: int = 1, sharding: str | None = None, price: float | None = None
) -> dict[str, Any]:
    """Parameters, memory, hours, disk and price of a run, in closed form.

    Args:
        sharding: "ddp", "fsdp2" or "zero3"; None = ddp where that fits and fsdp2 where it doesn't.
        price: dollars of a GPU's hour.

    Returns:
        parameters, per stage {steps, groups, memory_gb by part, fits, change, hours, ...}, live_at_start (as
        `live_shares` gives it; None without gates to start), disk_gb, dollars, recipes that fit this machine, refusals
        (an empty list where nothing in recipe and config is against the run).

    Raises:
        FileNotFoundError: no such model.
        ValueError: its config.json can't be planned from.
    """
    config = config_of(recipe.model)
    refusals = [*refused(recipe, config), *refused_on(recipe, gpus, sharding == "zero3")]
    spec = None if recipe.fox is None else recipe.fox.resolved(trained_length(config))
    shape = shape_of(config, spec)
    live = None
    if spec is not None:
        require_places(spec, shape.layers, shape.kv_heads)
    if spec is not None and spec.gate != "none":
        live = live_at_start(spec, trained_length(config), shape.layers, shape.heads, shape.kv_heads)
    on = _spread(shape, recipe, on, gpus, sharding)
    stages = []
    for number, stage in enumerate(recipe.stages):
        try:
            refuse_budget(stage, config if recipe.fox is None else {**config, "fox": recipe.fox.to_dict()})
        except ValueError as error:
            refusals.append(f"stages.{number}: {error}")
        stages.append(_stage_plan(shape, recipe, stage, on))
    disk = _disk(recipe, shape.parameters, stages)
    place = nearest_existing(Path(recipe.output))
    free = shutil.disk_usage(place if place.is_dir() else place.parent).free
    if on.host is not None and free < 1e9 * disk["one_checkpoint"]:
        refusals.append(
            f"the disk of {recipe.output} has {size(free)} free and a checkpoint takes "
            f"{size(1e9 * disk['one_checkpoint'])}"
        )
    hours = [stage["hours"] for stage in stages]
    total = None if None in hours else [sum(ends) for ends in zip(*hours, strict=True)]
    return {
        "model": recipe.model,
        "output": recipe.output,
        "parameters": shape.parameters,
        "parameters_added": shape.added,
        "device": on.name,
        "devices": gpus,
        "sharding": on.sharding if gpus > 1 else None,
        "device_memory_gb": on.memory / 1e9,
        "stages": stages,
        "live_at_start": live,
        "disk_gb": disk,
        "disk_free_gb": free / 1e9,
        "hours": total,
        "self_chat": recipe.data.self_chat,
        "dollars": None if total is None or price is None else [hours * gpus * price for hours in total],
        "recipes_that_fit": recipes_that_fit(on) if on.gpu else [],
        "refusals": refusals,
    }


def _spread(shape: Shape, recipe: Recipe, on: Hardware, gpus: int, sharding: str | None) -> Hardware:
    """Several devices, with the sharding asked for, or the first of ddp and fsdp2 with which every stage fits."""
    on = on._replace(gpus=gpus, sharding=sharding or "ddp")
    fit = sharding is not None or gpus == 1 or all(fits(shape, recipe, stage, on) for stage in recipe.stages)
    return on if fit else on._replace(sharding="fsdp2")


def fits(shape: Shape, recipe: Recipe, stage: Stage, on: Hardware) -> bool:
    """Whether a stage's memory is at most the device's, and its offloads' at most the machine's where that is known."""
    moved = on.gpus * sum(cpu_memory(shape, recipe, stage, on).values())
    needed = sum(memory(shape, recipe, stage, on).values())
    return needed <= on.memory and (on.host is None or moved <= on.host)


def _stage_plan(shape: Shape, recipe: Recipe, stage: Stage, on: Hardware) -> dict[str, Any]:
    batch_tokens = tokens_per_step(stage, readers_of(recipe.parallel, on.gpus))
    steps = count_steps(stage, batch_tokens)
    tokens = steps * batch_tokens
    trained = trained_parameters(shape, recipe.lora, stage)
    hours = hours_of(shape, recipe.lora, stage, tokens, on)
    return {
        "objective": stage.objective,
        "budget": stage.budget.model_dump() if isinstance(stage, BudgetedStage) and stage.budget else None,
        "tokens": tokens,
        "tokens_asked": stage.tokens,
        "batch_tokens": batch_tokens,
        "steps": steps,
        "groups": [
            {"role": role, "learning_rate": stage.rate(role), "parameters": count} for role, count in trained.items()
        ],
        "memory_gb": {part: amount / 1e9 for part, amount in memory(shape, recipe, stage, on).items()},
        "cpu_memory_gb": {
            part: amount / 1e9 for part, amount in cpu_memory(shape, recipe, stage, on).items() if amount
        },
        "fits": fits(shape, recipe, stage, on),
        "change": advice(shape, recipe, stage, on),
        "longest_sequence": longest_row(shape, recipe, stage, on),
        "hours": None if hours is None else [hours.low, hours.high],
        "hours_from": None if hours is None else hours.file,
    }


def changes_that_fit(shape: Shape, recipe: Recipe, stage: Stage, on: Hardware) -> dict[str, Any] | None:
    """The cheapest switches with which a stage fits; {} where it fits as it is, None where none make it."""
    free = {key: value for key, value in SWITCHES.items() if _can_change(key, shape, stage, on)}
    cost = {key: 1 << list(SWITCHES).index(key) for key in free}
    sets: list[dict[str, Any]] = [{}]
    for key, value in free.items():
        sets += [{**other, key: value} for other in sets]
    for changes in sorted(sets, key=lambda changes: sum(cost[key] for key in changes)):
        changed = stage.model_copy(update=changes)
        if changed.offload_activations and changed.gradient_checkpointing == "none":
            continue
        if fits(shape, recipe, changed, on):
            return changes
    return None


def _can_change(key: str, shape: Shape, stage: Stage, on: Hardware) -> bool:
    if getattr(stage, key) == SWITCHES[key]:
        return False
    if key == "tiled_mlp":
        return stage.tiled_mlp == "none" and bool(shape.matrices) and on.sharding != "zero3"
    if key == "offload_activations":
        return stage.objective != "align" and on.gpu
    return True


def advice(shape: Shape, recipe: Recipe, stage: Stage, on: Hardware) -> str | None:
    """One line: what to change so that a stage fits; None where it does."""
    if fits(shape, recipe, stage, on):
        return None
    for words, other, where in _variants(recipe, on):
        changes = changes_that_fit(shape, other, stage, where)
        if changes is not None:
            return "set " + " and ".join(filter(None, (words, named(changes))))
    for words, other, where in _variants(recipe, on):
        if longest := longest_row(shape, other, stage.model_copy(update=SWITCHES), where):
            beside = f" and {words}" if words else ""
            return f"set sequence_length to {longest} at most, with {named(SWITCHES)}{beside}"
    return "take a larger GPU"


def _variants(recipe: Recipe, on: Hardware) -> Iterator[tuple[str, Recipe, Hardware]]:
    """Larger changes than switches, the smallest first: in words, the recipe, the devices."""
    yield "", recipe, on
    if on.gpus > 1 and on.sharding == "ddp":
        yield "--sharding fsdp2", recipe, on._replace(sharding="fsdp2")
    adaptable = all(stage.objective in ("extend", "distill") for stage in recipe.stages)
    if recipe.lora is None and recipe.fox is not None and adaptable:
        yield "lora: {rank: 16}", recipe.model_copy(update={"lora": LoraConfig(rank=16)}), on
    if recipe.fox is not None and adaptable and (recipe.lora is None or recipe.lora.quantize is None):
        packed = (recipe.lora or LoraConfig(rank=16)).model_copy(update={"quantize": "nf4"})
        words = "lora: {rank: 16, quantize: nf4}" if recipe.lora is None else "lora.quantize: nf4"
        yield words, recipe.model_copy(update={"lora": packed}), on
    more = 2 * on.gpus
    while more <= 64 and more < 16 * on.gpus and recipe.lora is None:
        yield f"--gpus {more} --sharding fsdp2", recipe, on._replace(gpus=more, sharding="fsdp2")
        more *= 2


def named(changes: dict[str, Any]) -> str:
    """Changes as a recipe writes them: "gradient_checkpointing: full and offload_activations: true"."""
    parts = [f"{key}: {str(value).lower()}" for key, value in reversed(changes.items())]
    return ", ".join(parts[:-1]) + " and " + parts[-1] if len(parts) > 1 else "".join(parts)


def longest_row(shape: Shape, recipe: Recipe, stage: Stage, on: Hardware) -> int:
    """Longest row in tokens, one to a micro-batch, whose memory fits; a multiple of 256, 0 if none does."""

    def has_room(blocks: int) -> bool:
        changes = {"sequence_length": 256 * blocks, "micro_batch": 1, "batch_tokens": None}
        return fits(shape, recipe, stage.model_copy(update=changes), on)

    # Rows above a tile take less memory than a row of one tile: where the first of them fits, longer ones may.
    above = tile_tokens(shape, stage) // 256 + 1
    low, high = (above, 2 * above) if above > 1 and has_room(above) else (0, 1)
    while has_room(high) and 256 * high < LONGEST:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if has_room(middle) else (low, middle)
    return 256 * low


def _disk(recipe: Recipe, parameters: int, stages: list[dict[str, Any]]) -> dict[str, float]:
    """Bytes / 1e9: the checkpoints that every stage keeps and the one being written, the converted model, the results.

    one_checkpoint, of the stage with the largest, is a part of the total.
    """
    per_state, keep, lora = STATE_BYTES.get(recipe.optim, 8), recipe.checkpoint.keep, recipe.lora is not None
    trained = [sum(group["parameters"] for group in stage["groups"]) for stage in stages]
    sizes = [4 * (count if lora else parameters) + per_state * count for count in trained]
    counts = [
        min(keep, -(-stage["steps"] // save_steps(recipe.checkpoint, planned, stage["steps"])))
        for planned, stage in zip(recipe.stages, stages, strict=True)
    ]
    stored = 2 if recipe.precision != "fp32" and not lora else 4
    models = [4 * (count if lora else parameters) for count in trained[:-1]]
    models += [stored * (count if lora else parameters) for count in trained[-1:]]
    largest, converted = max(sizes, default=0), 4 * parameters if recipe.fox is not None else 0
    total = sum(map(operator.mul, sizes, counts)) + largest + converted + sum(models)
    return {"total": total / 1e9, "one_checkpoint": largest / 1e9}


def recipes_that_fit(on: Hardware) -> list[str]:
    """Names of the shipped recipes that this many devices hold, every stage of them."""
    found = []
    for name, file in shipped().items():
        if "/" in name:  # launch files
            continue
        recipe = load_recipe(file)
        config = KNOWN.get(recipe.model.removesuffix("-Instruct"))
        if config is None:
            continue
        shape = shape_of(config, recipe.fox)
        several = _spread(shape, recipe, on, on.gpus, None)
        if all(fits(shape, recipe, stage, several) for stage in recipe.stages):
            found.append(name)
    return found
