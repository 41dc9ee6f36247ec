"""Dispatches a layer's attention: the operator, kernels for decoding, or torch's SDPA with a bias."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F

from .cache import GateCache, GrowingLayer
from .fixed import decode_at, decodes_at, visible_at
from .masks import first_visible, visible_keys

try:
    from fox_kernels import decode_attention, decodes, forgetting_attention

    SLOW_PATH = False
except ImportError:
    from .forgetting_eager import forgetting_attention

    SLOW_PATH = True

LN_2 = 0.6931471805599453
SHORT_SCORES = 1 << 20  # elements of one layer's score matrix: 9 heads x 340 tokens; 1024 took 652 ms, in chunks 115


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gates: GateCache,
    attention_mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """Takes the masked path, kernels for decoding or the operator; shapes as in `FoxMixin.attend`."""
    if attention_mask is not None and attention_mask.dim() == 4 and attention_mask.numel():
        return _masked(query, key, value, gates.cumulative(), attention_mask, options)
    if gates.layer is not None and gates.layer.clock is not None:
        return _at_clock(query, key, value, gates.layer, options)
    seq_start = None
    length = key.shape[2]
    if attention_mask is not None and attention_mask.dim() == 2:
        length = min(length, attention_mask.shape[1])
        seq_start = first_visible(attention_mask)
        key, value = key[:, :, :length], value[:, :, :length]
    if cu_seqlens is None and _short_on_cpu(query, key):
        high, low = (x[..., :length] for x in gates.cumulative())
        visible = visible_keys(query.shape[2], length, seq_start, options["window"], query.device)
        return _masked(query, key, value, (high, low), visible, options)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    layer = gates.layer
    if layer is not None and not SLOW_PATH and options["horizon"] is None and decodes(q, k, v):
        high, low = (x[..., :length] for x in layer.cumulative())
        return decode_attention(q, k, v, high, low, seq_start=seq_start, **_decoding(options))
    log_f = gates.log_f[:, :length]
    if cu_seqlens is None:
        return cast(torch.Tensor, forgetting_attention(q, k, v, log_f, seq_start=seq_start, **options))
    batch, length = q.shape[:2]
    q, k, v, log_f = (x.reshape(1, batch * length, *x.shape[2:]) for x in (q, k, v, log_f))
    out = cast(torch.Tensor, forgetting_attention(q, k, v, log_f, cu_seqlens=cu_seqlens, **options))
    return out.view(batch, length, *out.shape[2:])


def _decoding(options: dict[str, Any]) -> dict[str, Any]:
    """The options of the kernels for decoding, which read every key that is not masked."""
    return {name: value for name, value in options.items() if name not in ("prune", "horizon")}


def attend_locally(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_f: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """Forgetting Attention of tensors that are whole rows, all on this device; shapes as in `FoxMixin.attend`."""
    return attend(query, key, value, GateCache(None, log_f), None, cu_seqlens, options)


def _at_clock(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: GrowingLayer, options: dict[str, Any]
) -> torch.Tensor:
    """A decoding step whose length only the device knows: its clock counts the filled positions of key and value."""
    clock, (high, low) = layer.clock, layer.cumulative()
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if options["horizon"] is None and decodes_at(q, k):
        return decode_at(q, k, v, high, low, clock.length, seq_start=clock.seq_start, **_decoding(options))
    return _masked(query, key, value, (high, low), visible_at(clock, query.shape[2], options["window"]), options)


def scale_by_position(
    query: torch.Tensor, trained: int, position_ids: torch.Tensor | None, num_keys: int
) -> torch.Tensor:
    """Scales the query of position i by max(1, ln(i + 1) / ln(trained))."""
    if position_ids is None:
        position_ids = torch.arange(num_keys - query.shape[2], num_keys, device=query.device)[None]
    factor = (torch.log(position_ids.float() + 1) / torch.log(torch.tensor(float(trained)))).clamp_min(1.0)
    return query * factor[:, None, :, None].to(query.dtype)


def _masked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    c: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """Forgetting Attention under any boolean mask (B, 1, T, S): torch's SDPA with the decay as an additive bias.

    c, two floats of (B, H, S) in base 2, is the running sum of log f. A query's own position is the last key it may
    see, sinks are the first; without a mask a single query sees all keys. With open gates the bias is 0 and the result
    is bit for bit what SDPA gives the base model, but for single queries: those of a kv head are rows of one product.
    """
    scaling, softcap, sink, horizon = (options[name] for name in ("scale", "softcap", "sink", "horizon"))
    own = None
    if mask is not None:
        mask = mask if mask.dtype == torch.bool else mask >= 0  # additive: 0 lets through, a large negative does not
        own = mask.shape[-1] - 1 - mask.flip(-1).int().argmax(-1)  # (B, 1, T)
    high, low = (x.to(torch.promote_types(query.dtype, x.dtype)) for x in c)
    if own is None:  # a single query, the last
        decay, lost = ((x[..., -1:] - x)[:, :, None] for x in (high, low))
    else:
        own = own.expand(*high.shape[:2], -1)
        decay, lost = (x.gather(-1, own)[..., None] - x[..., None, :] for x in (high, low))
    decay = (decay + lost) * LN_2
    gone = None if horizon is None else decay <= -horizon  # never the query's own key, whose decay is 0
    if mask is None:
        decay[..., :sink] = 0.0
    elif sink:
        decay = decay.masked_fill(mask & (mask.cumsum(-1) <= sink), 0.0)
    if gone is not None:  # sinks' decay is 0 by now
        decay = decay.masked_fill(gone & (decay < 0.0), float("-inf"))
    bias = decay.to(query.dtype if softcap is None else torch.float32)
    if mask is not None:
        bias = bias.masked_fill(~mask, float("-inf"))
    if softcap is None and query.shape[2] == 1:
        rows, bias = (x.reshape(key.shape[0], key.shape[1], -1, x.shape[-1]) for x in (query, bias))
        out = F.scaled_dot_product_attention(rows, key, value, attn_mask=bias, scale=scaling).view(query.shape)
    elif softcap is None:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling, enable_gqa=True)
    else:
        groups = query.shape[1] // key.shape[1]
        scores = (query @ key.repeat_interleave(groups, 1).transpose(-1, -2)).float()
        scores = scores * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        weights = torch.softmax(softcap * torch.tanh(scores / softcap) + bias, -1)
        out = weights.to(value.dtype) @ value.repeat_interleave(groups, 1)
    if mask is not None:
        out = out.masked_fill(~mask.any(-1, keepdim=True), 0.0)
    return out.transpose(1, 2).contiguous()


def _short_on_cpu(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether to take SDPA with a bias: inference on a CPU, where the score matrix is small or one query's."""
    if query.device.type != "cpu" or (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)):
        return False
    most = SHORT_SCORES << 8 if query.shape[2] == 1 else SHORT_SCORES  # one query's bias is smaller than its keys
    return query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2] <= most
