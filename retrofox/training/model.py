"""The model a stage trains: converted first where the recipe says so, float32 master weights, adapters, teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM

from retrofox.anatomy import is_converted, is_new_tensor, lm_class
from retrofox.config import ExtendStage, LoraConfig, Recipe
from retrofox.config_values import trained_length
from retrofox.conversion.convert import convert
from retrofox.fox_spec import FoxSpec
from retrofox.loading.base import load_base
from retrofox.loading.configs import any_config
from retrofox.loading.converted import load
from retrofox.loading.device import PRECISIONS
from retrofox.loading.rope_scaling import set_rope, set_rope_config
from retrofox.loading.source import holds_converted, read_config, refuse_adapter
from retrofox.planning.refusals import refused
from retrofox.surgery import make_plan, start_gates
from retrofox.training.document_attention import set_document_attention
from retrofox.training.lora import adapted, add_adapters


def trained_config(recipe: Recipe) -> Any:
    """The config of the model to train, as the conversion makes it.

    Raises:
        ValueError: an adapter; a converted model, and a key for unconverted ones; LoRA on an unconverted one.
        FileNotFoundError: no such model.
    """
    refuse_adapter(recipe.model)
    values = {} if recipe.model.endswith(".gguf") else read_config(recipe.model)
    for refusal in refused(recipe, values):
        raise ValueError(refusal)
    if holds_converted(recipe.model):
        return lm_class(values["model_type"].removeprefix("fox_")).config_class.from_pretrained(recipe.model)
    config = any_config(recipe.model)
    if recipe.fox is not None:
        return make_plan(config, recipe.fox, base=recipe.model).config
    set_rope_config(config, recipe.rope_scaling and recipe.rope_scaling.model_dump(), recipe.rope_theta)
    return config


def built(config: Any, lora: LoraConfig | None = None, base: str = "") -> Any:
    """The model of a config with random weights in float32, but gates at their starts; adapters where `lora` has them.

    Args:
        base: what adapters name as their base.
    """
    if not config.model_type.startswith("fox_"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    model = lm_class(config.model_type.removeprefix("fox_"))(config)
    spec = FoxSpec.from_dict(config.fox).resolved(trained_length(config))
    if isinstance(spec.open_heads, int):  # a text will choose them: here one in each layer in turn
        layers = config.num_hidden_layers
        spec.open_heads = tuple((n % layers, n // layers) for n in range(spec.open_heads))
    start_gates(model, spec)
    return model if lora is None else add_adapters(model, lora, base)


def resolve_source(recipe: Recipe, out: Path, state: PartialState) -> Path:
    """The checkpoint training starts from: the recipe's model, or OUTPUT/converted, made now if it is not there."""
    model, fox = recipe.model, recipe.fox
    if fox is None:
        return Path(model)
    converted = out / "converted"
    if state.is_main_process and not (converted / "config.json").is_file():
        print(f"converting {model} into {converted}", flush=True)
        # The texts that will be trained on are the ones to look at where the base's heads are measured.
        convert(model, converted, fox=fox, texts=recipe.data.read_as() if fox.init == "measured" else [])
    state.wait_for_everyone()
    return converted


def build_model(recipe: Recipe, source: Path, device: torch.device) -> Any:
    """The model to train, on the CPU in float32 (frozen bases of LoRA in the recipe's precision), adapters added."""
    if recipe.lora is not None:
        torch.manual_seed(recipe.seed)  # adapters start at random: alike in every run, whatever its processes
        return adapted(source, recipe.lora, PRECISIONS[recipe.precision], device)
    if holds_converted(str(source)):
        model = load(str(source), dtype=torch.float32)
    else:
        model, _ = load_base(str(source), dtype=torch.float32)
        set_rope(model, recipe.rope_scaling and recipe.rope_scaling.model_dump(), recipe.rope_theta)
        set_attention(model, recipe)
    model.config.use_cache = False
    return model


def set_attention(model: Any, recipe: Recipe) -> None:
    """Runs an unconverted model with the recipe's attention, or its own; by document where positions skip ahead."""
    if recipe.attention is not None:
        try:
            model.set_attn_implementation(recipe.attention)
        except (ImportError, ValueError) as error:
            raise ValueError(f"attention: {recipe.attention} can't run here: {error}") from None
    skips = any(isinstance(stage, ExtendStage) and stage.max_position is not None for stage in recipe.stages)
    if skips and not is_converted(model):
        set_document_attention(model)


def lower_frozen(model: Any, dtype: torch.dtype) -> None:
    """The frozen base under adapters in `dtype`, as `adapted` loads it; gates and Pro parts float32."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad and not is_new_tensor(name):
            parameter.data = parameter.data.to(dtype)
