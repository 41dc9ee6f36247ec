"""Which keys a query sees: the mask function that transformers calls for Forgetting Attention, and masks made here."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionMaskInterface
from transformers.masking_utils import sdpa_mask


def fox_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask function registered as "fox": None or a (B, S) padding mask where causality, a window and left
    padding describe it fully; a 4D boolean mask for everything else (custom masks, holes, compiled static caches).
    """
    full = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "attention_mask": attention_mask,
        "allow_is_causal_skip": False,
        "use_vmap": use_vmap,
        **kwargs,
    }
    if not allow_is_causal_skip or use_vmap:
        return sdpa_mask(**full)
    if isinstance(q_offset, torch.Tensor):
        if torch.compiler.is_compiling():
            return sdpa_mask(**full)
        q_offset = int(q_offset)
    length = q_offset + q_length - kv_offset  # keys that exist by now
    if length > kv_length:
        return sdpa_mask(**full)
    if attention_mask is None:
        if length == kv_length:
            return None
        return torch.ones(batch_size, length, dtype=torch.bool, device=kwargs.get("device", "cpu"))
    mask = attention_mask[:, kv_offset : kv_offset + length].bool()
    if mask.shape[1] < length:
        return sdpa_mask(**full)
    if length == kv_length and bool(mask.all()):
        return None
    # Trailing padding is out of sight of every real query (causality); a gap in between is not.
    seen = mask.cumsum(1)
    gap = ~mask & (seen > 0) & (seen < seen[:, -1:])
    trailing = ~mask[:, -q_length:].any(1) if q_length < length else mask.new_zeros(batch_size)
    if bool(gap.any() | trailing.any()):
        return sdpa_mask(**full)
    return mask


def first_visible(mask: torch.Tensor) -> torch.Tensor:
    """(B,) int32: index of the first True of each row, the row's length where there is none."""
    first = mask.view(torch.uint8).argmax(1)
    return torch.where(mask.any(1), first, mask.shape[1]).to(torch.int32)


def visible_keys(
    num_queries: int, num_keys: int, seq_start: torch.Tensor | None, window: int | None, device: torch.device
) -> torch.Tensor | None:
    """(B or 1, 1, T, S) bool: causal, within the window, not before seq_start; None for a query that sees all keys."""
    if num_queries == 1 and seq_start is None and (window is None or window >= num_keys):
        return None
    i = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    j = torch.arange(num_keys, device=device)
    mask = (j <= i)[None, None]
    if window is not None:
        mask = mask & (i - j < window)
    return mask if seq_start is None else mask & (j >= seq_start[:, None, None, None])


AttentionMaskInterface.register("fox", fox_mask)
