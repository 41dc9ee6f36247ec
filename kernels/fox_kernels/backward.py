"""The backward in plain Triton, deterministic: dq with its row sums, then dk and dv with the column sums.

    p_ij = exp2(s_ij - lse_i)      ds_ij = p_ij (do_i.v_j - delta_i)      delta_i = do_i.o_i - dL/dlse_i
    dq_i = scale sum_j ds_ij k_j   dk_j = scale sum_i ds_ij q_i
    dv_j = sum_i p_ij do_i         dc_t = sum_j ds_tj - sum_i ds_it

dk and dv are accumulated over the queries in transposed form, S^T = K Q^T, so that no dot takes a transposed dot
result: Triton 3.4 to 3.7.0 can miscompile that on Hopper. A group's query heads are looped inside the program of their
kv head.
The row and column sums come from the same float32 ds: with either left out, or rounded, dlog_f is off by 1 to 11 %.
"""

# Kernels are launched with plain values and a grid in brackets, which their annotations don't show:
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import torch
import triton
import triton.language as tl

from . import prune as pruning
from .cumsum import block_relative
from .forward import (
    LOG2_E,
    block_scalars,
    decayed,
    document_bounds,
    key_range,
    load_rows,
    masked_block,
    no_bounds,
    query_facts,
    soft_capped,
    unit_last,
    visible,
)
from .tiles import Tile, split_head_dim, tile_for


@triton.jit
def _dq_block(
    n0, q0, q1, do0, do1, k_ptr, v_ptr, stride_k, stride_v, offs_n, offs_d0, offs_d1, bias_hi, bias_lo, lse, delta,
    c_hi_ptr, c_lo_ptr, c_rel_ptr, pos, start, sink_bias, S, window, sink, scale2, softcap2, inverse_cap,
    row_sum, dq0, dq1,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, STARTS: tl.constexpr, WINDOW: tl.constexpr, SINK: tl.constexpr,
    CAP: tl.constexpr, D1: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    j = n0 + offs_n
    if MASKED:
        c_hi = tl.load(c_hi_ptr + j, mask=j < S, other=0.0)
        c_lo = tl.load(c_lo_ptr + j, mask=j < S, other=0.0)
    else:
        rel = tl.load(c_rel_ptr + j)
        last_hi, last_lo = block_scalars(c_hi_ptr, c_lo_ptr, n0 + BN - 1, S)
        lift = (bias_hi - last_hi) + (bias_lo - last_lo)
    k0 = load_rows(k_ptr, n0, stride_k, offs_n, offs_d0, S, MASKED)
    v0 = load_rows(v_ptr, n0, stride_v, offs_n, offs_d0, S, MASKED)
    s = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
    dp = tl.dot(do0, tl.trans(v0), input_precision=PRECISION)
    if D1 > 0:
        k1 = load_rows(k_ptr, n0, stride_k, offs_n, offs_d1, S, MASKED)
        v1 = load_rows(v_ptr, n0, stride_v, offs_n, offs_d1, S, MASKED)
        s = tl.dot(q1, tl.trans(k1), s, input_precision=PRECISION)
        dp = tl.dot(do1, tl.trans(v1), dp, input_precision=PRECISION)
    tanh = s
    if CAP:
        s, tanh = soft_capped(s * scale2, softcap2, inverse_cap)
    else:
        s = s * scale2
    if MASKED:
        s = decayed(s, bias_hi[:, None], bias_lo[:, None], c_hi[None, :], c_lo[None, :],
                    j[None, :] < start[:, None] + sink, sink_bias, SINK)  # fmt: skip
        seen = visible(pos[:, None], j[None, :], start[:, None], S, window, sink, CAUSAL, STARTS, WINDOW)
        p = tl.exp2(tl.where(seen, s - lse[:, None], float("-inf")))
    else:
        p = tl.exp2(s + rel[None, :] - (lse - lift)[:, None])
    ds = p * (dp - delta[:, None])
    if MASKED:
        # The own key's ds would cancel in dc, but for rounding: with gates shut it is nearly all of the sum.
        still = j[None, :] == pos[:, None]
        if SINK:
            still = still | (j[None, :] < start[:, None] + sink)
        row_sum += tl.sum(tl.where(still, 0.0, ds), 1)
    else:
        row_sum += tl.sum(ds, 1)
    if CAP:
        ds = ds * (1.0 - tanh * tanh)
    ds = ds.to(k0.dtype)
    dq0 = tl.dot(ds, k0, dq0, input_precision=PRECISION)
    if D1 > 0:
        dq1 = tl.dot(ds, k1, dq1, input_precision=PRECISION)
    return row_sum, dq0, dq1


@triton.jit(do_not_specialize=["T", "S", "q_offset", "window", "sink", "prune"])
def dq_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, residual_ptr, do_ptr, dlse_ptr, lse_ptr, c_hi_ptr, c_lo_ptr, c_rel_ptr, start_ptr,
    first_ptr, c_offset_ptr, dq_ptr, facts_ptr, row_sum_ptr,
    sq_b, sq_t, sq_h, sk_b, sk_s, sk_h, sv_b, sv_s, sv_h, so_b, so_t, so_h, sdo_b, sdo_t, sdo_h,
    T, S, H, q_offset, window, sink, prune, scale, scale2, softcap2, inverse_cap,
    GROUP: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, STARTS: tl.constexpr, WINDOW: tl.constexpr, SINK: tl.constexpr, CAP: tl.constexpr,
    PRUNE_M: tl.constexpr, SHIFT: tl.constexpr, DLSE: tl.constexpr, RESIDUAL: tl.constexpr,
    NEXT_BM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(T, BM)
    pairs = tl.num_programs(0) // tiles
    m0 = (tiles - 1 - tl.program_id(0) // pairs) * BM
    bh = (tl.program_id(0) % pairs).to(tl.int64)
    b, h = bh // H, bh % H
    q_ptr += b * sq_b + h * sq_h
    k_ptr += b * sk_b + (h // GROUP) * sk_h
    v_ptr += b * sv_b + (h // GROUP) * sv_h
    o_ptr += b * so_b + h * so_h
    if RESIDUAL:
        residual_ptr += b * so_b + h * so_h
    do_ptr += b * sdo_b + h * sdo_h
    c_hi_ptr += bh * S
    c_lo_ptr += bh * S
    c_rel_ptr += bh * S
    if STARTS:
        start_ptr += b * S
    first_ptr += bh * tl.cdiv(T, PRUNE_M)

    offs_m, offs_n = tl.arange(0, BM), tl.arange(0, BN)
    offs_d0 = tl.arange(0, D0)
    offs_d1 = D0 + tl.arange(0, D1 if D1 > 0 else D0)
    pos, start, least, greatest = query_facts(start_ptr, m0, offs_m, T, S, q_offset, STARTS)
    last_pos = q_offset + tl.minimum(m0 + BM, T) - 1
    low, mid_low, mid_high, high, sink_low, sink_high = key_range(
        first_ptr, prune, m0, last_pos, T, S, q_offset, least, greatest, window, sink,
        BM, BN, CAUSAL, WINDOW, PRUNE_M)  # fmt: skip

    rows = m0 + offs_m < T
    do0 = load_rows(do_ptr, m0, sdo_t, offs_m, offs_d0, T, True)
    o0 = load_rows(o_ptr, m0, so_t, offs_m, offs_d0, T, True)
    o0 = o0.to(tl.float32)
    if RESIDUAL:  # of o's rounding: where one key holds nearly all the weight, delta is all but the whole of do.v
        o0 += load_rows(residual_ptr, m0, so_t, offs_m, offs_d0, T, True)
    delta = tl.sum(do0.to(tl.float32) * o0, 1)
    do1 = do0
    if D1 > 0:
        do1 = load_rows(do_ptr, m0, sdo_t, offs_m, offs_d1, T, True)
        o1 = load_rows(o_ptr, m0, so_t, offs_m, offs_d1, T, True)
        o1 = o1.to(tl.float32)
        if RESIDUAL:
            o1 += load_rows(residual_ptr, m0, so_t, offs_m, offs_d1, T, True)
        delta += tl.sum(do1.to(tl.float32) * o1, 1)
    lse = tl.load(lse_ptr + bh * T + m0 + offs_m, mask=rows, other=float("-inf"))
    empty = lse == float("-inf")
    if DLSE:
        dlse = tl.load(dlse_ptr + bh * T + m0 + offs_m, mask=lse > float("-inf"), other=0.0)
        delta -= dlse * 1.4426950408889634

    q0 = load_rows(q_ptr, m0, sq_t, offs_m, offs_d0, T, True)
    q1 = q0
    dq0 = tl.zeros([BM, D0], tl.float32)
    dq1 = dq0
    if D1 > 0:
        q1 = load_rows(q_ptr, m0, sq_t, offs_m, offs_d1, T, True)
        dq1 = tl.zeros([BM, D1], tl.float32)
    row_sum = tl.zeros([BM], tl.float32)
    c_i_hi = tl.load(c_hi_ptr + tl.minimum(pos, S - 1))
    c_i_lo = tl.load(c_lo_ptr + tl.minimum(pos, S - 1))
    ref_hi, ref_lo = block_scalars(c_hi_ptr, c_lo_ptr, q_offset + m0, S)
    offset = 0.0
    if SHIFT:
        offset = tl.load(c_offset_ptr + bh)
    lse = tl.where(empty, 0.0, lse) - offset
    sink_bias = 0.0 - offset

    # What the next kernel needs of a query, [5, T] per head: c_i - lse_i in two floats, delta, lse, and c_i - lse_i
    # relative to c of the first query of its tile there.
    difference = c_i_hi - lse
    virtual = difference - c_i_hi
    lost = (c_i_hi - (difference - virtual)) - (lse + virtual)
    facts = facts_ptr + bh * 5 * T + m0 + offs_m
    tl.store(facts, tl.where(empty, float("-inf"), difference), mask=rows)
    tl.store(facts + T, lost + c_i_lo, mask=rows)
    first = q_offset + (m0 + offs_m) // NEXT_BM * NEXT_BM
    first_hi, first_lo = block_scalars(c_hi_ptr, c_lo_ptr, first, S)
    relative = (c_i_hi - first_hi) + (c_i_lo - first_lo) - lse
    tl.store(facts + 4 * T, tl.where(empty, float("-inf"), relative), mask=rows)
    tl.store(facts + 2 * T, delta, mask=rows)
    lse = tl.where(empty, float("inf"), lse)
    tl.store(facts + 3 * T, lse, mask=rows)

    for it in range(high - mid_high + mid_low - low + sink_high - sink_low):
        n0 = masked_block(it, low, mid_low, mid_high, high, sink_low) * BN
        row_sum, dq0, dq1 = _dq_block(
            n0, q0, q1, do0, do1, k_ptr, v_ptr, sk_s, sv_s, offs_n, offs_d0, offs_d1, c_i_hi, c_i_lo, lse, delta,
            c_hi_ptr, c_lo_ptr, c_rel_ptr, pos, start, sink_bias, S, window, sink, scale2, softcap2, inverse_cap,
            row_sum, dq0, dq1,
            True, CAUSAL, STARTS, WINDOW, SINK, CAP, D1, BN, PRECISION)  # fmt: skip
    lse -= (c_i_hi - ref_hi) + (c_i_lo - ref_lo)
    for it in range(mid_high - mid_low):
        n0 = (mid_high - 1 - it) * BN
        row_sum, dq0, dq1 = _dq_block(
            n0, q0, q1, do0, do1, k_ptr, v_ptr, sk_s, sv_s, offs_n, offs_d0, offs_d1, ref_hi, ref_lo, lse, delta,
            c_hi_ptr, c_lo_ptr, c_rel_ptr, pos, start, sink_bias, S, window, sink, scale2, softcap2, inverse_cap,
            row_sum, dq0, dq1,
            False, CAUSAL, STARTS, WINDOW, SINK, CAP, D1, BN, PRECISION)  # fmt: skip

    tl.store(row_sum_ptr + bh * T + m0 + offs_m, row_sum, mask=rows)
    dq_rows = dq_ptr + ((b * T + m0) * H + h) * (D0 + D1) + offs_m[:, None] * (H * (D0 + D1))
    tl.store(dq_rows + offs_d0[None, :], (dq0 * scale).to(dq_ptr.dtype.element_ty), mask=rows[:, None])
    if D1 > 0:
        tl.store(dq_rows + offs_d1[None, :], (dq1 * scale).to(dq_ptr.dtype.element_ty), mask=rows[:, None])


@triton.jit
def query_range(
    first_ptr, prune, start_ptr, end_ptr, n0, last_key, sinky, T, S, q_offset, window,
    BM: tl.constexpr, CAUSAL: tl.constexpr, STARTS: tl.constexpr, WINDOW: tl.constexpr, PRUNE_M: tl.constexpr,
):  # fmt: skip
    """Query tiles of a key block: [low, mid_low) masked, [mid_low, mid_high) interior, [mid_high, high) masked."""
    low, full_low = n0 * 0, n0 * 0
    high, full_high = T, T
    if CAUSAL:
        low = tl.maximum(n0 - q_offset, 0)
        full_low = tl.maximum(last_key - q_offset, 0)
    if STARTS:
        high = tl.minimum(high, tl.load(end_ptr + last_key) - q_offset)
        full_high = tl.minimum(full_high, tl.load(end_ptr + n0) - q_offset)
        full_high = tl.where(tl.load(start_ptr + n0) > n0, 0, full_high)
        high = tl.where(tl.load(start_ptr + last_key) > last_key, 0, high)
    if WINDOW:
        high = tl.where(sinky, high, tl.minimum(high, last_key + window - q_offset))
        full_high = tl.minimum(full_high, n0 + window - q_offset)
    kept = n0 * 0
    tiles = tl.cdiv(T, PRUNE_M)
    for block in range(tl.cdiv(tiles * prune, 512)):
        g = block * 512 + tl.arange(0, 512)
        first = tl.load(first_ptr + g, mask=g < tiles, other=S)
        kept = tl.maximum(kept, tl.max(tl.where(first <= last_key, (g + 1) * PRUNE_M, 0), 0))
    high = tl.where(sinky | (prune == 0), high, tl.minimum(high, kept))
    full_high = tl.where(sinky, 0, full_high)
    low = low // BM
    high = tl.maximum(tl.cdiv(tl.maximum(high, 0), BM), low)
    mid_low = tl.minimum(tl.maximum(tl.cdiv(full_low, BM), low), high)
    mid_high = tl.minimum(tl.maximum(tl.maximum(full_high, 0) // BM, mid_low), high)
    return low, mid_low, mid_high, high


@triton.jit
def _dkdv_block(
    m0, k0, k1, v0, v1, q_ptr, do_ptr, facts_ptr, c_hi_ptr, c_lo_ptr, start_ptr, stride_q, stride_do,
    offs_m, offs_d0, offs_d1, j, bias_hi, bias_lo, key_bias, offset, T, S, q_offset, window, sink,
    scale2, softcap2, inverse_cap, column_sum, dk0, dk1, dv0, dv1,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, STARTS: tl.constexpr, WINDOW: tl.constexpr, SINK: tl.constexpr,
    CAP: tl.constexpr, D1: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One query tile, transposed. bias: c_ref (interior, scalars, with key_bias = c_ref - c_j) or c_j (masked)."""
    t = m0 + offs_m
    pos = tl.minimum(q_offset + t, S - 1)
    facts = facts_ptr + t
    if MASKED:
        e_hi = tl.load(facts, mask=t < T, other=0.0)
        e_lo = tl.load(facts + T, mask=t < T, other=0.0)
        delta = tl.load(facts + 2 * T, mask=t < T, other=0.0)
    else:
        relative = tl.load(facts + 4 * T)
        delta = tl.load(facts + 2 * T)
        first_hi, first_lo = block_scalars(c_hi_ptr, c_lo_ptr, q_offset + m0, S)
        lift = (first_hi - bias_hi) + (first_lo - bias_lo)
    q0 = load_rows(q_ptr, m0, stride_q, offs_m, offs_d0, T, MASKED)
    do0 = load_rows(do_ptr, m0, stride_do, offs_m, offs_d0, T, MASKED)
    s = tl.dot(k0, tl.trans(q0), input_precision=PRECISION)
    dp = tl.dot(v0, tl.trans(do0), input_precision=PRECISION)
    if D1 > 0:
        q1 = load_rows(q_ptr, m0, stride_q, offs_m, offs_d1, T, MASKED)
        do1 = load_rows(do_ptr, m0, stride_do, offs_m, offs_d1, T, MASKED)
        s = tl.dot(k1, tl.trans(q1), s, input_precision=PRECISION)
        dp = tl.dot(v1, tl.trans(do1), dp, input_precision=PRECISION)
    tanh = s
    if CAP:
        s, tanh = soft_capped(s * scale2, softcap2, inverse_cap)
    else:
        s = s * scale2
    if MASKED:
        start = tl.zeros_like(t)
        if STARTS:
            start = tl.load(start_ptr + pos)
        if SINK:
            sink_bias = (0.0 - offset - tl.load(facts + 3 * T, mask=t < T, other=0.0))[None, :]
        else:
            sink_bias = 0.0
        s = decayed(s, e_hi[None, :], e_lo[None, :], bias_hi[:, None], bias_lo[:, None],
                    j[:, None] < start[None, :] + sink, sink_bias, SINK)  # fmt: skip
        i = (q_offset + t)[None, :]
        seen = visible(i, j[:, None], start[None, :], S, window, sink, CAUSAL, STARTS, WINDOW)
        p = tl.exp2(tl.where(seen & (t < T)[None, :], s, float("-inf")))
    else:
        p = tl.exp2(s + relative[None, :] + (key_bias + lift)[:, None])
    ds = p * (dp - delta[None, :])
    if MASKED:
        column_sum += tl.sum(tl.where(j[:, None] == (q_offset + t)[None, :], 0.0, ds), 1)
    else:
        column_sum += tl.sum(ds, 1)
    if CAP:
        ds = ds * (1.0 - tanh * tanh)
    p = p.to(do0.dtype)
    ds = ds.to(q0.dtype)
    dv0 = tl.dot(p, do0, dv0, input_precision=PRECISION)
    dk0 = tl.dot(ds, q0, dk0, input_precision=PRECISION)
    if D1 > 0:
        dv1 = tl.dot(p, do1, dv1, input_precision=PRECISION)
        dk1 = tl.dot(ds, q1, dk1, input_precision=PRECISION)
    return column_sum, dk0, dk1, dv0, dv1


@triton.jit(do_not_specialize=["T", "S", "q_offset", "window", "sink", "prune"])
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, facts_ptr, row_sum_ptr, c_hi_ptr, c_lo_ptr, start_ptr, end_ptr, first_ptr,
    c_offset_ptr, dk_ptr, dv_ptr, dc_ptr,
    sq_b, sq_t, sq_h, sk_b, sk_s, sk_h, sv_b, sv_s, sv_h, sdo_b, sdo_t, sdo_h,
    T, S, H, q_offset, window, sink, prune, scale, scale2, softcap2, inverse_cap,
    GROUP: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, STARTS: tl.constexpr, WINDOW: tl.constexpr, SINK: tl.constexpr, CAP: tl.constexpr,
    PRUNE_M: tl.constexpr, SHIFT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # The first key blocks have the most queries: they go first.
    pairs = tl.num_programs(0) // tl.cdiv(S, BN)
    n0 = (tl.program_id(0) // pairs) * BN
    kv = (tl.program_id(0) % pairs).to(tl.int64)
    heads = H // GROUP
    b, h_kv = kv // heads, kv % heads
    if STARTS:
        start_ptr += b * S
        end_ptr += b * S

    offs_m, offs_n = tl.arange(0, BM), tl.arange(0, BN)
    offs_d0 = tl.arange(0, D0)
    offs_d1 = D0 + tl.arange(0, D1 if D1 > 0 else D0)
    j = n0 + offs_n
    last_key = tl.minimum(n0 + BN, S) - 1
    is_sink = j < 0
    if SINK:
        is_sink = j < sink
        if STARTS:
            is_sink = j < tl.load(start_ptr + j, mask=j < S, other=0) + sink
    sinky = tl.max(is_sink.to(tl.int32), 0) > 0

    k_ptr += b * sk_b + h_kv * sk_h
    v_ptr += b * sv_b + h_kv * sv_h
    k0 = load_rows(k_ptr, n0, sk_s, offs_n, offs_d0, S, True)
    v0 = load_rows(v_ptr, n0, sv_s, offs_n, offs_d0, S, True)
    k1, v1 = k0, v0
    dk0 = tl.zeros([BN, D0], tl.float32)
    dv0 = tl.zeros([BN, D0], tl.float32)
    dk1, dv1 = dk0, dv0
    if D1 > 0:
        k1 = load_rows(k_ptr, n0, sk_s, offs_n, offs_d1, S, True)
        v1 = load_rows(v_ptr, n0, sv_s, offs_n, offs_d1, S, True)
        dk1 = tl.zeros([BN, D1], tl.float32)
        dv1 = tl.zeros([BN, D1], tl.float32)

    for g in range(GROUP):
        h = h_kv * GROUP + g
        bh = b * H + h
        q_head = q_ptr + b * sq_b + h * sq_h
        do_head = do_ptr + b * sdo_b + h * sdo_h
        facts_head = facts_ptr + bh * 5 * T
        c_hi_head, c_lo_head = c_hi_ptr + bh * S, c_lo_ptr + bh * S
        first_head = first_ptr + bh * tl.cdiv(T, PRUNE_M)
        low, mid_low, mid_high, high = query_range(
            first_head, prune, start_ptr, end_ptr, n0, last_key, sinky, T, S, q_offset, window,
            BM, CAUSAL, STARTS, WINDOW, PRUNE_M)  # fmt: skip
        c_j_hi = tl.load(c_hi_head + j, mask=j < S, other=0.0)
        c_j_lo = tl.load(c_lo_head + j, mask=j < S, other=0.0)
        ref_hi = tl.load(c_hi_head + last_key)
        ref_lo = tl.load(c_lo_head + last_key)
        key_bias = (ref_hi - c_j_hi) + (ref_lo - c_j_lo)
        offset = 0.0
        if SHIFT:
            offset = tl.load(c_offset_ptr + bh)
        column_sum = tl.zeros([BN], tl.float32)
        for it in range(mid_low - low + high - mid_high):
            m0 = tl.where(it < mid_low - low, low + it, mid_high + it - (mid_low - low)) * BM
            column_sum, dk0, dk1, dv0, dv1 = _dkdv_block(
                m0, k0, k1, v0, v1, q_head, do_head, facts_head, c_hi_head, c_lo_head, start_ptr, sq_t, sdo_t,
                offs_m, offs_d0, offs_d1, j, c_j_hi, c_j_lo, key_bias, offset, T, S, q_offset, window, sink,
                scale2, softcap2, inverse_cap, column_sum, dk0, dk1, dv0, dv1,
                True, CAUSAL, STARTS, WINDOW, SINK, CAP, D1, PRECISION)  # fmt: skip
        for it in range(mid_high - mid_low):
            column_sum, dk0, dk1, dv0, dv1 = _dkdv_block(
                (mid_low + it) * BM, k0, k1, v0, v1, q_head, do_head, facts_head, c_hi_head, c_lo_head,
                start_ptr, sq_t, sdo_t, offs_m, offs_d0, offs_d1, j, ref_hi, ref_lo, key_bias, offset,
                T, S, q_offset, window, sink,
                scale2, softcap2, inverse_cap, column_sum, dk0, dk1, dv0, dv1,
                False, CAUSAL, STARTS, WINDOW, SINK, CAP, D1, PRECISION)  # fmt: skip
        if SINK:
            column_sum = tl.where(is_sink, 0.0, column_sum)
        t = j - q_offset
        own = tl.load(row_sum_ptr + bh * T + t, mask=(t >= 0) & (t < T), other=0.0)
        tl.store(dc_ptr + bh * S + j, own - column_sum, mask=j < S)

    rows = ((b * S + n0) * heads + h_kv) * (D0 + D1) + offs_n[:, None] * (heads * (D0 + D1))
    keys = (j < S)[:, None]
    out = dk_ptr.dtype.element_ty
    tl.store(dk_ptr + rows + offs_d0[None, :], (dk0 * scale).to(out), mask=keys)
    tl.store(dv_ptr + rows + offs_d0[None, :], dv0.to(out), mask=keys)
    if D1 > 0:
        tl.store(dk_ptr + rows + offs_d1[None, :], (dk1 * scale).to(out), mask=keys)
        tl.store(dv_ptr + rows + offs_d1[None, :], dv1.to(out), mask=keys)


def launch_backward(
    do, dlse2, q, k, v, o, lse2, c_hi, c_lo, *, scale, starts=None, cu_seqlens=None, seq_start=None, window=None,
    sink=0, softcap=None, prune=None, q_offset=None, c_offset=None, causal=True, residual=None,
    tiles: tuple[Tile, Tile] | None = None,
    bounds=None,
):  # fmt: skip
    """Return dq, dk, dv in the inputs' dtype and dc (B, H, S) float32, dL/dc in natural units; arguments as forward's.

    dlse2 (B, H, T) or None is dL/dlse2; residual, or None, is what `launch_forward` left in its own. The order of every
    sum is fixed, so two runs give the same bits.
    """
    (B, T, H, D), (S, Hkv) = q.shape, k.shape[1:3]
    q, k, v, o, do = (unit_last(x) for x in (q, k, v, o, do))
    lse2, c_hi, c_lo = lse2.contiguous(), c_hi.contiguous(), c_lo.contiguous()
    q_offset = S - T if q_offset is None else q_offset
    dq = torch.empty(B, T, H, D, dtype=q.dtype, device=q.device)
    dk, dv = (torch.empty(B, S, Hkv, D, dtype=k.dtype, device=q.device) for _ in range(2))
    dc = torch.empty(B, H, S, dtype=torch.float32, device=q.device)
    if q.numel() == 0:
        return dq, dk.zero_(), dv.zero_(), dc.zero_()
    facts = torch.empty(B, H, 5, T, dtype=torch.float32, device=q.device)
    row_sum = torch.empty(B, H, T, dtype=torch.float32, device=q.device)
    if starts is None:
        starts = document_bounds(B, S, cu_seqlens, seq_start, q.device)
    if prune is not None and bounds is None:
        bounds = pruning.loop_bounds(q, k, c_hi, c_lo, scale, softcap, prune, q_offset, causal)
    bounds_or_none = no_bounds(q.device) if bounds is None else bounds
    start, end = (None, None) if starts is None else starts
    rows, columns = tiles or tuple(tile_for(kernel, D, q.dtype, q.device) for kernel in ("dq", "dkdv"))
    D0, D1 = split_head_dim(D)
    sizes = (T, S, H, q_offset, window or 0, sink, int(bounds is not None), scale, scale * LOG2_E)
    caps = (0.0, 0.0) if softcap is None else (softcap * LOG2_E, 2.0 / softcap)
    flags = {
        "GROUP": H // Hkv, "D0": D0, "D1": D1, "CAUSAL": causal, "STARTS": starts is not None,
        "WINDOW": window is not None, "SINK": sink > 0, "CAP": softcap is not None,
        "PRUNE_M": pruning.BLOCK_M, "SHIFT": c_offset is not None,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
    }  # fmt: skip
    dq_kernel[(triton.cdiv(T, rows.block_m) * B * H,)](
        q, k, v, o, residual, do, None if dlse2 is None else dlse2.contiguous(), lse2, c_hi, c_lo,
        block_relative(c_hi, c_lo, rows.block_n), start, bounds_or_none, c_offset, dq, facts, row_sum,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *o.stride()[:3], *do.stride()[:3], *sizes, *caps,
        **flags, BM=rows.block_m, BN=rows.block_n, DLSE=dlse2 is not None,
        RESIDUAL=residual is not None, NEXT_BM=columns.block_m, num_warps=rows.warps, num_stages=rows.stages,
    )  # fmt: skip
    dkdv_kernel[(triton.cdiv(S, columns.block_n) * B * Hkv,)](
        q, k, v, do, facts, row_sum, c_hi, c_lo, start, end, bounds_or_none, c_offset, dk, dv, dc,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *do.stride()[:3], *sizes, *caps,
        **flags, BM=columns.block_m, BN=columns.block_n,
        num_warps=columns.warps, num_stages=columns.stages,
    )  # fmt: skip
    if q_offset + T > S:  # queries past the keys share c[S - 1]
        dc[..., S - 1] += row_sum[..., max(0, S - q_offset) :].sum(-1)
    return dq, dk, dv, dc
