"""How many processes share a row, and what can't be shared."""

from __future__ import annotations

from typing import Any

from retrofox.anatomy import causal_lm, is_converted
from retrofox.config import ParallelConfig
from retrofox.loading.rope_scaling import depends_on_length
from retrofox.parallel.layout import Degrees, degrees


def readers_of(parallel: ParallelConfig, processes: int) -> int:
    """How many different rows the processes read at a time: one for each context group."""
    return max(1, processes // parallel.context)


def split_of(parallel: ParallelConfig, config: Any) -> Degrees:
    """How a context group is split for a model's key/value heads."""
    return degrees(parallel.context, key_value_heads(config), parallel.ulysses)


def key_value_heads(config: Any) -> int:
    """Key/value heads of a model's attention."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def refuse_processes(parallel: ParallelConfig, processes: int) -> None:
    """Raises ValueError where the processes don't make whole context groups."""
    context = parallel.context
    if processes % context:
        raise ValueError(
            f"parallel.context: {context} processes share a row, and there are {processes}: launch a multiple of "
            f"{context} (accelerate launch --num_processes {context} -m retrofox train; WORLD_SIZE={context} for plan)"
        )


def refuse_sharing(model: Any, split: Degrees, name: str = "context") -> None:
    """Raises ValueError for a model, on any device, whose rows a context group can't share.

    Args:
        name: what the caller's setting is called.
    """
    if split.context == 1:
        return
    if not is_converted(model):
        raise ValueError(
            f"{name} shares rows for Forgetting Attention only: convert the model, or give `fox:` to the recipe; an "
            "unconverted model trains with DDP or FSDP2"
        )
    if depends_on_length(causal_lm(model).config):
        raise ValueError(
            f"{name}: this model's RoPE (dynamic or longrope) takes its frequencies from the length of what "
            f"one process sees: take another rope_type, or {name} 1"
        )
