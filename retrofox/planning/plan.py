"""`retrofox plan`: parameters, memory, hours, disk and refusals of a recipe, before anything runs."""

from __future__ import annotations

import math
import operator
import os
from pathlib import Path
from typing import Any

import torch

from retrofox.config import Recipe, Stage
from retrofox.parallel.settings import readers_of
from retrofox.planning.measure import measure_steps
from retrofox.planning.report import print_plan
from retrofox.support.counts import size
from retrofox.support.launches import processes
from retrofox.support.memory import reset_peak
from retrofox.training.arguments import STATE_BYTES
from retrofox.training.flops import flops_per_token, peak_flops
from retrofox.training.groups import count_steps, parameter_groups, save_steps, set_trainable, tokens_per_step
from retrofox.training.memory import cpu_memory
from retrofox.training.model import lower_frozen
from retrofox.training.preflight import (
    StagePreflight,
    built,
    device_memory,
    empty,
    preflight,
    starts_from,
)
from retrofox.training.refusals import free_bytes
from retrofox.training.switches import fits, held_by_one, switches_that_fit
from retrofox.training.teacher import needs_teacher
from retrofox.training.tiling import untiled_layers

LONGEST_BLOCKS = 1 << 16
"""Where the search for the longest row ends, in blocks of 256 tokens: 16M tokens."""
MEASURED_ON = ("H100", "H200")
MEASURED_MFU = (
    ("extend", False, 135e6, 0.25),
    ("distill", False, 135e6, 0.16),
    ("align", False, 135e6, 0.092),
    ("extend", True, 135e6, 0.053),
    ("distill", True, 135e6, 0.045),
    ("extend", False, 1.2e9, 0.34),
    ("extend", True, 8.2e9, 0.27),
)
"""Objective, adapters, parameters, share of the peak reached: SmolLM2-135M converted, by its recipes (medians of their
logs, benchmarks/first-result); Qwen3-8B with adapters and Llama-3.2-1B, converted, 32768 (benchmarks/shapes.json)."""


def plan(recipe: Recipe, measure: bool = False, show: bool = False) -> dict[str, Any]:
    """Everything about a run that can be known before it: parameters, memory, time, disk, refusals.

    Args:
        measure: run two real steps of every stage on this machine (random tokens) for time and peak memory.
        show: print it as tables, once where several processes plan (WORLD_SIZE devices; `accelerate launch` sets it).

    Returns:
        parameters, per stage {groups, steps, memory_gb by component, longest_sequence, hours, ...}, disk_gb, refusals
        (an empty list where the recipe can run here).

    Raises:
        FileNotFoundError: no such model.
        ValueError: measuring on several devices takes one process per device.
    """
    devices, out = processes(), Path(recipe.output)
    show = show and os.environ.get("RANK", "0") == "0"
    if measure and devices > 1 and "RANK" not in os.environ:
        raise ValueError(
            f"WORLD_SIZE={devices} in one process: measuring takes as many processes, accelerate launch -m retrofox "
            "plan RECIPE --measure; or plan without --measure"
        )
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    found = preflight(recipe, devices, device)
    refusals, config = [str(error) for error in found.refusals], found.config
    if config is None:
        report = {"model": recipe.model, "output": recipe.output, "stages": [], "refusals": refusals}
        if show:
            print_plan(report)
        return report
    stages = [_stage_plan(recipe, ready, devices, device) for ready in found.stages]
    total = _count(empty(config, recipe.model_copy(update={"lora": None})))
    disk, free = _disk(recipe, total, stages), free_bytes(out)
    if free < 1e9 * disk["one_checkpoint"]:
        refusals.append(
            f"the disk of {out} has {size(free)} free and a checkpoint takes {size(1e9 * disk['one_checkpoint'])}"
        )
    report = {
        "model": recipe.model,
        "output": recipe.output,
        "parameters": total,
        "parameters_added": found.added,
        "devices": devices,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "device_memory_gb": device_memory(device) / 1e9,
        "stages": stages,
        "disk_gb": disk,
        "disk_free_gb": free / 1e9,
        "refusals": refusals,
    }
    if measure and not refusals:
        for stage, entry in zip(recipe.stages, stages, strict=True):
            entry["measured"] = _measured(recipe, stage, config, device)
            entry["hours"] = entry["tokens"] / entry["measured"]["tokens_per_second"] / 3600
            whole = recipe.lora is not None and recipe.lora.quantize is not None
            entry["hours_from"] = "two steps measured here" + (", with the base not yet quantised" if whole else "")
    if show:
        print_plan(report)
    return report


def _count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _stage_plan(recipe: Recipe, ready: StagePreflight, devices: int, device: torch.device) -> dict[str, Any]:
    stage, model, used = ready.stage, ready.model, ready.memory
    batch_tokens = tokens_per_step(stage, readers_of(recipe, devices))
    steps = count_steps(stage, batch_tokens)
    tokens = steps * batch_tokens
    room = device_memory(device)
    peak = peak_flops(device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else ""
    share = _measured_share(stage, recipe.lora is not None, _count(model)) if name else None
    changes = switches_that_fit(recipe, stage, model, devices, device, ready.teacher, room)
    flops = flops_per_token(model, stage)
    hours = None
    if peak is not None and share is not None:
        hours = tokens * flops / (peak * share * devices) / 3600
    groups: dict[str, dict[str, Any]] = {}
    for group in parameter_groups(model, stage):
        entry = groups.setdefault(group["role"], {"role": group["role"], "learning_rate": group["lr"], "parameters": 0})
        entry["parameters"] += sum(parameter.numel() for parameter in group["params"])
    # peft keeps a frozen copy of each gate beside the one that is trained: no part of the model.
    named = [(name, p) for name, p in model.named_parameters() if ".original_module." not in name]
    frozen = sum(p.numel() for _, p in named if not p.requires_grad)
    return {
        "objective": stage.objective,
        "tokens": tokens,
        "tokens_asked": stage.tokens,
        "batch_tokens": batch_tokens,
        "steps": steps,
        "groups": list(groups.values()),
        "adapter_parameters": sum(p.numel() for name, p in named if "lora_" in name and p.requires_grad),
        "frozen_parameters": frozen,
        "memory_gb": {key: value / 1e9 for key, value in used.items()},
        "cpu_memory_gb": {
            key: value / 1e9
            for key, value in cpu_memory(recipe, held_by_one(recipe, stage), model, device).items()
            if value
        },
        "fits": changes == {},
        "switches": changes,
        "untiled_layers": 0 if stage.tiled_mlp == "none" else untiled_layers(model),
        "longest_sequence": _longest(recipe, ready, devices, device),
        "flops_per_token": flops,
        "hours": hours,
        "hours_from": None if hours is None or share is None else _where_from(share, name),
    }


def _measured(recipe: Recipe, stage: Stage, config: Any, device: torch.device) -> dict[str, float | None]:
    """Speed and peak memory of real steps of a stage, on random weights and tokens; see `measure_steps`."""
    torch.manual_seed(recipe.seed)
    before = reset_peak(device)
    with device:
        model, teacher = built(config, recipe), None
        set_trainable(model, stage, adapters=recipe.lora is not None)
        lower_frozen(model, recipe)
        if needs_teacher(recipe, stage, model, starts_from(recipe)):
            teacher = built(config, recipe.model_copy(update={"lora": None}))
    return measure_steps(recipe, stage, model, device, teacher, before=before)


def _measured_share(stage: Stage, adapters: bool, parameters: int) -> float:
    """Share of the peak of the nearest run in the table: the objective first, then adapters, then size."""
    objective = "extend" if stage.objective == "adapt" else stage.objective
    rows = [row for row in MEASURED_MFU if row[0] == objective]
    rows = [row for row in rows if row[1] == adapters] or rows
    return min(rows, key=lambda row: abs(math.log(row[2] / parameters)))[3]


def _where_from(share: float, name: str) -> str:
    elsewhere = "" if any(key in name for key in MEASURED_ON) else ", which is another GPU"
    return f"{share:.0%} of the peak, as measured on an H100 or H200{elsewhere}: give --measure for this machine's own"


def _longest(recipe: Recipe, ready: StagePreflight, devices: int, device: torch.device) -> int:
    """Longest row in tokens, one to a micro-batch, whose memory fits; a multiple of 256, 0 if none does."""
    room = device_memory(device)

    def has_room(blocks: int) -> bool:
        changes = {"sequence_length": 256 * blocks, "micro_batch": 1, "batch_tokens": None}
        longer = ready.stage.model_copy(update=changes)
        return fits(recipe, longer, ready.model, devices, device, ready.teacher, room)

    low, high = 0, 1
    while has_room(high) and high < LONGEST_BLOCKS:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if has_room(middle) else (low, middle)
    return 256 * low


def _disk(recipe: Recipe, parameters: int, stages: list[dict[str, Any]]) -> dict[str, float]:
    """Bytes / 1e9: the checkpoints that every stage keeps and the one being written, the converted model, the results.

    total is their sum; one_checkpoint (of the stage with the largest) a part of it.
    """
    per_state, keep, lora = STATE_BYTES.get(recipe.optim, 8), recipe.checkpoint.keep, recipe.lora is not None
    trained = [sum(group["parameters"] for group in stage["groups"]) for stage in stages]
    sizes = [4 * (count if lora else parameters) + per_state * count for count in trained]
    counts = [
        min(keep, -(-stage["steps"] // save_steps(recipe, planned, stage["steps"])))
        for planned, stage in zip(recipe.stages, stages, strict=False)
    ]
    stored = 2 if recipe.precision != "fp32" and not lora else 4
    models = [4 * (count if lora else parameters) for count in trained[:-1]]
    models += [stored * parameters for stage in recipe.stages if stage.objective == "adapt"]
    models += [stored * (count if lora else parameters) for count in trained[-1:]]
    parts = {
        "checkpoints": (sum(map(operator.mul, sizes, counts)) + max(sizes, default=0)) / 1e9,
        "converted": (4 * parameters / 1e9) if recipe.fox is not None else 0.0,
        "models": sum(models) / 1e9,
    }
    return {**parts, "total": math.fsum(parts.values()), "one_checkpoint": max(sizes, default=0) / 1e9}
