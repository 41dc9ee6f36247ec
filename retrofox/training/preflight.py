"""Checks before anything is written: the one list of refusals that `plan` shows and `train` stops at."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
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
from retrofox.support.counts import size
from retrofox.surgery import make_plan
from retrofox.training.groups import accumulation, tokens_per_step
from retrofox.training.lora import add_adapters
from retrofox.training.memory import cpu_memory, memory
from retrofox.training.model import changes_rope, refuse_rope, rope_scaling
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
    weights_are_sharded,
)
from retrofox.training.switches import held_by_one, named, switches_that_fit
from retrofox.training.teacher import needs_teacher


@dataclass
class StagePreflight:
    """A stage that can run: its model on the meta device, requires_grad set, and bytes by component."""

    stage: Stage
    model: Any
    teacher: bool
    memory: dict[str, float]


@dataclass
class Preflight:
    """Results of the checks before a run: refusals in the order they were found, and the parts that passed.

    Attributes:
        config: of the model to train, None where it can't be known.
        added: parameters that the conversion will add.
        stages: those that can run.
    """

    refusals: list[Exception] = field(default_factory=list)
    config: Any = None
    added: int = 0
    stages: list[StagePreflight] = field(default_factory=list)

    def collect(self, check: Callable[[], Any], where: str = "") -> Any:
        """The result of a check; None, and its error noted, where it refuses."""
        try:
            return check()
        except (ValueError, FileNotFoundError) as error:
            self.refusals.append(type(error)(f"{where}{error}") if where else error)
            return None


def preflight(recipe: Recipe, devices: int, device: torch.device) -> Preflight:
    """Checks everything that the recipe, its files and this machine decide; writes nothing.

    Raises:
        FileNotFoundError: no such model.
    """
    found = Preflight()
    found.collect(refuse_parallelism)
    found.collect(lambda: refuse_context(recipe, devices))
    for refuse in (refuse_precision, refuse_quantization, refuse_log, refuse_optimizer, refuse_output):
        found.collect(functools.partial(refuse, recipe))
    readers = readers_of(recipe, devices)
    for number, stage in enumerate(recipe.stages):
        check = functools.partial(accumulation, stage, tokens_per_step(stage, readers), readers)
        found.collect(check, where=f"stages.{number}: ")
    try:
        found.config, found.added = _config(recipe)
        empty(found.config, recipe)
    except ValueError as error:
        found.refusals.append(error)
        found.config = None
    found.refusals += refused_data(recipe, getattr(found.config, "vocab_size", None))
    if found.config is not None:
        for number, stage in enumerate(recipe.stages):
            check = functools.partial(_stage, recipe, stage, found.config, devices, device)
            ready = found.collect(check, where=f"stages.{number}: ")
            if ready is not None:
                found.stages.append(ready)
                found.collect(
                    functools.partial(_refuse_size, recipe, ready, devices, device), where=f"stages.{number}: "
                )
    return found


def _stage(recipe: Recipe, stage: Stage, config: Any, devices: int, device: torch.device) -> StagePreflight:
    model, source = empty(config, recipe), starts_from(recipe)
    if isinstance(stage, ExtendStage) and stage.max_position is not None:
        # Here only: annealing may have left no RoPE to a stage that resumes.
        refuse_positions(recipe, model, stage.max_position)
    refuse_stage(recipe, stage, model, source, device)
    teacher = needs_teacher(recipe, stage, model, source)
    held = held_by_one(recipe, stage)
    return StagePreflight(
        stage, model, teacher, memory(recipe, held, model, devices, weights_are_sharded(), device, teacher)
    )


def _refuse_size(recipe: Recipe, ready: StagePreflight, devices: int, device: torch.device) -> None:
    """Raises ValueError where a machine has less CPU memory than a stage needs.

    For its offloads, or on a CPU for all of it; a GPU's allocator says so at the first step.
    """
    stage, room = ready.stage, device_memory(device)
    offloaded = devices * sum(cpu_memory(recipe, held_by_one(recipe, stage), ready.model, device).values())
    if offloaded > psutil.virtual_memory().total:
        raise ValueError(
            f"its offloads need {size(offloaded)} of CPU memory and this machine has "
            f"{size(psutil.virtual_memory().total)}: lower sequence_length ({stage.sequence_length:,}), or set "
            "offload_activations: false"
        )
    needed = sum(ready.memory.values())
    if device.type == "cpu" and needed > room:
        changes = switches_that_fit(recipe, stage, ready.model, devices, device, ready.teacher, room)
        raise ValueError(
            f"it needs {size(needed)} and this machine has {size(room)}: "
            + (f"set {named(changes)}, or " if changes else "no switch makes it fit: ")
            + f"lower sequence_length ({stage.sequence_length:,})"
        )


def starts_from(recipe: Recipe) -> Path | None:
    """The checkpoint that training starts from; None: a conversion that is yet to be made."""
    return Path(recipe.model) if recipe.fox is None else None


def device_memory(device: torch.device) -> float:
    """Bytes a run can have: on a GPU without its context and an allocator's fragments (5 %)."""
    if device.type == "cuda":
        return 0.95 * torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total


def _config(recipe: Recipe) -> tuple[Any, int]:
    """(config of the model to train, parameters that its conversion adds)."""
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
            return lm_class(model_type.removeprefix("fox_")).config_class.from_pretrained(recipe.model), 0
        config = any_config(recipe.model)
    if recipe.fox is None:
        if recipe.lora is not None:
            raise ValueError("LoRA here adapts converted models: give the recipe a `fox:` section")
        if changes_rope(recipe):
            set_rope_config(config, rope_scaling(recipe), recipe.rope_theta)
        return config, 0
    retrofit = make_plan(config, recipe.fox, base=recipe.model)
    return retrofit.config, retrofit.parameters


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
