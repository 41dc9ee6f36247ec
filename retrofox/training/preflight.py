"""Checks before anything is written: the one list of refusals that `plan --check` shows and `train` stops at."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM

from retrofox.anatomy import lm_class
from retrofox.config import ExtendStage, Recipe, Stage
from retrofox.loading.configs import any_config
from retrofox.loading.rope_scaling import set_rope_config
from retrofox.loading.source import read_config, refuse_adapter
from retrofox.parallel.settings import readers_of
from retrofox.planning.hardware import Hardware
from retrofox.planning.memory import Setting, cpu_memory, memory
from retrofox.planning.plan import advice, launched_sharding
from retrofox.planning.shape import FAMILIES, shape_of
from retrofox.planning.steps import accumulation, tokens_per_step
from retrofox.support.counts import size
from retrofox.surgery import make_plan
from retrofox.training.lora import add_adapters
from retrofox.training.model import changes_rope, refuse_rope, rope_scaling, set_attention
from retrofox.training.refusals import (
    refuse_context,
    refuse_log,
    refuse_optimizer,
    refuse_output,
    refuse_parallelism,
    refuse_positions,
    refuse_precision,
    refuse_quantization,
    refuse_stage,
    refused_data,
)
from retrofox.training.teacher import needs_teacher


def preflight(recipe: Recipe, devices: int, device: torch.device) -> list[Exception]:
    """Checks everything that the recipe, its files and this machine decide; writes nothing.

    Returns:
        Refusals, in the order they were found; an empty list where the run can start.

    Raises:
        FileNotFoundError: no such model.
    """
    refusals: list[Exception] = []

    def collect(check: Callable[[], Any], where: str = "") -> None:
        try:
            check()
        except (ValueError, FileNotFoundError) as error:
            refusals.append(type(error)(f"{where}{error}") if where else error)

    collect(refuse_parallelism)
    collect(lambda: refuse_context(recipe, devices))
    for refuse in (refuse_precision, refuse_quantization, refuse_log, refuse_optimizer, refuse_output):
        collect(functools.partial(refuse, recipe))
    readers = readers_of(recipe, devices)
    for number, stage in enumerate(recipe.stages):
        check = functools.partial(accumulation, stage, tokens_per_step(stage, readers), readers)
        collect(check, where=f"stages.{number}: ")
    config = None
    try:
        config = trained_config(recipe)
        empty(config, recipe)
    except ValueError as error:
        refusals.append(error)
        config = None
    refusals += refused_data(recipe, getattr(config, "vocab_size", None))
    if config is not None:
        for number, stage in enumerate(recipe.stages):
            check = functools.partial(_refuse_stage, recipe, stage, config, devices, device)
            collect(check, where=f"stages.{number}: ")
    return refusals


def _refuse_stage(recipe: Recipe, stage: Stage, config: Any, devices: int, device: torch.device) -> None:
    model, source = empty(config, recipe), starts_from(recipe)
    if isinstance(stage, ExtendStage) and stage.max_position is not None:
        # Here only: annealing may have left no RoPE to a stage that resumes.
        refuse_positions(recipe, model, stage.max_position)
    set_attention(model, recipe)
    refuse_stage(recipe, stage, model, source, device)
    needs_teacher(recipe, stage, model, source)
    _refuse_size(recipe, stage, config, devices, device)


def _refuse_size(recipe: Recipe, stage: Stage, config: Any, devices: int, device: torch.device) -> None:
    """Raises ValueError where a machine has less CPU memory than a stage's offloads, or all of it on a CPU, need.

    A GPU's allocator says so at the first step. A model whose shape isn't known in closed form is not refused.
    """
    if config.model_type.removeprefix("fox_") not in FAMILIES:
        return
    shape, total = shape_of(config.to_dict()), psutil.virtual_memory().total
    setting = Setting(devices, launched_sharding() or "ddp", cuda=device.type != "cpu")
    offloaded = devices * sum(cpu_memory(shape, recipe, stage, setting).values())
    if offloaded > total:
        raise ValueError(
            f"its offloads need {size(offloaded)} of CPU memory and this machine has {size(total)}: lower "
            f"sequence_length ({stage.sequence_length:,}), or set offload_activations: false"
        )
    needed = sum(memory(shape, recipe, stage, setting).values())
    if device.type == "cpu" and needed > total:
        change = advice(shape, recipe, stage, Hardware("CPU", total, None, gpu=False), setting)
        raise ValueError(f"it needs {size(needed)} and this machine has {size(total)}: {change}")


def starts_from(recipe: Recipe) -> Path | None:
    """The checkpoint that training starts from; None: a conversion that is yet to be made."""
    return Path(recipe.model) if recipe.fox is None else None


def trained_config(recipe: Recipe) -> Any:
    """The config of the model to train, as the conversion makes it."""
    if recipe.model.endswith(".gguf"):
        config = any_config(recipe.model)
    else:
        refuse_adapter(recipe.model)
        refuse_rope(recipe, recipe.model)
        model_type = read_config(recipe.model).get("model_type", "")
        if model_type.startswith("fox_"):
            if recipe.fox is not None:
                raise ValueError(
                    f"{recipe.model} is already converted ({model_type}): remove `fox:` from the recipe, or give its "
                    "base model"
                )
            return lm_class(model_type.removeprefix("fox_")).config_class.from_pretrained(recipe.model)
        config = any_config(recipe.model)
    if recipe.fox is None:
        if recipe.lora is not None:
            raise ValueError("LoRA here adapts converted models: give the recipe a `fox:` section")
        if changes_rope(recipe):
            set_rope_config(config, rope_scaling(recipe), recipe.rope_theta)
        return config
    return make_plan(config, recipe.fox, base=recipe.model).config


def empty(config: Any, recipe: Recipe) -> Any:
    """The model without memory: parameters on the meta device."""
    with torch.device("meta"):
        return built(config, recipe)


def built(config: Any, recipe: Recipe) -> Any:
    """The model of a config with random weights in float32, adapters added where the recipe has them."""
    if not config.model_type.startswith("fox_"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    model = lm_class(config.model_type.removeprefix("fox_"))(config)
    if recipe.lora is None:
        return model
    return add_adapters(model, recipe.lora, recipe.model)
