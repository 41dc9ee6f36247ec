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
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return degrees(parallel.context, kv_heads, parallel.ulysses)


def refuse_processes(parallel: ParallelConfig, processes: int) -> None:
    """Raises ValueError where the processes don't make whole context groups."""
    context = parallel.context
    if processes % context:
        raise ValueError(
            f"parallel.context: {context} processes share a row, and there are {processes}: launch a multiple of "
            f"{context} (accelerate launch --num_processes {context} -m retrofox train; WORLD_SIZE={context} for plan)"
        )


def refuse_sharing(model: Any, split: Degrees) -> None:
    """Raises ValueError for a model, on any device, whose rows a context group can't share."""
    if split.context == 1:
        return
    if not is_converted(model):
        raise ValueError(
            "parallel.context shares rows for Forgetting Attention only: convert the model, or give `fox:` to the "
            "recipe; an unconverted model trains with DDP or FSDP2"
        )
    if depends_on_length(causal_lm(model).config):
        raise ValueError(
            "parallel.context: this model's RoPE (dynamic or longrope) takes its frequencies from the length of what "
            "one process sees: take another rope_type, or parallel.context 1"
        )
