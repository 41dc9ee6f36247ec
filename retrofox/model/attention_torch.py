"""Forgetting Attention in plain PyTorch: right and readable. retrofox brings kernels that are fast.

    o_i = sum_j softmax_j(scale q_i . k_j + c_i - c_j) v_j,    c_i = log f_1 + ... + log f_i

over the keys j that query i sees. c_i - c_j is absent for sink tokens. With a softcap the product becomes
softcap * tanh(scale q_i . k_j / softcap) before the decay is added. Source: Lin et al., ICLR 2025, eq. 3.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

LN_2 = 0.6931471805599453
LOG2_E = 1.4426950408889634
LOG_F_MIN = -1e4  # exp underflows long before; keeps f = 0 and its running sum finite
SCORES = 1 << 24  # of a chunk of queries: 64 MB in float32
Tensor = torch.Tensor


def two_floats(c: Tensor) -> tuple[Tensor, Tensor]:
    """(float32, residual of the rounding) of a float64 tensor."""
    high = c.float()
    return high, (c - high).float()


def summed(log_f: Tensor) -> Tensor:
    """c (B, H, T) float64 in base 2, the running sum of log f (B, T, H)."""
    return torch.cumsum(log_f.transpose(1, 2).clamp_min(LOG_F_MIN), -1, dtype=torch.float64) * LOG2_E


def of_heads(gates: Tensor, heads: int, dim: int) -> Tensor:
    """Gates with a place for each query head along `dim`, where those of a kv head may share one."""
    return gates if gates.shape[dim] == heads else gates.repeat_interleave(heads // gates.shape[dim], dim)


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, c: tuple[Tensor, Tensor], mask: Tensor | None, *,
    scale: float | None = None, sink: int = 0, softcap: float | None = None, horizon: float | None = None,
) -> Tensor:  # fmt: skip
    """Forgetting Attention under any boolean mask, by torch's SDPA with the decay as an additive bias.

    With open gates the bias is 0 and the result is bit for bit what SDPA gives the base model, but for single queries:
    those of a kv head are rows of one product.

    Args:
        query: (B, H, T, D); key: (B, Hkv, S, D); value: (B, Hkv, S, DV).
        c: (B, H, S) in base 2 as two floats, or (B, Hkv, S): the query heads of a kv head share a gate.
        mask: (B or 1, 1, T, S), bool or additive. A query's own key is the last it sees, sinks are the first. None: one
            query that sees all keys.
        horizon: nats; keys that have decayed by as much are masked, but sinks.

    Returns: (B, T, H, DV); 0 for a query that sees nothing.
    """
    sums = c[0].double() + c[1]
    if mask is None:  # a single query, the last
        decay = (sums[..., -1:] - sums)[:, :, None] * LN_2
    else:
        mask = mask if mask.dtype == torch.bool else mask >= 0  # additive: 0 lets through, a large negative does not
        own = mask.shape[-1] - 1 - mask.flip(-1).int().argmax(-1)  # (B, 1, T)
        own = own.expand(*sums.shape[:2], -1)
        decay = (sums.gather(-1, own)[..., None] - sums[..., None, :]) * LN_2
    if mask is None:
        decay[..., :sink] = 0.0
    elif sink:
        decay = decay.masked_fill(mask & (mask.cumsum(-1) <= sink), 0.0)
    if horizon is not None:  # neither sinks nor the own key, whose decay is 0; rounding must not show a key at the edge
        decay = decay.masked_fill(decay <= -horizon * (1 - 1e-9), float("-inf"))
    bias = decay.to(query.dtype if softcap is None else torch.float32)
    if mask is not None:  # a softmax over nothing would have gradients of NaN: such rows are zeroed at the end
        bias = bias.masked_fill(~mask & mask.any(-1, keepdim=True), float("-inf"))
    if softcap is None and query.shape[2] == 1:
        rows, bias = (x.reshape(key.shape[0], key.shape[1], -1, x.shape[-1]) for x in (query, bias))
        out = F.scaled_dot_product_attention(rows, key, value, attn_mask=bias, scale=scale).flatten(1, 2)[:, :, None]
    elif softcap is None:
        bias = of_heads(bias, query.shape[1], 1)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale, enable_gqa=True)
    else:
        groups = query.shape[1] // key.shape[1]
        scores = (query @ key.repeat_interleave(groups, 1).transpose(-1, -2)).float()
        scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
        weights = torch.softmax(softcap * torch.tanh(scores / softcap) + of_heads(bias, query.shape[1], 1), -1)
        out = weights.to(value.dtype) @ value.repeat_interleave(groups, 1)
    if mask is not None:
        out = out.masked_fill(~mask.any(-1, keepdim=True), 0.0)
    return out.transpose(1, 2).contiguous()


def forgetting_attention(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, *, scale: float | None = None, cu_seqlens: Tensor | None = None,
    seq_start: Tensor | None = None, window: int | None = None, sink: int = 0, softcap: float | None = None,
    horizon: float | None = None,
) -> Tensor:  # fmt: skip
    """Causal Forgetting Attention, a chunk of queries at a time; the backward computes each chunk again.

    Args:
        q: (B, T, H, D); k: (B, S, Hkv, D); v: (B, S, Hkv, DV); the queries are the last T of the S positions.
        log_f: (B, S, H) float32, natural log.
        cu_seqlens: (N + 1,) document starts of one row; seq_start: (B,) the first visible position of each row.
        window: keys that a query sees, its own included; sink: first positions of a document, exempt from decay.

    Returns: (B, T, H, DV)
    """
    batch, length, heads = q.shape[:3]
    total = k.shape[1]
    c = two_floats(summed(log_f))
    start = torch.zeros(batch, total, dtype=torch.long, device=q.device)
    if cu_seqlens is not None:
        place = torch.arange(total, device=q.device)
        bounds = cu_seqlens.long()
        start = bounds[torch.searchsorted(bounds[1:].contiguous(), place, right=True)].expand(batch, total)
    if seq_start is not None:
        start = torch.maximum(start, seq_start.long()[:, None])
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))
    size = max(32, SCORES // max(1, batch * heads * total))

    def chunk(first: int, query: Tensor, key: Tensor, value: Tensor, high: Tensor, low: Tensor) -> Tensor:
        last = first + query.shape[2]
        mask = visible_keys(torch.arange(first, last, device=q.device), last, start[:, first:last], window, sink)
        return masked_attention(
            query, key, value, (high, low), mask, scale=scale, sink=sink, softcap=softcap, horizon=horizon
        )

    outputs = []
    for first in range(0, length, size):
        last = min(first + size, length)
        seen = total - length + last
        rows = query[:, :, first:last], key[:, :, :seen], value[:, :, :seen], *(x[..., :seen] for x in c)
        given = (total - length + first, *rows)
        recomputed = torch.is_grad_enabled() and size < length
        outputs.append(checkpoint(chunk, *given, use_reentrant=False) if recomputed else chunk(*given))
    return torch.cat(outputs, 1) if outputs else q[..., : v.shape[-1]]


def visible_keys(queries: Tensor, num_keys: int, start: Tensor | None, window: int | None, sink: int = 0) -> Tensor:
    """(B or 1, 1, T, S) bool: causal, in the window or a sink, from `start` (B, T or 1) on; queries: (T,) positions."""
    keys = torch.arange(num_keys, device=queries.device)
    first = 0 if start is None else start[:, None, :, None]
    mask = (keys <= queries[:, None])[None, None] & (keys >= first)
    return mask if window is None else mask & ((queries[:, None] - keys < window) | (keys < first + sink))
