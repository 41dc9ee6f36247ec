"""dk, dv and the column sums of ds: one program per block of keys and kv head, looping over its group's query heads.

Scores are formed transposed, S^T = K Q^T, so that no dot takes a transposed dot result: Triton 3.4 to 3.7.0 can
miscompile that on Hopper. Formulas: `backward`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..common.blocks import (
    Columns,
    decayed,
    ends_of_sinks,
    expanded,
    load_rows,
    lowest,
    partial_sums,
    place,
    scaled,
    visible,
)
from ..common.first_weights import BLOCK as LOST_ROWS
from ..common.groups import Bounds, Facts, Gates

BLOCK = tl.constexpr(LOST_ROWS)  # keys of a sequence whose dv starts from `lost`


class KeyBlock(NamedTuple):
    """A program's keys: positions, k and v in the head dim's two blocks of columns."""

    pos: Any
    k0: Any
    k1: Any
    v0: Any
    v1: Any


@triton.jit
def query_range(bounds, n0, last_key, sinky, T, S, q_offset, window, BM: tl.constexpr):
    """Query tiles of a key block: [low, mid_low) masked, [mid_low, mid_high) interior, [mid_high, high) masked."""
    low, full_low = tl.maximum(n0 - q_offset, 0), tl.maximum(last_key + 1 - q_offset, 0)
    high, full_high = T, T
    if bounds.start is not None:
        end, first_end = tl.load(bounds.end + last_key), tl.load(bounds.end + n0)
        high = tl.minimum(high, tl.where(end < S, end - q_offset, T))
        full_high = tl.minimum(full_high, tl.where(first_end < S, first_end - q_offset, T))
        full_high = tl.where(tl.load(bounds.start + n0) > n0, 0, full_high)
        high = tl.where(tl.load(bounds.start + last_key) > last_key, 0, high)
    if window is not None:
        high = tl.where(sinky, high, tl.minimum(high, last_key + window - q_offset))
        full_high = tl.minimum(full_high, n0 + window - q_offset)
    if bounds.unseen_from is not None:
        high = tl.where(sinky, high, tl.minimum(high, tl.load(bounds.unseen_from + last_key)))
        full_high = tl.minimum(full_high, tl.load(bounds.unseen_from + n0))
    full_high = tl.where(sinky, 0, full_high)
    low = low // BM
    high = tl.maximum(tl.cdiv(tl.maximum(high, 0), BM), low)
    mid_low = tl.minimum(tl.maximum(tl.cdiv(full_low, BM), low), high)
    mid_high = tl.minimum(tl.maximum(tl.maximum(full_high, 0) // BM, mid_low), high)
    return low, mid_low, mid_high, high


@triton.jit
def _dkdv_block(
    b, h, m0, keys, q, do, strides, facts, bounds, offs_m, columns, bias, key_bias, T, S, TP, q_offset, window, sink,
    scale, sums, MASKED: tl.constexpr, PROBLEM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One query tile, transposed. bias: c_ref (interior, scalars, with key_bias = c_ref - c_j) or c_j (masked)."""
    BM: tl.constexpr = TILE.block_m
    TMA: tl.constexpr = TILE.tma > 0
    j, k0, k1, v0, v1 = keys
    dk0, dv0, dk1, dv1, column_sum = sums
    t = m0 + offs_m
    pos = tl.minimum(q_offset + t, S - 1)
    row = facts.rows + t
    if MASKED:
        e_hi = tl.load(row, mask=t < T, other=0.0)
        e_lo = tl.load(row + TP, mask=t < T, other=0.0)
        delta = tl.load(row + 2 * TP, mask=t < T, other=0.0)
    else:
        record = facts.records + m0 // BM * (2 * BM + 16)
        relative = tl.load(record + offs_m)
        delta = tl.load(record + BM + offs_m)
        lift = (tl.load(record + 2 * BM) - bias.hi) + (tl.load(record + 2 * BM + 1) - bias.lo)
    q0 = load_rows(q, b, h, m0, strides.q.token, offs_m, columns.first, T, MASKED, TMA)
    do0 = load_rows(do, b, h, m0, strides.do.token, offs_m, columns.first, T, MASKED, TMA)
    s = tl.dot(k0, tl.trans(q0), input_precision=PROBLEM.precision)
    dp = tl.dot(v0, tl.trans(do0), input_precision=PROBLEM.precision)
    if PROBLEM.d1 > 0:
        q1 = load_rows(q, b, h, m0, strides.q.token, offs_m, columns.second, T, MASKED, TMA)
        do1 = load_rows(do, b, h, m0, strides.do.token, offs_m, columns.second, T, MASKED, TMA)
        s = tl.dot(k1, tl.trans(q1), s, input_precision=PROBLEM.precision)
        dp = tl.dot(v1, tl.trans(do1), dp, input_precision=PROBLEM.precision)
    s, tanh = scaled(s, scale, PROBLEM.exact_tanh)
    if MASKED:
        start, is_sink, sink_bias = None, None, 0.0
        if bounds.start is not None:
            start = tl.load(bounds.start + pos)
        if sink is not None:
            is_sink = j[:, None] < ends_of_sinks(pos, start, sink)[None, :]
            sink_bias = (0.0 - tl.load(row + 3 * TP, mask=t < T, other=0.0))[None, :]
        s = decayed(
            s, e_hi[None, :], e_lo[None, :], bias.hi[:, None], bias.lo[:, None], is_sink, sink_bias
        )  # fmt: skip
        i = (q_offset + t)[None, :]
        lower = expanded(lowest(bounds.first_seen, t, T, S, q_offset, window), 0)
        seen = visible(i, j[:, None], expanded(start, 0), lower, is_sink, S)
        p = tl.exp2(tl.where(seen & (t < T)[None, :], s, float("-inf")))
    else:
        p = tl.exp2(s + relative[None, :] + (key_bias + lift)[:, None])
    p_rounded = p.to(do0.dtype)
    dv0 = tl.dot(p_rounded, do0, dv0, input_precision=PROBLEM.precision)
    if PROBLEM.d1 > 0:
        dv1 = tl.dot(p_rounded, do1, dv1, input_precision=PROBLEM.precision)
    ds = p * (dp - delta[None, :])
    if MASKED:
        counted = tl.where(j[:, None] == (q_offset + t)[None, :], 0.0, ds)
    else:
        counted = ds
    column_sum += tl.sum(counted, 1) if len(column_sum.shape) == 1 else partial_sums(counted)
    if scale.softcap2 is not None:
        ds = ds * (1.0 - tanh * tanh)
    ds = ds.to(q0.dtype)
    dk0 = tl.dot(ds, q0, dk0, input_precision=PROBLEM.precision)
    if PROBLEM.d1 > 0:
        dk1 = tl.dot(ds, q1, dk1, input_precision=PROBLEM.precision)
    return dk0, dv0, dk1, dv1, column_sum


@triton.jit(do_not_specialize=["T", "S", "together", "q_offset", "window", "sink"])
def dkdv_kernel(
    q, k, v, v_block, do, facts, c, bounds, lost, dk, dv, dc, strides, T, S, TP, H, together, q_offset, window, sink,
    scale, PROBLEM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    BM: tl.constexpr = TILE.block_m
    BN: tl.constexpr = TILE.block_n
    TMA: tl.constexpr = TILE.tma
    D0: tl.constexpr = PROBLEM.d0
    D1: tl.constexpr = PROBLEM.d1
    # The first key blocks have the most queries: they go first.
    blocks = tl.cdiv(S, BN)
    block, kv = place(blocks, tl.num_programs(0) // blocks, together)
    n0 = block * BN
    heads = H // PROBLEM.group
    b, h_kv = kv // heads, kv % heads
    start, end = bounds.start, bounds.end
    if start is not None:
        start += b * S
        end += b * S

    offs_m, offs_n = tl.arange(0, BM), tl.arange(0, BN)
    columns = Columns(tl.arange(0, D0), D0 + tl.arange(0, D1 if D1 > 0 else D0))
    j = n0 + offs_n
    last_key = tl.minimum(n0 + BN, S) - 1
    sinky = False
    if sink is not None:
        is_sink = j < sink
        if start is not None:
            is_sink = j < tl.load(start + j, mask=j < S, other=0) + sink
        sinky = tl.max(is_sink.to(tl.int32), 0) > 0

    if TMA < 3:
        k += b * strides.k.batch + h_kv * strides.k.head
        v += b * strides.v.batch + h_kv * strides.v.head
    row_b, row_kv = b.to(tl.int32), h_kv.to(tl.int32)
    k0 = load_rows(k, row_b, row_kv, n0, strides.k.token, offs_n, columns.first, S, True, TMA > 2)
    v0 = load_rows(v, row_b, row_kv, n0, strides.v.token, offs_n, columns.first, S, True, TMA > 2)
    k1, v1 = k0, v0
    dk0 = tl.zeros([BN, D0], tl.float32)
    dv0 = tl.zeros([BN, D0], tl.float32)
    dk1, dv1 = dk0, dv0
    if D1 > 0:
        k1 = load_rows(k, row_b, row_kv, n0, strides.k.token, offs_n, columns.second, S, True, False)
        v1 = load_rows(v, row_b, row_kv, n0, strides.v.token, offs_n, columns.second, S, True, False)
        dk1 = tl.zeros([BN, D1], tl.float32)
        dv1 = tl.zeros([BN, D1], tl.float32)
    keys = KeyBlock(j, k0, k1, v0, v1)
    if lost is not None:
        lost += (kv * BLOCK + j[:, None]) * (D0 + D1)
        dv0 = tl.load(lost + columns.first[None, :], mask=(j < BLOCK)[:, None], other=0.0)
        if D1 > 0:
            dv1 = tl.load(lost + columns.second[None, :], mask=(j < BLOCK)[:, None], other=0.0)

    for g in tl.range(PROBLEM.group, disable_licm=not TILE.hoist):
        h = h_kv * PROBLEM.group + g
        bh = b * H + h
        q_head, do_head = q, do
        if TMA == 0:
            q_head += b * strides.q.batch + h * strides.q.head
            do_head += b * strides.do.batch + h * strides.do.head
        of_rows = facts.rows + bh * 4 * TP
        records = facts.records + bh * tl.cdiv(T, BM) * (2 * BM + 16)
        of_head = Facts(of_rows, records, facts.row_sums)
        c_head = Gates(c.hi + bh * S, c.lo + bh * S)
        first_seen, unseen_from = bounds.first_seen, bounds.unseen_from
        if first_seen is not None:
            first_seen += bh * T
            unseen_from += bh * S
        hidden = Bounds(start, end, first_seen, unseen_from)
        low, mid_low, mid_high, high = query_range(hidden, n0, last_key, sinky, T, S, q_offset, window, BM)
        c_j = Gates(tl.load(c_head.hi + j, mask=j < S, other=0.0), tl.load(c_head.lo + j, mask=j < S, other=0.0))
        ref = Gates(tl.load(c_head.hi + last_key), tl.load(c_head.lo + last_key))
        key_bias = (ref.hi - c_j.hi) + (ref.lo - c_j.lo)
        # Eight sums a key take no shuffles in the loop; beside k in registers (TMA 3) ptxas then serialises products.
        sums = dk0, dv0, dk1, dv1, tl.zeros([BN, 8] if TMA == 2 else [BN], tl.float32)
        for it in range(mid_low - low + high - mid_high):
            m0 = tl.where(it < mid_low - low, low + it, mid_high + it - (mid_low - low)) * BM
            sums = _dkdv_block(
                row_b, h.to(tl.int32), m0, keys, q_head, do_head, strides, of_head, hidden, offs_m, columns, c_j,
                key_bias, T, S, TP, q_offset, window, sink, scale, sums, True, PROBLEM, TILE)  # fmt: skip
        inner = keys
        if TMA == 2:  # in registers beside the interior tiles only, which have room for it
            copied = load_rows(v_block, row_b, row_kv, n0, strides.v.token, offs_n, columns.first, S, True, True)
            inner = KeyBlock(j, k0, k1, copied, v1)
        for it in range(mid_high - mid_low):
            m0 = (mid_low + it) * BM
            sums = _dkdv_block(
                row_b, h.to(tl.int32), m0, inner, q_head, do_head, strides, of_head, hidden, offs_m, columns, ref,
                key_bias, T, S, TP, q_offset, window, sink, scale, sums, False, PROBLEM, TILE)  # fmt: skip
        dk0, dv0, dk1, dv1, column_sum = sums
        if TMA == 2:
            column_sum = tl.sum(column_sum, 1)
        if sink is not None:
            column_sum = tl.where(is_sink, 0.0, column_sum)
        t = j - q_offset
        own = tl.load(facts.row_sums + bh * T + t, mask=(t >= 0) & (t < T), other=0.0)
        tl.store(dc + bh * S + j, own - column_sum, mask=j < S)

    rows = ((b * S + n0) * heads + h_kv) * (D0 + D1) + offs_n[:, None] * (heads * (D0 + D1))
    mask = (j < S)[:, None]
    out = dk.dtype.element_ty
    tl.store(dk + rows + columns.first[None, :], (dk0 * scale.natural).to(out), mask=mask)
    tl.store(dv + rows + columns.first[None, :], dv0.to(out), mask=mask)
    if D1 > 0:
        tl.store(dk + rows + columns.second[None, :], (dk1 * scale.natural).to(out), mask=mask)
        tl.store(dv + rows + columns.second[None, :], dv1.to(out), mask=mask)
