"""What beams, and texts that processes share, take at least: refused where there is less memory."""

from __future__ import annotations

from typing import Any

import torch

from retrofox.anatomy import vocabulary_size
from retrofox.parallel.settings import key_value_heads
from retrofox.support.counts import size
from retrofox.support.memory import free_bytes


def refuse_beams(model: Any, rows: int, tokens: int, num_beams: int) -> None:
    """Raises ValueError where the beams of so many prompts of `tokens` need more memory than there is.

    Counted are scores and log-probabilities of a step, float32, and the keys and values of the prompts.
    """
    beams = rows * num_beams
    window = getattr(model.config, "sliding_window", None) or tokens
    needed = beams * (2 * 4 * vocabulary_size(model) + min(tokens, window) * _token_bytes(model))
    _refuse(model, needed, f"num_beams {num_beams:,} for prompts of {rows} x {tokens:,} tokens takes at least")


def refuse_room(model: Any, rows: int, max_new_tokens: int, context: int) -> None:
    """Raises ValueError where a process has no memory for its part of the new tokens' keys, which it sets aside."""
    needed = rows * -(-max_new_tokens // context) * _token_bytes(model)
    _refuse(model, needed, f"max_new_tokens {max_new_tokens:,} with context {context} sets aside, on each process,")


def _token_bytes(model: Any) -> int:
    """Bytes of one token's keys and values in all layers; 0 where a model has no attention that says so."""
    config = model.config
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        return 0
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 2 * config.num_hidden_layers * key_value_heads(config) * head_dim * model.dtype.itemsize


def _refuse(model: Any, needed: int, what: str) -> None:
    device: torch.device = next(model.parameters()).device
    free = free_bytes(device)
    if needed > free:
        raise ValueError(f"{what} {size(needed)} of memory, and {size(free)} are free on {device}: give fewer")
