"""Recipes that a model or a launch can't run, by its config.json: `train` refuses them first, `plan` lists why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from retrofox.config import BudgetedStage, Recipe, Stage
from retrofox.config_values import kv_heads_of, rope_sets, rope_type, value_of
from retrofox.loading.source import check_source
from retrofox.model.configuration_fox import FoxFields
from retrofox.planning.steps import accumulation, readers_of, tokens_per_step


def refused(recipe: Recipe, config: dict[str, Any]) -> Iterator[str]:
    """Why a model with this config.json can't be trained by a recipe, a sentence for each reason."""
    if config.get("model_type", "").startswith("fox_"):
        for key in ("fox", "rope_scaling", "rope_theta", "attention"):
            if getattr(recipe, key) is not None:
                yield f"{key} is for unconverted models, and {recipe.model} is converted: remove it"
        if config.get("quantization_config") and recipe.lora is None:
            yield f"{recipe.model} is quantised, so its weights can't be trained: add `lora:`, or take it unquantised"
    elif recipe.fox is not None:
        try:
            check_source(recipe.model, config)
        except ValueError as error:
            yield str(error)
    elif recipe.lora is not None:
        yield "LoRA here adapts converted models: give the recipe a `fox:` section"
    elif recipe.rope_scaling is not None:
        asked = recipe.rope_scaling.model_dump(exclude_none=True)
        scaled = [values for values in rope_sets(config) if rope_type(values) != "default"]
        already = [rope_type(values) for values in scaled if {**values, **asked} != values]
        if already:
            yield f"rope_scaling: this model's RoPE is scaled already (rope_type {already[0]}): take another model"


def refuse_budget(stage: Stage, config: Any) -> None:
    """Raises ValueError for a budget that the gates of a converted model's config can't be pressed to."""
    if not isinstance(stage, BudgetedStage) or stage.budget is None:
        return
    spec = FoxFields.read(value_of(config, "fox") or {"gate": "none"})
    learned = {"data": ("gate_bias", "gate_weight"), "bias": ("gate_bias",)}.get(spec.gate, ())
    if not any(stage.rate(role) for role in learned):
        raise ValueError("budget is for gates, and this stage trains none: set it to null")
    if spec.init == "open":
        raise ValueError("budget: gates of init open have no gradient: set it to null, or take another init")
    number = spec.open_heads if isinstance(spec.open_heads, int) else len(spec.open_heads)
    share = number / (value_of(config, "num_hidden_layers") * kv_heads_of(config))
    if share >= stage.budget.share:
        raise ValueError(
            f"fox.open_heads leaves {share:.0%} of the heads open, and budget.share is {stage.budget.share:.0%} of "
            "the keys of all: open fewer heads, or raise share"
        )


def refused_on(recipe: Recipe, processes: int, deepspeed: bool) -> Iterator[str]:
    """Why so many processes, or DeepSpeed, can't run a recipe, a sentence for each reason."""
    context, readers = recipe.parallel.context, readers_of(recipe.parallel, processes)
    if processes % context:
        yield (
            f"parallel.context: {context} processes share a row, and there are {processes}: launch a multiple of "
            f"{context} (accelerate launch --num_processes {context} -m retrofox train; WORLD_SIZE={context} for plan)"
        )
    if deepspeed and (context > 1 or any(stage.tiled_mlp != "none" for stage in recipe.stages)):
        yield "parallel.context and tiled_mlp run with DDP and FSDP2, not with DeepSpeed: take an FSDP2 config"
    for number, stage in enumerate(recipe.stages):
        try:
            accumulation(stage, tokens_per_step(stage, readers), readers)
        except ValueError as error:
            yield f"stages.{number}: {error}"
