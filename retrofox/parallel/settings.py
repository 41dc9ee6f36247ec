"""How many processes share a row: what the recipe and accelerate's ParallelismConfig say, and what can't be shared."""

from __future__ import annotations

import os
from typing import Any

from retrofox.anatomy import causal_lm, is_converted
from retrofox.config import ParallelConfig
from retrofox.loading.rope_scaling import depends_on_length
from retrofox.parallel.layout import Degrees, degrees
from retrofox.support.launches import shards_weights

PREFIX = "PARALLELISM_CONFIG_"
"""Of the environment variables by which accelerate launches processes with a ParallelismConfig."""
USED = "ACCELERATE_USE_PARALLELISM_CONFIG"
"""The environment variable that makes accelerate read them."""


def _accelerate(size: str) -> int:
    return int(os.environ.get(f"{PREFIX}{size}_SIZE", "1"))


def context_of(parallel: ParallelConfig) -> int:
    """Processes that share a row: the recipe's `parallel.context`, or accelerate's cp_size where that is 1.

    Raises:
        ValueError: both say something, and not the same.
    """
    ours, theirs = parallel.context, _accelerate("CP")
    if ours > 1 and theirs > 1 and ours != theirs:
        raise ValueError(
            f"parallel.context is {ours} and accelerate's cp_size ({PREFIX}CP_SIZE) is {theirs}: give one of them"
        )
    return max(ours, theirs)


def readers_of(parallel: ParallelConfig, processes: int) -> int:
    """How many different rows the processes read at a time: one for each context group."""
    return max(1, processes // context_of(parallel))


def take_over(parallel: ParallelConfig) -> ParallelConfig:
    """Takes the context dimension out of accelerate's ParallelismConfig into ours, so that only we act on it.

    Accelerate's own context parallelism replaces torch's attention and knows no gates. What shards weights sees
    dp_shard x cp processes, as in torch: the dimensions of data and context make one. DDP needs no dimensions.

    Raises:
        ValueError: `parallel.context` says otherwise.
    """
    context = context_of(parallel)
    if USED in os.environ and not shards_weights():
        os.environ[USED] = "false"
    if _accelerate("CP") == 1:
        return parallel
    os.environ[f"{PREFIX}DP_SHARD_SIZE"] = str(_accelerate("DP_SHARD") * context)
    os.environ[f"{PREFIX}CP_SIZE"] = "1"
    if _accelerate("DP_REPLICATE") == 1:
        os.environ[USED] = "false"  # one dimension is what accelerate does without it
    return parallel.model_copy(update={"context": context})


def split_of(parallel: ParallelConfig, config: Any) -> Degrees:
    """How a context group is split for a model's key/value heads."""
    return degrees(context_of(parallel), key_value_heads(config), parallel.ulysses)


def key_value_heads(config: Any) -> int:
    """Key/value heads of a model's attention."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def refuse_processes(parallel: ParallelConfig, processes: int) -> None:
    """Raises ValueError where the processes don't make whole context groups."""
    context = context_of(parallel)
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
            "parallel.context shares rows for Forgetting Attention only: give `fox:` to the recipe, or train an "
            "unconverted model with DDP or FSDP2"
        )
    if depends_on_length(causal_lm(model).config):
        raise ValueError(
            f"{name}: this model's RoPE (dynamic or longrope) takes its frequencies from the length of what "
            f"one process sees: take another rope_type, or {name} 1"
        )
