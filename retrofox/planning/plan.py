"""`retrofox plan`: what a recipe will train, need and take, and why it would be refused, before anything runs."""

from __future__ import annotations

import functools
import math
import operator
import os
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from retrofox.anatomy import lm_class
from retrofox.calibration.steps import STEPS
from retrofox.calibration.windows import TOKENS_READ
from retrofox.config import Recipe, Stage
from retrofox.loading.source import read_config, refuse_adapter
from retrofox.planning.measure import measure_steps
from retrofox.planning.memory import memory, reset_peak
from retrofox.planning.report import print_plan, size
from retrofox.surgery import make_plan
from retrofox.training.arguments import STATE_BYTES
from retrofox.training.flops import flops_per_token, peak_flops
from retrofox.training.groups import accumulation, count_steps, parameter_groups, save_steps, set_trainable
from retrofox.training.lora import add_adapters
from retrofox.training.model import lower_frozen
from retrofox.training.refusals import (
    deepspeed,
    free_bytes,
    refuse_optimizer,
    refuse_output,
    refuse_parallelism,
    refuse_precision,
    refuse_quantization,
    refuse_stage,
    refuse_trackers,
    refused_data,
)
from retrofox.training.teacher import needs_teacher

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
    devices, out = int(os.environ.get("WORLD_SIZE", "1")), Path(recipe.output)
    sharded = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    sharded |= deepspeed() and os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") == "3"
    show = show and os.environ.get("RANK", "0") == "0"
    if measure and devices > 1 and "RANK" not in os.environ:
        raise ValueError(
            f"WORLD_SIZE={devices} in one process: measuring takes as many processes, accelerate launch -m retrofox "
            "plan RECIPE --measure; or plan without --measure"
        )
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    refusals = _refusals(recipe, devices)
    config, retrofit = _configs(recipe, refusals)
    refusals += refused_data(recipe, None if config is None else getattr(config, "vocab_size", None))
    if config is not None:
        try:
            _empty(config, recipe)
        except ValueError as error:
            refusals.append(str(error))
            config = None
    if config is None:
        report = {"model": recipe.model, "output": recipe.output, "stages": [], "refusals": refusals}
        if show:
            print_plan(report)
        return report
    source = Path(recipe.model) if recipe.fox is None else None
    stages = []
    for number, stage in enumerate(recipe.stages):
        model = _empty(config, recipe)
        try:
            refuse_stage(recipe, stage, model, source, device)
            stages.append(_stage_plan(recipe, stage, model, source, devices, sharded, device))
        except ValueError as error:
            refusals.append(f"stages.{number}: {error}")
    total = _count(_empty(config, recipe.model_copy(update={"lora": None})))
    disk, free = _disk(recipe, total, stages), free_bytes(out)
    if free < 1e9 * disk["one_checkpoint"]:
        refusals.append(
            f"the disk of {out} has {size(free / 1e9)} free and a checkpoint takes {size(disk['one_checkpoint'])}"
        )
    report = {
        "model": recipe.model,
        "output": recipe.output,
        "parameters": total,
        "calibration": _calibration(recipe),
        "parameters_added": 0 if retrofit is None else retrofit.parameters,
        "devices": devices,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "device_memory_gb": _device_memory(device) / 1e9,
        "stages": stages,
        "disk_gb": disk,
        "disk_free_gb": free / 1e9,
        "refusals": refusals,
    }
    if measure and not refusals:
        for stage, entry in zip(recipe.stages, stages, strict=True):
            entry["measured"] = _measured(recipe, stage, config, source, device)
            entry["hours"] = entry["tokens"] / entry["measured"]["tokens_per_second"] / 3600
            whole = recipe.lora is not None and recipe.lora.quantize is not None
            entry["hours_from"] = "two steps measured here" + (", with the base not yet quantised" if whole else "")
    if show:
        print_plan(report)
    return report


def _calibration(recipe: Recipe) -> dict[str, Any] | None:
    """What `fox.init: calibrated` will do before training; None where nothing is calibrated."""
    if recipe.fox is None or recipe.fox.init != "calibrated":
        return None
    return {"steps_per_layer": STEPS, "most_tokens": TOKENS_READ, "data": [source.path for source in recipe.data.train]}


def _refusals(recipe: Recipe, devices: int) -> list[str]:
    found = []
    named = (refuse_precision, refuse_quantization, refuse_trackers, refuse_optimizer, refuse_output)
    checks: list[Any] = [refuse_parallelism, *(functools.partial(refuse, recipe) for refuse in named)]
    for stage in recipe.stages:
        whole = stage.batch_tokens or stage.sequence_length * stage.micro_batch * devices
        checks.append(lambda stage=stage, whole=whole: accumulation(stage, whole, devices))
    for check in checks:
        try:
            check()
        except ValueError as error:
            found.append(str(error))
    return found


def _configs(recipe: Recipe, refusals: list[str]) -> tuple[Any, Any]:
    """(config of the model to train, conversion plan or None); (None, None) after a refusal."""
    try:
        if recipe.model.endswith(".gguf"):
            path = Path(recipe.model)
            if not path.is_file():
                raise FileNotFoundError(f"{recipe.model}: no such file")
            config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
        else:
            refuse_adapter(recipe.model)
            values = read_config(recipe.model)
            if values.get("model_type", "").startswith("fox_"):
                if recipe.fox is not None:
                    raise ValueError(f"{recipe.model} is already converted: remove `fox:` from the recipe")
                return lm_class(values["model_type"].removeprefix("fox_")).config_class.from_pretrained(
                    recipe.model
                ), None
            config = AutoConfig.from_pretrained(recipe.model)
        if recipe.fox is None:
            if recipe.lora is not None:
                raise ValueError("lora needs a converted model: give the recipe a `fox:` section")
            if any(stage.objective != "extend" for stage in recipe.stages):
                raise ValueError("align and distill compare a retrofit with its original: give `fox:` to the recipe")
            return config, None
        retrofit = make_plan(config, recipe.fox, base=recipe.model)
        return retrofit.config, retrofit
    except ValueError as error:
        refusals.append(str(error))
        return None, None


def _empty(config: Any, recipe: Recipe) -> Any:
    """The model without memory: parameters on the meta device."""
    with torch.device("meta"):
        return _built(config, recipe)


def _built(config: Any, recipe: Recipe) -> Any:
    """The model of a config with random weights in float32, adapters added where the recipe has them."""
    if not config.model_type.startswith("fox_"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model = lm_class(config.model_type.removeprefix("fox_"))(config)
    if recipe.lora is None:
        return model
    return add_adapters(model, recipe.lora, recipe.model)


def _count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _stage_plan(
    recipe: Recipe, stage: Stage, model: Any, source: Path | None, devices: int, sharded: bool, device: torch.device
) -> dict[str, Any]:
    batch_tokens = stage.batch_tokens or stage.sequence_length * stage.micro_batch * devices
    steps = count_steps(stage, batch_tokens)
    tokens = steps * batch_tokens
    teacher = needs_teacher(recipe, stage, model, source)
    used = memory(recipe, stage, model, devices, sharded, device, teacher)
    room = _device_memory(device)
    peak = peak_flops(device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else ""
    share = _measured_share(stage, recipe.lora is not None, _count(model)) if name else None
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
        "fits": sum(used.values()) <= room,
        "longest_sequence": _longest(recipe, stage, model, (devices, sharded, device, teacher), room),
        "flops_per_token": flops,
        "hours": hours,
        "hours_from": None if hours is None or share is None else _where_from(share, name),
    }


def _measured(
    recipe: Recipe, stage: Stage, config: Any, source: Path | None, device: torch.device
) -> dict[str, float | None]:
    """Speed and peak memory of real steps of a stage, on random weights and tokens; see `measure_steps`."""
    torch.manual_seed(recipe.seed)
    before = reset_peak(device)
    with device:
        model, teacher = _built(config, recipe), None
        set_trainable(model, stage, adapters=recipe.lora is not None)
        lower_frozen(model, recipe)
        if needs_teacher(recipe, stage, model, source):
            teacher = _built(config, recipe.model_copy(update={"lora": None}))
    return measure_steps(recipe, stage, model, device, teacher, before=before)


def _measured_share(stage: Stage, adapters: bool, parameters: int) -> float:
    """Share of the peak of the nearest run in the table: the objective first, then adapters, then size."""
    rows = [row for row in MEASURED_MFU if row[0] == stage.objective]
    rows = [row for row in rows if row[1] == adapters] or rows
    return min(rows, key=lambda row: abs(math.log(row[2] / parameters)))[3]


def _where_from(share: float, name: str) -> str:
    elsewhere = "" if any(key in name for key in MEASURED_ON) else ", which is another GPU"
    return f"{share:.0%} of the peak, as measured on an H100 or H200{elsewhere}: give --measure for this machine's own"


def _longest(recipe: Recipe, stage: Stage, model: Any, where: tuple[int, bool, torch.device, bool], room: float) -> int:
    """Longest row in tokens, one to a micro-batch, whose memory fits; a multiple of 256, 0 if none does.

    where: devices, sharded, device and teacher, as `memory` takes them.
    """

    def fits(blocks: int) -> bool:
        longer = stage.model_copy(update={"sequence_length": 256 * blocks, "micro_batch": 1, "batch_tokens": None})
        return sum(memory(recipe, longer, model, *where).values()) <= room

    low, high = 0, 1
    while fits(high) and high < LONGEST_BLOCKS:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return 256 * low


def _device_memory(device: torch.device) -> float:
    """Bytes a run can have: on a GPU without its context and what an allocator loses to fragments (5 %)."""
    if device.type == "cuda":
        return 0.95 * torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total


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
    models += [stored * (count if lora else parameters) for count in trained[-1:]]
    parts = {
        "checkpoints": (sum(map(operator.mul, sizes, counts)) + max(sizes, default=0)) / 1e9,
        "converted": (4 * parameters / 1e9) if recipe.fox is not None else 0.0,
        "models": sum(models) / 1e9,
    }
    return {**parts, "total": math.fsum(parts.values()), "one_checkpoint": max(sizes, default=0) / 1e9}
