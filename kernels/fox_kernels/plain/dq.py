"""dq and the row sums of ds: one program per tile of queries and head, walking the keys as the forward does.

It also writes delta, lse and gates of every query in the form that the kernel for dk and dv reads.
Formulas: `backward`.
"""

import triton
import triton.language as tl

from ..common.blocks import (
    LOG2E,
    block_scalars,
    gates_of_keys,
    key_range,
    load_rows,
    lowest,
    masked_block,
    partial_sums,
    place,
    query_facts,
    scores,
)


@triton.jit
def _dq_block(
    b, h, n0, q0, q1, do0, do1, k_ptr, v_ptr, stride_k, stride_v, offs_n, offs_d0, offs_d1, c_i_hi, c_i_lo, lift, lse,
    delta, c_hi_ptr, c_lo_ptr, c_rel_ptr, pos, start, lower, S, sink, scale2, softcap2,
    inverse_cap, row_sums, dq0, dq1,
    MASKED: tl.constexpr, STARTS: tl.constexpr, LOWER: tl.constexpr, SINK: tl.constexpr,
    CAP: tl.constexpr, D1: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """One key block. lift: c_ref - c_last (interior), or 0 (masked: c_i counts)."""
    j, c_first, c_second = gates_of_keys(n0, offs_n, c_hi_ptr, c_lo_ptr, c_rel_ptr, 0, S, MASKED, False)
    k0 = load_rows(k_ptr, b, h, n0, stride_k, offs_n, offs_d0, S, MASKED, TMA > 0)
    v0 = load_rows(v_ptr, b, h, n0, stride_v, offs_n, offs_d0, S, MASKED, TMA > 0)
    s = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
    # The sums of do.v start at -delta: moved there while the products before run, not subtracted when they have.
    dp = tl.zeros([q0.shape[0], BN], tl.float32) - delta[:, None]
    dp = tl.dot(do0, tl.trans(v0), dp, input_precision=PRECISION)
    if D1 > 0:
        k1 = load_rows(k_ptr, b, h, n0, stride_k, offs_n, offs_d1, S, MASKED, TMA > 0)
        v1 = load_rows(v_ptr, b, h, n0, stride_v, offs_n, offs_d1, S, MASKED, TMA > 0)
        s = tl.dot(q1, tl.trans(k1), s, input_precision=PRECISION)
        dp = tl.dot(do1, tl.trans(v1), dp, input_precision=PRECISION)
    s, tanh = scores(
        s, c_first, c_second, c_i_hi, c_i_lo, j, pos, start, lower, S, sink, scale2, softcap2,
        inverse_cap, MASKED, STARTS, LOWER, SINK, CAP)  # fmt: skip
    p = tl.exp2(s - (lse - lift)[:, None])
    ds = p * dp
    if MASKED:
        # The own key's ds would cancel in dc, but for rounding: with gates shut it is nearly all of the sum.
        still = j[None, :] == pos[:, None]
        if SINK:
            still = still | (j[None, :] < start[:, None] + sink)
        row_sums += partial_sums(tl.where(still, 0.0, ds))
    else:
        row_sums += partial_sums(ds)
    if CAP:
        ds = ds * (1.0 - tanh * tanh)
    ds = ds.to(k0.dtype)
    dq0 = tl.dot(ds, k0, dq0, input_precision=PRECISION)
    if D1 > 0:
        dq1 = tl.dot(ds, k1, dq1, input_precision=PRECISION)
    return row_sums, dq0, dq1


@triton.jit(do_not_specialize=["T", "S", "together", "q_offset", "window", "sink"])
def dq_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, residual_ptr, do_ptr, dlse_ptr, lse_ptr, c_hi_ptr, c_lo_ptr, c_rel_ptr, start_ptr,
    lower_ptr, dq_ptr, facts_ptr, record_ptr, row_sum_ptr,
    sq_b, sq_t, sq_h, sk_b, sk_t, sk_h, sv_b, sv_t, sv_h, so_b, so_t, so_h, sdo_b, sdo_t, sdo_h,
    T, S, TP, SP, H, together, q_offset, window, sink, scale, scale2, softcap2, inverse_cap,
    GROUP: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    STARTS: tl.constexpr, LOWER: tl.constexpr, SINK: tl.constexpr, CAP: tl.constexpr,
    DLSE: tl.constexpr, RESIDUAL: tl.constexpr, NEXT_BM: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(T, BM)
    tile, bh = place(tiles, tl.num_programs(0) // tiles, together)
    m0 = (tiles - 1 - tile) * BM
    b, h = bh // H, bh % H
    if TMA < 2:
        q_ptr += b * sq_b + h * sq_h
    if TMA == 0:
        k_ptr += b * sk_b + (h // GROUP) * sk_h
        v_ptr += b * sv_b + (h // GROUP) * sv_h
    if TMA < 2:
        do_ptr += b * sdo_b + h * sdo_h
    row_b, row_h = b.to(tl.int32), h.to(tl.int32)
    row_kv = row_h // GROUP
    o_ptr += b * so_b + h * so_h
    if RESIDUAL:
        residual_ptr += b * so_b + h * so_h
    c_hi_ptr += bh * S
    c_lo_ptr += bh * S
    c_rel_ptr += bh * SP
    if STARTS:
        start_ptr += b * S
    if LOWER == 2:
        lower_ptr += bh * T

    offs_m, offs_n = tl.arange(0, BM), tl.arange(0, BN)
    offs_d0 = tl.arange(0, D0)
    offs_d1 = D0 + tl.arange(0, D1 if D1 > 0 else D0)
    pos, start, least, greatest = query_facts(start_ptr, m0, offs_m, T, S, q_offset, STARTS)
    lower = lowest(lower_ptr, m0 + offs_m, T, S, q_offset, window, LOWER)
    last_pos = q_offset + tl.minimum(m0 + BM, T) - 1
    low, mid_low, mid_high, high, sink_low, sink_high = key_range(
        m0, last_pos, S, q_offset, least, greatest, lower, sink, BM, BN, LOWER)  # fmt: skip

    rows = m0 + offs_m < T
    do0 = load_rows(do_ptr, row_b, row_h, m0, sdo_t, offs_m, offs_d0, T, True, TMA > 1)
    o0 = load_rows(o_ptr, row_b, row_h, m0, so_t, offs_m, offs_d0, T, True, False)
    o0 = o0.to(tl.float32)
    if RESIDUAL:  # of o's rounding: where one key holds nearly all the weight, delta is nearly do.v
        o0 += load_rows(residual_ptr, row_b, row_h, m0, so_t, offs_m, offs_d0, T, True, False)
    delta = tl.sum(do0.to(tl.float32) * o0, 1)
    do1 = do0
    if D1 > 0:
        do1 = load_rows(do_ptr, row_b, row_h, m0, sdo_t, offs_m, offs_d1, T, True, TMA > 1)
        o1 = load_rows(o_ptr, row_b, row_h, m0, so_t, offs_m, offs_d1, T, True, False)
        o1 = o1.to(tl.float32)
        if RESIDUAL:
            o1 += load_rows(residual_ptr, row_b, row_h, m0, so_t, offs_m, offs_d1, T, True, False)
        delta += tl.sum(do1.to(tl.float32) * o1, 1)
    lse = tl.load(lse_ptr + bh * T + m0 + offs_m, mask=rows, other=float("-inf"))
    empty = lse == float("-inf")
    if DLSE:
        dlse = tl.load(dlse_ptr + bh * T + m0 + offs_m, mask=lse > float("-inf"), other=0.0)
        delta -= dlse * LOG2E

    q0 = load_rows(q_ptr, row_b, row_h, m0, sq_t, offs_m, offs_d0, T, True, TMA > 1)
    q1 = q0
    dq0 = tl.zeros([BM, D0], tl.float32)
    dq1 = dq0
    if D1 > 0:
        q1 = load_rows(q_ptr, row_b, row_h, m0, sq_t, offs_m, offs_d1, T, True, TMA > 1)
        dq1 = tl.zeros([BM, D1], tl.float32)
    row_sums = tl.zeros([BM, 8], tl.float32)
    c_i_hi = tl.load(c_hi_ptr + tl.minimum(pos, S - 1))
    c_i_lo = tl.load(c_lo_ptr + tl.minimum(pos, S - 1))
    ref_hi, ref_lo = block_scalars(c_hi_ptr, c_lo_ptr, q_offset + m0, S)
    lse = tl.where(empty, 0.0, lse)

    # For the next kernel. For masked tiles, facts [4, TP] per head: c_i - lse_i in two floats, delta, lse. For interior
    # ones, a record of each of its tiles: c_i - lse_i relative to c of the tile's first query, delta, that c in two
    # floats.
    difference = c_i_hi - lse
    virtual = difference - c_i_hi
    lost = (c_i_hi - (difference - virtual)) - (lse + virtual)
    facts = facts_ptr + bh * 4 * TP + m0 + offs_m
    tl.store(facts, tl.where(empty, float("-inf"), difference), mask=rows)
    tl.store(facts + TP, lost + c_i_lo, mask=rows)
    tl.store(facts + 2 * TP, delta, mask=rows)
    tile, within = (m0 + offs_m) // NEXT_BM, (m0 + offs_m) % NEXT_BM
    first_hi, first_lo = block_scalars(c_hi_ptr, c_lo_ptr, q_offset + tile * NEXT_BM, S)
    relative = (c_i_hi - first_hi) + (c_i_lo - first_lo) - lse
    record_ptr += bh * tl.cdiv(T, NEXT_BM) * (2 * NEXT_BM + 16)
    at = tile * (2 * NEXT_BM + 16)
    tl.store(record_ptr + at + within, tl.where(empty, float("-inf"), relative), mask=rows)
    tl.store(record_ptr + at + within + NEXT_BM, delta, mask=rows)
    tl.store(record_ptr + at + 2 * NEXT_BM, first_hi, mask=rows & (within == 0))
    tl.store(record_ptr + at + 2 * NEXT_BM + 1, first_lo, mask=rows & (within == 0))
    lse = tl.where(empty, float("inf"), lse)
    tl.store(facts + 3 * TP, lse, mask=rows)

    for it in range(high - mid_high + mid_low - low + sink_high - sink_low):
        n0 = masked_block(it, low, mid_low, mid_high, high, sink_low) * BN
        row_sums, dq0, dq1 = _dq_block(
            row_b, row_kv, n0, q0, q1, do0, do1, k_ptr, v_ptr, sk_t, sv_t, offs_n, offs_d0, offs_d1, c_i_hi, c_i_lo,
            0.0, lse, delta, c_hi_ptr, c_lo_ptr, c_rel_ptr, pos, start, lower, S, sink, scale2,
            softcap2, inverse_cap, row_sums, dq0, dq1,
            True, STARTS, LOWER, SINK, CAP, D1, BN, PRECISION, TMA)  # fmt: skip
    lse -= (c_i_hi - ref_hi) + (c_i_lo - ref_lo)
    for it in range(mid_high - mid_low):
        n0 = (mid_high - 1 - it) * BN
        last_hi, last_lo = block_scalars(c_hi_ptr, c_lo_ptr, n0 + BN - 1, S)
        lift = (ref_hi - last_hi) + (ref_lo - last_lo)
        row_sums, dq0, dq1 = _dq_block(
            row_b, row_kv, n0, q0, q1, do0, do1, k_ptr, v_ptr, sk_t, sv_t, offs_n, offs_d0, offs_d1, c_i_hi, c_i_lo,
            lift, lse, delta, c_hi_ptr, c_lo_ptr, c_rel_ptr, pos, start, lower, S, sink, scale2,
            softcap2, inverse_cap, row_sums, dq0, dq1,
            False, STARTS, LOWER, SINK, CAP, D1, BN, PRECISION, TMA)  # fmt: skip

    tl.store(row_sum_ptr + bh * T + m0 + offs_m, tl.sum(row_sums, 1), mask=rows)
    dq_rows = dq_ptr + ((b * T + m0) * H + h) * (D0 + D1) + offs_m[:, None] * (H * (D0 + D1))
    tl.store(dq_rows + offs_d0[None, :], (dq0 * scale).to(dq_ptr.dtype.element_ty), mask=rows[:, None])
    if D1 > 0:
        tl.store(dq_rows + offs_d1[None, :], (dq1 * scale).to(dq_ptr.dtype.element_ty), mask=rows[:, None])
