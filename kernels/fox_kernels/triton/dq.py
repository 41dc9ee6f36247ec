"""dq and the row sums of ds: one program per tile of queries and head, walking the keys as the forward does.

It also writes delta, lse and gates of every query in the form that the kernel for dk and dv reads.
Formulas: `backward`.
"""

import triton
import triton.language as tl

from ..common.blocks import (
    LOG2E,
    Columns,
    Queries,
    c_at,
    ends_of_sinks,
    extremes,
    gates_of_keys,
    key_range,
    load_rows,
    lowest,
    masked_block,
    masked_blocks,
    partial_sums,
    place,
    scores,
    sinks_among,
    starts_of,
)
from ..common.groups import Gates


@triton.jit
def _dq_block(
    b, h, n0, q0, q1, do0, do1, k, v, strides, offs_n, columns, rows, lift, lse, delta, c, relative, S, scale, sums,
    MASKED: tl.constexpr, PROBLEM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One key block. lift: c_ref - c_last (interior), or 0 (masked: c_i counts). sums: dq, and ds by row."""
    BN: tl.constexpr = TILE.block_n
    TMA: tl.constexpr = TILE.tma > 0
    dq0, dq1, row_sums = sums
    keys = gates_of_keys(n0, offs_n, c, relative, 0, S, MASKED, False)
    k0 = load_rows(k, b, h, n0, strides.k.token, offs_n, columns.first, S, MASKED, TMA)
    v0 = load_rows(v, b, h, n0, strides.v.token, offs_n, columns.first, S, MASKED, TMA)
    s = tl.dot(q0, tl.trans(k0), input_precision=PROBLEM.precision)
    # The sums of do.v start at -delta: moved there while the products before run, not subtracted when they have.
    dp = tl.zeros([q0.shape[0], BN], tl.float32) - delta[:, None]
    dp = tl.dot(do0, tl.trans(v0), dp, input_precision=PROBLEM.precision)
    if PROBLEM.d1 > 0:
        k1 = load_rows(k, b, h, n0, strides.k.token, offs_n, columns.second, S, MASKED, TMA)
        v1 = load_rows(v, b, h, n0, strides.v.token, offs_n, columns.second, S, MASKED, TMA)
        s = tl.dot(q1, tl.trans(k1), s, input_precision=PROBLEM.precision)
        dp = tl.dot(do1, tl.trans(v1), dp, input_precision=PROBLEM.precision)
    s, tanh = scores(s, keys, rows, S, scale, MASKED, PROBLEM)
    p = tl.exp2(s - (lse - lift)[:, None])
    ds = p * dp
    if MASKED:
        # The own key's ds would cancel in dc, but for rounding: with gates shut it is nearly all of the sum.
        still = keys.pos[None, :] == rows.pos[:, None]
        if rows.sinks_end is not None:
            still = still | sinks_among(keys, rows)
        row_sums += partial_sums(tl.where(still, 0.0, ds))
    else:
        row_sums += partial_sums(ds)
    if scale.softcap2 is not None:
        ds = ds * (1.0 - tanh * tanh)
    ds = ds.to(k0.dtype)
    dq0 = tl.dot(ds, k0, dq0, input_precision=PROBLEM.precision)
    if PROBLEM.d1 > 0:
        dq1 = tl.dot(ds, k1, dq1, input_precision=PROBLEM.precision)
    return dq0, dq1, row_sums


@triton.jit(do_not_specialize=["T", "S", "together", "q_offset", "window", "sink"])
def dq_kernel(
    q, k, v, forward, do, dlse, c, relative, bounds, dq, facts, strides, T, S, TP, SP, H, together, q_offset, window,
    sink, scale, PROBLEM: tl.constexpr, TILE: tl.constexpr, NEXT_BM: tl.constexpr,
):  # fmt: skip
    BM: tl.constexpr = TILE.block_m
    BN: tl.constexpr = TILE.block_n
    TMA: tl.constexpr = TILE.tma
    D0: tl.constexpr = PROBLEM.d0
    D1: tl.constexpr = PROBLEM.d1
    tiles = tl.cdiv(T, BM)
    tile, bh = place(tiles, tl.num_programs(0) // tiles, together)
    m0 = (tiles - 1 - tile) * BM
    b, h = bh // H, bh % H
    if TMA < 2:
        q += b * strides.q.batch + h * strides.q.head
    if TMA == 0:
        k += b * strides.k.batch + (h // PROBLEM.group) * strides.k.head
        v += b * strides.v.batch + (h // PROBLEM.group) * strides.v.head
    if TMA < 2:
        do += b * strides.do.batch + h * strides.do.head
    row_b, row_h = b.to(tl.int32), h.to(tl.int32)
    row_kv = row_h // PROBLEM.group
    o, residual = forward.o, forward.residual
    o += b * strides.o.batch + h * strides.o.head
    if residual is not None:
        residual += b * strides.o.batch + h * strides.o.head
    c = Gates(c.hi + bh * S, c.lo + bh * S)
    relative += bh * SP
    starts, first_seen = bounds.start, bounds.first_seen
    if starts is not None:
        starts += b * S
    if first_seen is not None:
        first_seen += bh * T

    offs_m, offs_n = tl.arange(0, BM), tl.arange(0, BN)
    columns = Columns(tl.arange(0, D0), D0 + tl.arange(0, D1 if D1 > 0 else D0))
    pos, mask = q_offset + m0 + offs_m, m0 + offs_m < T
    start = starts_of(starts, pos, mask, S)
    least, greatest = extremes(start, mask, S)
    lower = lowest(first_seen, m0 + offs_m, T, S, q_offset, window)
    last_pos = q_offset + tl.minimum(m0 + BM, T) - 1
    blocks = key_range(m0, last_pos, S, q_offset, least, greatest, lower, sink, BM, BN)

    do0 = load_rows(do, row_b, row_h, m0, strides.do.token, offs_m, columns.first, T, True, TMA > 1)
    o0 = load_rows(o, row_b, row_h, m0, strides.o.token, offs_m, columns.first, T, True, False)
    o0 = o0.to(tl.float32)
    if residual is not None:  # of o's rounding: where one key holds nearly all the weight, delta is nearly do.v
        o0 += load_rows(residual, row_b, row_h, m0, strides.o.token, offs_m, columns.first, T, True, False)
    delta = tl.sum(do0.to(tl.float32) * o0, 1)
    do1 = do0
    if D1 > 0:
        do1 = load_rows(do, row_b, row_h, m0, strides.do.token, offs_m, columns.second, T, True, TMA > 1)
        o1 = load_rows(o, row_b, row_h, m0, strides.o.token, offs_m, columns.second, T, True, False)
        o1 = o1.to(tl.float32)
        if residual is not None:
            o1 += load_rows(residual, row_b, row_h, m0, strides.o.token, offs_m, columns.second, T, True, False)
        delta += tl.sum(do1.to(tl.float32) * o1, 1)
    lse = tl.load(forward.lse + bh * T + m0 + offs_m, mask=mask, other=float("-inf"))
    empty = lse == float("-inf")
    if dlse is not None:
        delta -= tl.load(dlse + bh * T + m0 + offs_m, mask=lse > float("-inf"), other=0.0) * LOG2E

    q0 = load_rows(q, row_b, row_h, m0, strides.q.token, offs_m, columns.first, T, True, TMA > 1)
    q1 = q0
    dq0 = tl.zeros([BM, D0], tl.float32)
    dq1 = dq0
    if D1 > 0:
        q1 = load_rows(q, row_b, row_h, m0, strides.q.token, offs_m, columns.second, T, True, TMA > 1)
        dq1 = tl.zeros([BM, D1], tl.float32)
    row_sums = tl.zeros([BM, 8], tl.float32)
    rows = Queries(pos, start, lower, ends_of_sinks(pos, start, sink), c_at(c, pos, S))
    ref = c_at(c, q_offset + m0, S)
    lse = tl.where(empty, 0.0, lse)

    # For the next kernel. For masked tiles, facts [4, TP] per head: c_i - lse_i in two floats, delta, lse. For interior
    # ones, a record of each of its tiles: c_i - lse_i relative to c of the tile's first query, delta, that c in two
    # floats.
    difference = rows.c.hi - lse
    virtual = difference - rows.c.hi
    lost = (rows.c.hi - (difference - virtual)) - (lse + virtual)
    row = facts.rows + bh * 4 * TP + m0 + offs_m
    tl.store(row, tl.where(empty, float("-inf"), difference), mask=mask)
    tl.store(row + TP, lost + rows.c.lo, mask=mask)
    tl.store(row + 2 * TP, delta, mask=mask)
    tile, within = (m0 + offs_m) // NEXT_BM, (m0 + offs_m) % NEXT_BM
    first = c_at(c, q_offset + tile * NEXT_BM, S)
    from_first = (rows.c.hi - first.hi) + (rows.c.lo - first.lo) - lse
    record = facts.records + bh * tl.cdiv(T, NEXT_BM) * (2 * NEXT_BM + 16) + tile * (2 * NEXT_BM + 16)
    tl.store(record + within, tl.where(empty, float("-inf"), from_first), mask=mask)
    tl.store(record + within + NEXT_BM, delta, mask=mask)
    tl.store(record + 2 * NEXT_BM, first.hi, mask=mask & (within == 0))
    tl.store(record + 2 * NEXT_BM + 1, first.lo, mask=mask & (within == 0))
    lse = tl.where(empty, float("inf"), lse)
    tl.store(row + 3 * TP, lse, mask=mask)

    sums = dq0, dq1, row_sums
    for it in range(masked_blocks(blocks)):
        n0 = masked_block(it, blocks) * BN
        sums = _dq_block(
            row_b, row_kv, n0, q0, q1, do0, do1, k, v, strides, offs_n, columns, rows, 0.0, lse, delta, c, relative, S,
            scale, sums, True, PROBLEM, TILE)  # fmt: skip
    lse -= (rows.c.hi - ref.hi) + (rows.c.lo - ref.lo)
    for it in range(blocks.mid_high - blocks.mid_low):
        n0 = (blocks.mid_high - 1 - it) * BN
        last = c_at(c, n0 + BN - 1, S)
        lift = (ref.hi - last.hi) + (ref.lo - last.lo)
        sums = _dq_block(
            row_b, row_kv, n0, q0, q1, do0, do1, k, v, strides, offs_n, columns, rows, lift, lse, delta, c, relative, S,
            scale, sums, False, PROBLEM, TILE)  # fmt: skip

    dq0, dq1, row_sums = sums
    tl.store(facts.row_sums + bh * T + m0 + offs_m, tl.sum(row_sums, 1), mask=mask)
    dq_rows = dq + ((b * T + m0) * H + h) * (D0 + D1) + offs_m[:, None] * (H * (D0 + D1))
    tl.store(dq_rows + columns.first[None, :], (dq0 * scale.natural).to(dq.dtype.element_ty), mask=mask[:, None])
    if D1 > 0:
        tl.store(dq_rows + columns.second[None, :], (dq1 * scale.natural).to(dq.dtype.element_ty), mask=mask[:, None])
