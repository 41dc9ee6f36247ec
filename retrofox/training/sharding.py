"""FSDP2 and DeepSpeed: the form of saved weights, and groups of their own for gates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from retrofox.anatomy import is_new_tensor


def sharding_of(accelerator: Any) -> str:
    """Who splits a run's weights, and in which form they are saved; a checkpoint names it, so that others refuse it."""
    if getattr(accelerator.state, "deepspeed_plugin", None) is not None:
        return "DeepSpeed"
    fsdp = getattr(accelerator.state, "fsdp_plugin", None)
    if fsdp is not None:
        return f"FSDP ({fsdp.state_dict_type.name})"
    return "no sharding"


def refuse_other_sharding(directory: Path, saved: str, now: str) -> None:
    """Raises ValueError where a checkpoint's weights are in a form that this run can't read."""
    if saved != now:
        raise ValueError(
            f"{directory} was saved with {saved}, this run has {now}: launch it with the "
            "accelerate config it was begun with (on any number of processes), or choose another `output`"
        )


def shard_new_modules(model: Any) -> None:
    """Gives gates and Pro parts FSDP2 groups of their own, float32: the layers' bfloat16 groups would cast them."""
    for name, module in list(model.named_modules()):
        holds = any(True for _ in module.parameters(recurse=False))
        if holds and is_new_tensor(f"{name}.weight") and not isinstance(module, FSDPModule):
            # Small, and a gather costs more than they weigh: gathered once a pass.
            policy = MixedPrecisionPolicy(cast_forward_inputs=False)
            fully_shard(module, mp_policy=policy, reshard_after_forward=False)
