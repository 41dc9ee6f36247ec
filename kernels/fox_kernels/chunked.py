"""Forgetting Attention in plain PyTorch, a chunk of queries at a time.

Memory grows with T, not with T * S: the backward recomputes the probabilities of one chunk from the stored log-sum-exp.

How the decay costs nothing: the queries of a kv head's group are stacked; queries and keys get a few extra channels,

    query (head g of the group)   [scale * q_i | one-hot(g) | c_i - c_ref | -lse_i]
    key                           [k_j         | c_ref - c_j for every g | 1 | 1]

so one matrix product yields scale*q.k + (c_i - c_j) [- lse_i], and the products of the backward yield the row sums and
the column sums of ds (all that dlog_f needs) in the same channels. c is summed in float64, c_ref is the chunk's first
value, so both parts are <= 0 and nothing cancels; in the chunk's diagonal square the difference is formed directly.
Sink keys have zeros in the decay channels.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .arguments import has_values
from .options import LOG_F_MIN, Backend, Documents, Options, Saved

SCORES_PER_CHUNK = 1 << 20  # floats alive per score matrix: 4 MB, so that the passes over it stay in the cache


def packed_edges(cu_seqlens: Tensor, S: int) -> tuple[Tensor, Tensor]:
    """Return (S,) int64, twice: where each position's document begins and ends."""
    bounds = torch.nn.functional.pad(cu_seqlens.to(torch.int64), (0, 1), value=S)
    document = torch.searchsorted(bounds[1:-1].contiguous(), torch.arange(S, device=bounds.device), right=True)
    return bounds[document], bounds[document + 1]


def document_starts(B: int, S: int, cu_seqlens: Tensor | None, seq_start: Tensor | None, device) -> Tensor:
    """Return (B, S) int64: the first position that a query at each position may see."""
    start = torch.zeros(B, S, dtype=torch.int64, device=device)
    if cu_seqlens is not None:
        start = packed_edges(cu_seqlens, S)[0].expand(B, S)
    if seq_start is not None:
        start = torch.maximum(start, seq_start.to(torch.int64)[:, None])
    return start


def cumulative(log_f: Tensor) -> Tensor:
    """Return c (B, H, S) float64, the running sum of log f (B, S, H) clamped to LOG_F_MIN."""
    return log_f.to(torch.float64).clamp_min(LOG_F_MIN).cumsum(1).transpose(1, 2)


class _Problem(NamedTuple):
    """Shared by all chunks; C = D + G + 2 channels, the group's G query heads are stacked into rows."""

    q: Tensor  # (B, Hkv, G, T, D), input dtype
    keys: Tensor  # (B * Hkv, S, C): the key side; its decay channels are rewritten for each chunk
    values: Tensor  # (B * Hkv, S, DV + 1), last channel 1
    c: Tensor  # (B, H, S) float64
    decays: Tensor  # (B, S) bool, false for sink keys
    start: Tensor  # (B, T) document start of each query
    first: Tensor  # (B, 1 or H, T) first visible key of each query, sinks aside
    chunks: list  # (t0, t1, [(j0, j1), ...], masked)
    scale: float
    softcap: float | None
    sink: int


def _prepare(q, k, v, log_f, options: Options, documents: Documents) -> _Problem:
    (scale, window, sink, softcap, horizon), (cu_seqlens, seq_start, *_) = options, documents
    (B, T, H, D), (S, Hkv) = q.shape, k.shape[1:3]
    G = H // Hkv
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    c = cumulative(log_f)
    starts = document_starts(B, S, cu_seqlens, seq_start, q.device)
    decays = torch.arange(S, device=q.device) - starts >= sink
    start = starts[:, S - T :]
    first = start[:, None]
    if window is not None:
        first = torch.maximum(first, torch.arange(S - T, S, device=q.device) - (window - 1))
    if horizon is not None:  # c falls, so the keys that are hidden are the first ones
        rising = (-c).masked_fill(c.isnan(), math.inf).contiguous()
        limit = c[:, :, S - T :] + horizon
        hidden = torch.searchsorted(rising, (-limit).contiguous(), right=True)
        first = torch.maximum(first, hidden.masked_fill(limit.isnan(), 0))  # NaN hides nothing, to be seen itself
    restricted = any(x is not None for x in (cu_seqlens, seq_start, window, horizon))
    keys = torch.ones(B, Hkv, S, D + G + 2, dtype=dtype, device=q.device)
    keys[..., :D] = k.transpose(1, 2)
    values = torch.ones(B, Hkv, S, v.shape[-1] + 1, dtype=dtype, device=q.device)
    values[..., :-1] = v.transpose(1, 2)
    chunks = _chunks(B * H, T, S, start, first, sink, restricted)
    q = q.unflatten(2, (Hkv, G)).permute(0, 2, 3, 1, 4)
    return _Problem(q, keys.flatten(0, 1), values.flatten(0, 1), c, decays, start, first, chunks, scale, softcap, sink)


def _chunks(BH: int, T: int, S: int, start: Tensor, first: Tensor, sink: int, restricted: bool) -> list:
    """Return (t0, t1, key ranges, masked) per chunk of queries; masked if some query may not see all of the ranges."""
    size = max(32, min(256, SCORES_PER_CHUNK // max(1, BH * S)))
    spans = [(t0, min(t0 + size, T)) for t0 in range(0, T, size)]
    if not restricted:
        return [(t0, t1, [(0, S - T + t1)], False) for t0, t1 in spans]
    if not has_values(start):
        return [(t0, t1, [(0, S - T + t1)], True) for t0, t1 in spans]
    limits = [  # one transfer for all chunks
        torch.stack([first[:, :, a:b].amin(), first[:, :, a:b].amax(), start[:, a:b].amin(), start[:, a:b].amax()])
        for a, b in spans
    ]
    chunks = []
    for (t0, t1), (first_min, first_max, start_min, start_max) in zip(spans, torch.stack(limits).tolist(), strict=True):
        end = S - T + t1
        j0 = min(first_min, S - T + t0)
        ranges = [(j0, end)]
        if sink and start_min < j0:
            sinks_end = min(start_max + sink, end)
            ranges = [(start_min, end)] if sinks_end >= j0 else [(start_min, sinks_end), (j0, end)]
        chunks.append((t0, t1, ranges, first_max > ranges[0][0]))
    return chunks


def _select(x: Tensor, ranges: list) -> Tensor:
    """Return the rows of x (.., S, C) in the given ranges: a view for one range, a copy for two."""
    parts = [x[..., a:b, :] for a, b in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)


def _scores(p: _Problem, chunk, lse: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return scores (B * Hkv, G * M, N) in natural units less lse, both sides' channels, and tanh when softcapped."""
    t0, t1, ranges, masked = chunk
    B, Hkv, G, T, D = p.q.shape
    S, dtype, M = p.keys.shape[1], p.keys.dtype, t1 - t0
    i0, i1 = S - T + t0, S - T + t1
    c_ref = p.c[:, :, i0 : i0 + 1]

    rows = torch.zeros(B, Hkv, G, M, D + G + 2, dtype=dtype, device=p.q.device)
    rows[..., :D] = p.q[..., t0:t1, :]
    rows[..., :D] *= p.scale
    rows[..., D : D + G] = torch.eye(G, dtype=dtype, device=rows.device)[:, None]
    rows[..., D + G] = (p.c[:, :, i0:i1] - c_ref).view(B, Hkv, G, M)
    if lse is not None:
        rows[..., D + G + 1] = -lse.view(B, Hkv, G, M)
    rows = rows.flatten(2, 3).flatten(0, 1)
    keys = p.keys.view(B, Hkv, S, D + G + 2)
    for a, b in ranges:
        before = slice(a, min(b, i0))
        decay = (c_ref - p.c[:, :, before]) * p.decays[:, None, before]
        keys[:, :, before, D : D + G] = decay.view(B, Hkv, G, -1).transpose(2, 3).to(dtype)
        keys[:, :, before, D + G] = p.decays[:, None, before].to(dtype)
    keys[:, :, i0:i1, D : D + G + 1] = 0
    columns = _select(p.keys, ranges)
    capped = None
    if p.softcap is None:
        scores = torch.bmm(rows, columns.transpose(1, 2))
    else:
        capped = torch.bmm(rows[..., :D], columns[..., :D].transpose(1, 2)).div_(p.softcap).tanh_()
        scores = torch.baddbmm(capped, rows[..., D:], columns[..., D:].transpose(1, 2), beta=p.softcap)

    square = (p.c[:, :, i0:i1, None] - p.c[:, :, None, i0:i1]) * p.decays[:, None, None, i0:i1]
    future = torch.ones(M, M, dtype=torch.bool, device=rows.device).triu_(1)
    scores.view(B, Hkv * G, M, -1)[..., -M:] += square.to(dtype).masked_fill_(future, -math.inf)
    if masked:
        index = _select(torch.arange(S, device=rows.device)[:, None], ranges)[:, 0]
        hidden = index < p.first[:, :, t0:t1, None]
        if p.sink:
            sinks = ~_select(p.decays[:, :, None], ranges)[:, None, None, :, 0]
            hidden &= ~(sinks & (index >= p.start[:, None, t0:t1, None]))
        scores.view(B, Hkv * G, M, -1).masked_fill_(hidden, -math.inf)
    return scores, rows, columns, capped


def unwritten(q: Tensor, k: Tensor, v: Tensor, way: Backend) -> Saved:
    """Return what `attend` saves, unwritten, in the computing dtype: o (B, T, H, DV) and lse (B, H, T), natural log."""
    (B, T, H, _), dtype = q.shape, torch.float64 if q.dtype == torch.float64 else torch.float32
    o, lse = q.new_empty(B, T, H, v.shape[3], dtype=dtype), q.new_empty(B, H, T, dtype=dtype)
    return Saved(o, lse, q.new_empty(0), q.new_empty(0))


def _by_head(x: Tensor, Hkv: int) -> Tensor:
    """Return x (B, T, H, D) as (B, Hkv, G, T, D)."""
    return x.unflatten(2, (Hkv, -1)).permute(0, 2, 3, 1, 4)


def attend(q, k, v, log_f, options: Options, documents: Documents, way: Backend) -> tuple[Saved, Documents]:
    """Return what the backward needs, and the documents; options are checked."""
    saved = unwritten(q, k, v, way)
    if q.numel() == 0:
        return saved, documents
    with torch.autocast(q.device.type, enabled=False):  # it would take products from float32
        p = _prepare(q, k, v, log_f, options, documents)
        o, lse = _by_head(saved.o, k.shape[2]), saved.lse2.view(p.q.shape[:4])
        for chunk in p.chunks:
            t0, t1, ranges, masked = chunk
            scores, *_ = _scores(p, chunk, None)
            top = scores.amax(-1, keepdim=True)
            if masked:
                top.masked_fill_(top == -math.inf, 0)
            weights = scores.sub_(top).exp_()
            sums = torch.bmm(weights, _select(p.values, ranges)).view(*p.q.shape[:3], t1 - t0, -1)
            total = sums[..., -1]
            lse[..., t0:t1] = top.view_as(total) + total.log()
            o[..., t0:t1, :] = sums[..., :-1] / (total.clamp_min(1e-30) if masked else total)[..., None]
    return saved, documents


def _backward(p: _Problem, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None):
    """Return dq (B, Hkv, G, T, D), dk (B, Hkv, S, D), dv (B, Hkv, S, DV) and dc (B, H, S) float64.

    ds_ij = p_ij (do_i.v_j - delta_i + dlse_i),  delta_i = do_i.o_i,  dc_t = sum_j ds_tj - sum_i ds_it (sinks left out)
    """
    B, Hkv, G, T, D = p.q.shape
    S, H = p.keys.shape[1], Hkv * G
    dq, d_keys, d_values = o.new_empty(p.q.shape), torch.zeros_like(p.keys), torch.zeros_like(p.values)
    dc = torch.zeros(B, H, S, dtype=torch.float64, device=o.device)
    offset = (do * o).sum(-1)
    if dlse is not None:
        offset = offset - dlse.masked_fill(lse == -math.inf, 0).view_as(offset)
    lse = lse.masked_fill(lse == -math.inf, 0)  # such rows have scores of -inf only
    for chunk in p.chunks:
        t0, t1, ranges, _ = chunk
        scores, rows, columns, capped = _scores(p, chunk, lse[:, :, t0:t1])
        weights = scores.exp_()
        grad = torch.cat((do[..., t0:t1, :], -offset[..., t0:t1, None]), dim=-1).flatten(2, 3).flatten(0, 1)
        _add_rows(d_values, ranges, weights, grad)
        ds = torch.bmm(grad, _select(p.values, ranges).transpose(1, 2)).mul_(weights)
        i0, i1 = S - T + t0, S - T + t1
        columns[:, i0 - i1 :, D + G] = p.decays[:, i0:i1].repeat_interleave(Hkv, 0).to(columns.dtype)
        if capped is None:
            d_rows = torch.bmm(ds, columns)
            _add_rows(d_keys, ranges, ds, rows)
            row_sums = d_rows[..., D + G]
        else:
            row_sums = torch.bmm(ds, columns[..., D + G, None])[..., 0]
            _add_rows(d_keys[..., D:], ranges, ds, rows[..., D:])
            ds.mul_(capped.square_().neg_().add_(1))
            d_rows = torch.bmm(ds, columns[..., :D])
            _add_rows(d_keys[..., :D], ranges, ds, rows[..., :D])
        dq[..., t0:t1, :] = d_rows[..., :D].view(B, Hkv, G, t1 - t0, D)
        dc[:, :, i0:i1] = row_sums.view(B, H, t1 - t0)
    column_sums = d_keys[..., D : D + G].view(B, Hkv, S, G).transpose(2, 3).reshape(B, H, S)
    dc -= column_sums * p.decays[:, None]
    d_keys, d_values = d_keys.view(B, Hkv, S, -1), d_values.view(B, Hkv, S, -1)
    return dq.mul_(p.scale), d_keys[..., :D], d_values[..., :-1], dc


def _add_rows(total: Tensor, ranges: list, left: Tensor, right: Tensor) -> None:
    """Add left^T @ right to the rows of total in the given ranges."""
    n = 0
    for a, b in ranges:
        total[:, a:b].baddbmm_(left[..., n : n + b - a].transpose(1, 2), right)
        n += b - a


def differentiate(
    do, dlse, q, k, v, log_f, saved: Saved, options: Options, documents: Documents, way: Backend
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dq, dk, dv, dlog_f in the inputs' shapes and dtypes, given what `attend` returned."""
    if q.numel() == 0:
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape), log_f.new_zeros(log_f.shape)
    with torch.autocast(q.device.type, enabled=False):
        p = _prepare(q, k, v, log_f, options, documents)
        o, do = (_by_head(x, k.shape[2]) for x in (saved.o, do))
        dq, dk, dv, dc = _backward(p, o, saved.lse2, do, dlse)
    d_log_f = suffix_sum(dc, documents.cu_seqlens).transpose(1, 2).masked_fill(log_f < LOG_F_MIN, 0)
    dq, dk, dv = (x.transpose(1, 2).to(q.dtype).contiguous() for x in (dq.flatten(1, 2), dk, dv))
    return dq, dk, dv, d_log_f.to(log_f.dtype).contiguous()


def suffix_sum(dc: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return sum of dc (B, H, S) from each position to the end of its document, which is dL/dlog_f."""
    total = dc.flip(-1).cumsum(-1).flip(-1)
    if cu_seqlens is None:
        return total
    _, ends = packed_edges(cu_seqlens, dc.shape[-1])
    return total - torch.nn.functional.pad(total, (0, 1))[..., ends]
