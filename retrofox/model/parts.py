"""Forgetting Attention of whole rows on a CPU, by torch's flash kernel in a few calls.

The softmax of a query ignores what is the same for all its keys, so c_i - c_j may be c_ref - c_j: a bias of the key
alone, which the kernel reads once for all queries. c_ref is that of the first of a block of queries, which ends before
c has fallen by MOST_DECAY, so that nothing large cancels. A block's own square, the keys before it and the sink tokens,
which do not decay, are parts: each yields an output and its log-sum-exp, from which the whole is mixed. A short
prompt's decays are written out instead, one for each score: one call, and less work than mixing. Where c falls by no
more than MOST_DECAY in all of it, they are -c_j, and -c_i where j is a sink, as softmax takes no notice of what all
scores of a row have in common.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LN_2 = 0.6931471805599453
MOST_DECAY = 16.0  # nats, which float32 holds to 1e-6
NO_DECAY = 2.0**-24  # of a whole row, in base 2: no float32 score of 1 tells it from none
WRITTEN_OUT = 256  # queries: at 512, writing c_i - c_j takes as long as mixing
SHUT = 1e4  # of a whole row, in base 2: a gate of it is shut
BLOCKS = (256, 128, 64)  # queries: the first that fits; longer ones are no faster
FLASH: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


def divides(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `by_parts` may be tried: several queries in float32 on a CPU, in eager inference."""
    if query.device.type != "cpu" or query.shape[2] < 2 or query.shape[-1] != value.shape[-1] or FLASH is None:
        return False
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return False
    return all(type(x) is Tensor and x.dtype == torch.float32 for x in (query, key, value))


def by_parts(
    query: Tensor, key: Tensor, value: Tensor, c: tuple[Tensor, Tensor], scale: float | None, sink: int
) -> Tensor | None:
    """Attention of the last T of S positions: query (B, H, T, D), key, value (B, Hkv, S, D) -> (B, T, H, D).

    c, two floats of (B, H, S) in base 2, is the running sum of log f. None where gates close too fast for the shortest
    block (or are shut, in a short prompt), where the first of several calls ended among the sinks, and in later calls
    while all gates are open.
    """
    length, past = query.shape[2], key.shape[2] - query.shape[2]
    fallen = -c[0][..., -1].amin().item()  # the most of any head
    if fallen <= NO_DECAY:  # open gates: bit for bit what the base model has
        if past:
            return None
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
        return out.transpose(1, 2).contiguous()
    alone = 0 if past else sink  # queries that see nothing but sinks
    if length <= alone or 0 < past < sink:
        return None
    short = not past and length <= WRITTEN_OUT and fallen < SHUT  # not so for NaN
    if short and fallen * LN_2 <= MOST_DECAY:
        return _short(query, key, value, c[0], scale, sink)
    size = None if short else _block(c[0][..., past + alone :])
    if size is None and not short:
        return None
    group = query.shape[1] // key.shape[1]
    rows = []
    for row in range(query.shape[0]):
        q, high, low = (x[row].unflatten(0, (-1, group)) for x in (query, *c))
        k, v = (x[row, :, None].expand(-1, group, -1, -1) for x in (key, value))
        if size is None:
            rows.append(_short_row(q, k, v, high, low, scale, sink))
        else:
            rows.append(_one_row(q, k, v, high, low, size, scale, sink))
    out = torch.stack(rows) if len(rows) > 1 else rows[0][None]
    return out.flatten(1, 2).transpose(1, 2).contiguous()


def _short(query: Tensor, key: Tensor, value: Tensor, c: Tensor, scale: float | None, sink: int) -> Tensor:
    """Shapes as in `by_parts`; c (B, H, T) in base 2, of which float32 holds enough."""
    future, decays, sinks = _places(query.shape[2], sink)
    bias = torch.addcmul(future, c[..., None, :], decays, value=-LN_2)
    bias.addcmul_(c[..., None], sinks, value=-LN_2)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).contiguous()


@functools.lru_cache(maxsize=8)
@torch.inference_mode(False)
def _places(length: int, sink: int) -> tuple[Tensor, Tensor, Tensor]:
    """-inf (T, T) where the key lies ahead, else 0; and (T,) 1 for keys that decay, 1 for sinks, else 0."""
    sinks = (torch.arange(length, device="cpu") < sink).float()
    future = torch.full((length, length), float("-inf"), dtype=torch.float32, device="cpu").triu_(1)
    return future, 1 - sinks, sinks


def _short_row(q: Tensor, k: Tensor, v: Tensor, high: Tensor, low: Tensor, scale: float | None, sink: int) -> Tensor:
    """q, k, v (Hkv, G, T, D), c (Hkv, G, T) -> (Hkv, G, T, D)."""
    decay = high[..., None] - high[..., None, :]
    decay.add_(low[..., None]).sub_(low[..., None, :]).mul_(LN_2)
    if sink:
        decay[..., :sink] = 0.0
    return FLASH(q, k, v, 0.0, True, attn_mask=decay, scale=scale)[0]


def _one_row(
    q: Tensor, k: Tensor, v: Tensor, high: Tensor, low: Tensor, size: int, scale: float | None, sink: int
) -> Tensor:
    """q (Hkv, G, T, D), k, v (Hkv, G, S, D), c (Hkv, G, S) -> (Hkv, G, T, D), by blocks of `size` queries."""
    length, past = q.shape[2], k.shape[2] - q.shape[2]
    out, sinks_lse = torch.empty_like(q), None
    if sink:
        out, sinks_lse = FLASH(q, k[:, :, :sink], v[:, :, :sink], 0.0, not past, scale=scale)
    for start in range(0 if past else sink, length, size):
        end = min(start + size, length)
        mine, own, before = slice(start, end), slice(past + start, past + end), slice(sink, past + start)
        ref = slice(own.start, own.start + 1)
        decay = ((high[..., ref] - high[..., : own.stop]) + (low[..., ref] - low[..., : own.stop])).mul_(LN_2)
        bias = decay[:, :, None]  # c_ref - c_j, for every query
        block = q[:, :, mine]
        o, lse = FLASH(block, k[:, :, own], v[:, :, own], 0.0, True, attn_mask=bias[..., own], scale=scale)
        if before.start < before.stop:
            earlier, earlier_lse = FLASH(
                block, k[:, :, before], v[:, :, before], 0.0, False, attn_mask=bias[..., before], scale=scale
            )
            o, lse = _mixed(o, lse, earlier, earlier_lse, earlier), torch.logaddexp(lse, earlier_lse)
        target = out[:, :, mine]
        if sinks_lse is None:
            target.copy_(o)
        else:  # these scores don't fall with c: less c_ref - c_i, the others are of the same measure
            _mixed(o, lse - decay[..., own], target, sinks_lse[:, :, mine], target)
    return out


def _mixed(first: Tensor, first_lse: Tensor, second: Tensor, second_lse: Tensor, out: Tensor) -> Tensor:
    """The outputs (.., T, D) of two parts as one, each with the share of the sums of exponentials that it has."""
    share = (first_lse - second_lse).sigmoid_()
    return torch.lerp(second, first, share[..., None], out=out)


def _block(c: Tensor) -> int | None:
    """Queries a block may have, so that c (B, H, T) falls by at most MOST_DECAY in it; None if that are too few."""
    last = c[..., -1:]
    for size in BLOCKS:
        ends = torch.cat([c[..., size - 1 : -1 : size], last], -1) if size < c.shape[-1] else last
        if (c[..., ::size] - ends).amax().item() * LN_2 <= MOST_DECAY:  # not so for NaN
            return size
    return None
