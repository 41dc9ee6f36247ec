"""Attention of unconverted models over packed documents whose positions skip ahead.

transformers takes any skip in position_ids for the start of another document. It masks packed rows with T x T booleans,
which keep SDPA from its flash kernel. Here the documents' ends are given, and each document is one causal SDPA call.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from retrofox.anatomy import causal_lm
from retrofox.families import check_settings, check_supported, has_softcap

NAME = "sdpa_by_document"
"""The attention implementation's name in transformers' registry."""


def attend_by_document(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    document_ends: list[int] | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each document: query (B, H, T, D), key and value (B, H_kv, T, D) -> (B, T, H, D).

    Args:
        document_ends: 0, then the end of each document in the B * T tokens, rows' ends included; None: one a row.
        sliding_window: a token sees itself and the `sliding_window - 1` before it, in its document.
    """
    rows, length = query.shape[0], query.shape[2]
    ends = document_ends or [row * length for row in range(rows + 1)]
    per_row: list[list[torch.Tensor]] = [[] for _ in range(rows)]
    for start, stop in itertools.pairwise(ends):
        row, first, count = start // length, start % length, stop - start
        q, k, v = (tensor[row : row + 1, :, first : first + count] for tensor in (query, key, value))
        mask = None
        if sliding_window is not None and count > sliding_window:
            seen = torch.ones(count, count, dtype=torch.bool, device=query.device)
            mask = seen.tril().triu(1 - sliding_window)[None, None]
        per_row[row].append(sdpa_attention_forward(module, q, k, v, mask, is_causal=True, **options)[0])
    return torch.cat([torch.cat(documents, 1) for documents in per_row]), None


AttentionInterface.register(NAME, attend_by_document)
AttentionMaskInterface.register(NAME, lambda *_, **__: None)  # there is no mask


def attends_by_document(model: Any) -> bool:
    """Whether `set_document_attention` was called on this model."""
    return causal_lm(model).config._attn_implementation == NAME


def set_document_attention(model: Any) -> None:
    """Makes an unconverted model attend by document, with the ends that its forward is given as `document_ends`."""
    config = causal_lm(model).config
    check_supported(config)  # of other families it is not known what their attention is given
    check_settings(config)
    if has_softcap(config) or config._attn_implementation not in ("sdpa", NAME):
        kind = "soft-capped" if has_softcap(config) else config._attn_implementation
        raise ValueError(
            f"max_position trains an unconverted model by SDPA, a document at a time, and this {config.model_type} "
            f"model's attention is {kind}: remove max_position (or `attention:`), or give "
            "`fox: {rope: keep, gate: none}`, the same model by this toolkit's attention"
        )
    model.set_attn_implementation(NAME)
