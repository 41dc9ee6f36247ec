"""The model a stage trains: converted first where the recipe says so, float32 master weights, adapters, teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from retrofox.config import Recipe, Stage
from retrofox.surgery import convert, is_new_tensor, load, load_base, read_config

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def resolve_source(recipe: Recipe, out: Path, state: PartialState) -> Path:
    """The checkpoint training starts from: the recipe's model, or OUTPUT/converted, made now if it is not there.

    Raises:
        ValueError: `fox:` with a model that is already converted.
        FileNotFoundError: no such model.
    """
    is_gguf = recipe.model.endswith(".gguf")
    model_type = "" if is_gguf else read_config(recipe.model).get("model_type", "")
    if recipe.fox is None:
        return Path(recipe.model)
    if model_type.startswith("fox_"):
        raise ValueError(
            f"{recipe.model} is already converted ({model_type}): remove `fox:` from the recipe, or give its base model"
        )
    converted = out / "converted"
    if state.is_main_process and not (converted / "config.json").is_file():
        print(f"converting {recipe.model} into {converted}", flush=True)
        convert(recipe.model, converted, fox=recipe.fox)
    state.wait_for_everyone()
    return converted


def build_model(recipe: Recipe, source: Path, state: PartialState) -> Any:
    """The model to train, on the CPU in float32 (frozen bases of LoRA in the recipe's precision), adapters added."""
    if recipe.lora is not None:
        from retrofox.lora import adapted

        return adapted(recipe, source, state)
    model = load_any(recipe, source, torch.float32)
    model.config.use_cache = False
    return model


def load_any(recipe: Recipe, source: Path, dtype: torch.dtype) -> Any:
    """A converted model through `retrofox.load`, a plain one with the recipe's `attention`."""
    if not str(source).endswith(".gguf") and read_config(str(source)).get("model_type", "").startswith("fox_"):
        if recipe.attention is not None:
            raise ValueError(f"{source} is converted and always runs Forgetting Attention: remove `attention`")
        return load(str(source), dtype=dtype)
    model, _ = load_base(str(source), dtype=dtype)
    if recipe.attention is not None:
        model.set_attn_implementation(recipe.attention)
    return model


def teacher_for(recipe: Recipe, stage: Stage, model: Any, source: Path, state: PartialState) -> Any:
    """The original to learn from: None where the trained model's own frozen weights are the original.

    Raises:
        ValueError: teacher shared while pretrained tensors are trained, or no longer the original's.
    """
    moved = [n for n, p in model.named_parameters() if p.requires_grad and not is_new_tensor(n) and "lora_" not in n]
    earlier = recipe.stages[: _position(recipe, stage)]
    if recipe.lora is None and any(s.rate("attention") > 0 or s.rate("rest") > 0 for s in earlier):
        moved.append("the pretrained tensors an earlier stage trained")
    if stage.teacher == "shared" and moved:
        raise ValueError(
            f"teacher: shared needs the original's weights untouched, but this run trains {moved[0]}: "
            "set rates.attention and rates.rest to 0, or teacher: copy"
        )
    if stage.teacher == "shared" or (stage.teacher == "auto" and not moved):
        return None
    dtype = DTYPES[recipe.precision]
    teacher = load_any(recipe, source, dtype)
    return teacher.to(state.device).requires_grad_(False).eval()


def _position(recipe: Recipe, stage: Stage) -> int:
    return next(i for i, other in enumerate(recipe.stages) if other is stage)
