"""What `train` refuses before anything runs, and `plan` names: parallelism, precision, trackers that can't be had."""

from __future__ import annotations

import importlib.util
import os

import torch

from retrofox.config import Recipe


def refuse_parallelism() -> None:
    """Raises ValueError for parallelism that would move q, k, v and leave the gates behind."""
    for variable, name in (("PARALLELISM_CONFIG_CP_SIZE", "context"), ("PARALLELISM_CONFIG_SP_SIZE", "sequence")):
        if int(os.environ.get(variable, "1")) > 1:
            raise ValueError(
                f"{name} parallelism ({variable}={os.environ[variable]}) moves queries, keys and values but not the "
                "forget gates, so attention would be wrong without a sign: use DDP, FSDP2 or ZeRO-3"
            )


def refuse_precision(recipe: Recipe) -> None:
    """Raises ValueError for a precision the device can't run."""
    if deepspeed() and os.environ.get("ACCELERATE_MIXED_PRECISION", "no") != "no":
        raise ValueError(
            "DeepSpeed's 16-bit engines round the forget gates: set mixed_precision: 'no' in the accelerate config "
            "(recipes/accelerate/zero3.yaml); the recipe's `precision` says what products run in"
        )
    if recipe.precision == "fp16" and deepspeed():
        raise ValueError("precision fp16 under DeepSpeed would round the forget gates to 16 bits: use bf16 or fp32")
    if recipe.precision == "fp16" and not torch.cuda.is_available():
        raise ValueError("precision fp16 needs a GPU: use bf16 or fp32 on a CPU")
    if recipe.precision == "bf16" and torch.cuda.is_available() and not torch.cuda.is_bf16_supported():
        raise ValueError(f"{torch.cuda.get_device_name()} has no bfloat16: use precision fp16 or fp32")


def deepspeed() -> bool:
    """Whether accelerate launched this process for DeepSpeed."""
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"


def own_autocast(recipe: Recipe) -> bool:
    """Whether bfloat16 products are ours to ask for: DeepSpeed's bfloat16 engine would round the forget gates, too."""
    return recipe.precision == "bf16" and deepspeed()


def refuse_trackers(recipe: Recipe) -> None:
    """Raises ValueError for a tracker that is not installed."""
    for name in recipe.log.report_to:
        if importlib.util.find_spec(name) is None:
            raise ValueError(
                f"log.report_to: {name} needs {name} installed: pip install 'retrofox[track]', or remove it"
            )


def refuse_optimizer(recipe: Recipe) -> None:
    """Raises ValueError for an optimizer that is unknown, not installed, or makes its own parameter groups."""
    from transformers import Trainer, TrainingArguments

    # The device must be the run's own: TrainingArguments sets it for the whole process.
    on_cpu = not torch.cuda.is_available()
    settings = TrainingArguments(output_dir=recipe.output, optim=recipe.optim, report_to=[], use_cpu=on_cpu)
    try:
        cls, options = Trainer.get_optimizer_cls_and_kwargs(settings)
    except ImportError as error:
        raise ValueError(f"optim: {recipe.optim} needs a package: {error}") from None
    own = [key for key in ("params", "model", "optimizer_dict") if key in options]
    if own or not isinstance(cls, type):
        raise ValueError(
            f"optim: {recipe.optim} makes its own parameter groups, so rates by role would be lost: choose another, "
            "e.g. adamw_torch_fused"
        )
