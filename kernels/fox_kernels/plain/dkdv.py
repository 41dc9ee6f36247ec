"""dk, dv and the column sums of ds: one program per block of keys and kv head, looping over its group's query heads.

Scores are formed transposed, S^T = K Q^T, so that no dot takes a transposed dot result: Triton 3.4 to 3.7.0 can
miscompile that on Hopper. Formulas: `backward`.
"""

import triton
import triton.language as tl

from ..common.blocks import decayed, load_rows, lowest, partial_sums, place, soft_capped, visible


@triton.jit
def query_range(
    start_ptr, end_ptr, unseen_ptr, n0, last_key, sinky, T, S, q_offset, window,
    BM: tl.constexpr, STARTS: tl.constexpr, LOWER: tl.constexpr,
):  # fmt: skip
    """Query tiles of a key block: [low, mid_low) masked, [mid_low, mid_high) interior, [mid_high, high) masked."""
    low, full_low = tl.maximum(n0 - q_offset, 0), tl.maximum(last_key + 1 - q_offset, 0)
    high, full_high = T, T
    if STARTS:
        end, first_end = tl.load(end_ptr + last_key), tl.load(end_ptr + n0)
        high = tl.minimum(high, tl.where(end < S, end - q_offset, T))
        full_high = tl.minimum(full_high, tl.where(first_end < S, first_end - q_offset, T))
        full_high = tl.where(tl.load(start_ptr + n0) > n0, 0, full_high)
        high = tl.where(tl.load(start_ptr + last_key) > last_key, 0, high)
    if LOWER == 1:
        high = tl.where(sinky, high, tl.minimum(high, last_key + window - q_offset))
        full_high = tl.minimum(full_high, n0 + window - q_offset)
    if LOWER == 2:
        high = tl.where(sinky, high, tl.minimum(high, tl.load(unseen_ptr + last_key)))
        full_high = tl.minimum(full_high, tl.load(unseen_ptr + n0))
    full_high = tl.where(sinky, 0, full_high)
    low = low // BM
    high = tl.maximum(tl.cdiv(tl.maximum(high, 0), BM), low)
    mid_low = tl.minimum(tl.maximum(tl.cdiv(full_low, BM), low), high)
    mid_high = tl.minimum(tl.maximum(tl.maximum(full_high, 0) // BM, mid_low), high)
    return low, mid_low, mid_high, high


@triton.jit
def _dkdv_block(
    b, h, m0, k0, k1, v0, v1, q_ptr, do_ptr, facts_ptr, record_ptr, start_ptr, lower_ptr, stride_q, stride_do,
    offs_m, offs_d0, offs_d1, j, bias_hi, bias_lo, key_bias, T, S, TP, q_offset, window, sink,
    scale2, softcap2, inverse_cap, column_sum, dk0, dk1, dv0, dv1,
    MASKED: tl.constexpr, STARTS: tl.constexpr, LOWER: tl.constexpr, SINK: tl.constexpr,
    CAP: tl.constexpr, D1: tl.constexpr, BM: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """One query tile, transposed. bias: c_ref (interior, scalars, with key_bias = c_ref - c_j) or c_j (masked)."""
    t = m0 + offs_m
    pos = tl.minimum(q_offset + t, S - 1)
    facts = facts_ptr + t
    if MASKED:
        e_hi = tl.load(facts, mask=t < T, other=0.0)
        e_lo = tl.load(facts + TP, mask=t < T, other=0.0)
        delta = tl.load(facts + 2 * TP, mask=t < T, other=0.0)
    else:
        record = record_ptr + m0 // BM * (2 * BM + 16)
        relative = tl.load(record + offs_m)
        delta = tl.load(record + BM + offs_m)
        lift = (tl.load(record + 2 * BM) - bias_hi) + (tl.load(record + 2 * BM + 1) - bias_lo)
    q0 = load_rows(q_ptr, b, h, m0, stride_q, offs_m, offs_d0, T, MASKED, TMA > 0)
    do0 = load_rows(do_ptr, b, h, m0, stride_do, offs_m, offs_d0, T, MASKED, TMA > 0)
    s = tl.dot(k0, tl.trans(q0), input_precision=PRECISION)
    dp = tl.dot(v0, tl.trans(do0), input_precision=PRECISION)
    if D1 > 0:
        q1 = load_rows(q_ptr, b, h, m0, stride_q, offs_m, offs_d1, T, MASKED, TMA > 0)
        do1 = load_rows(do_ptr, b, h, m0, stride_do, offs_m, offs_d1, T, MASKED, TMA > 0)
        s = tl.dot(k1, tl.trans(q1), s, input_precision=PRECISION)
        dp = tl.dot(v1, tl.trans(do1), dp, input_precision=PRECISION)
    tanh = s
    if CAP:
        s, tanh = soft_capped(s * scale2, softcap2, inverse_cap, CAP == 2)
    else:
        s = s * scale2
    if MASKED:
        start = tl.zeros_like(t)
        if STARTS:
            start = tl.load(start_ptr + pos)
        if SINK:
            sink_bias = (0.0 - tl.load(facts + 3 * TP, mask=t < T, other=0.0))[None, :]
        else:
            sink_bias = 0.0
        s = decayed(s, e_hi[None, :], e_lo[None, :], bias_hi[:, None], bias_lo[:, None],
                    j[:, None] < start[None, :] + sink, sink_bias, SINK)  # fmt: skip
        i = (q_offset + t)[None, :]
        lower = lowest(lower_ptr, t, T, S, q_offset, window, LOWER)[None, :]
        seen = visible(i, j[:, None], start[None, :], lower, S, sink, STARTS, LOWER)
        p = tl.exp2(tl.where(seen & (t < T)[None, :], s, float("-inf")))
    else:
        p = tl.exp2(s + relative[None, :] + (key_bias + lift)[:, None])
    p_rounded = p.to(do0.dtype)
    dv0 = tl.dot(p_rounded, do0, dv0, input_precision=PRECISION)
    if D1 > 0:
        dv1 = tl.dot(p_rounded, do1, dv1, input_precision=PRECISION)
    ds = p * (dp - delta[None, :])
    if MASKED:
        counted = tl.where(j[:, None] == (q_offset + t)[None, :], 0.0, ds)
    else:
        counted = ds
    column_sum += tl.sum(counted, 1) if len(column_sum.shape) == 1 else partial_sums(counted)
    if CAP:
        ds = ds * (1.0 - tanh * tanh)
    ds = ds.to(q0.dtype)
    dk0 = tl.dot(ds, q0, dk0, input_precision=PRECISION)
    if D1 > 0:
        dk1 = tl.dot(ds, q1, dk1, input_precision=PRECISION)
    return column_sum, dk0, dk1, dv0, dv1


@triton.jit(do_not_specialize=["T", "S", "together", "q_offset", "window", "sink"])
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, v_block_ptr, do_ptr, facts_ptr, record_ptr, row_sum_ptr, c_hi_ptr, c_lo_ptr, start_ptr,
    end_ptr, lower_ptr, unseen_ptr, lost_ptr, dk_ptr, dv_ptr, dc_ptr,
    sq_b, sq_t, sq_h, sk_b, sk_t, sk_h, sv_b, sv_t, sv_h, sdo_b, sdo_t, sdo_h,
    T, S, TP, H, together, q_offset, window, sink, scale, scale2, softcap2, inverse_cap,
    GROUP: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    STARTS: tl.constexpr, LOWER: tl.constexpr, SINK: tl.constexpr, CAP: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, LOST: tl.constexpr,
):  # fmt: skip
    # The first key blocks have the most queries: they go first.
    blocks = tl.cdiv(S, BN)
    block, kv = place(blocks, tl.num_programs(0) // blocks, together)
    n0 = block * BN
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

    if TMA < 3:
        k_ptr += b * sk_b + h_kv * sk_h
        v_ptr += b * sv_b + h_kv * sv_h
    row_b, row_kv = b.to(tl.int32), h_kv.to(tl.int32)
    k0 = load_rows(k_ptr, row_b, row_kv, n0, sk_t, offs_n, offs_d0, S, True, TMA > 2)
    v0 = load_rows(v_ptr, row_b, row_kv, n0, sv_t, offs_n, offs_d0, S, True, TMA > 2)
    k1, v1 = k0, v0
    dk0 = tl.zeros([BN, D0], tl.float32)
    dv0 = tl.zeros([BN, D0], tl.float32)
    dk1, dv1 = dk0, dv0
    if D1 > 0:
        k1 = load_rows(k_ptr, row_b, row_kv, n0, sk_t, offs_n, offs_d1, S, True, False)
        v1 = load_rows(v_ptr, row_b, row_kv, n0, sv_t, offs_n, offs_d1, S, True, False)
        dk1 = tl.zeros([BN, D1], tl.float32)
        dv1 = tl.zeros([BN, D1], tl.float32)
    if LOST > 0:
        lost_ptr += (kv * LOST + j[:, None]) * (D0 + D1)
        dv0 = tl.load(lost_ptr + offs_d0[None, :], mask=(j < LOST)[:, None], other=0.0)
        if D1 > 0:
            dv1 = tl.load(lost_ptr + offs_d1[None, :], mask=(j < LOST)[:, None], other=0.0)

    for g in range(GROUP):
        h = h_kv * GROUP + g
        bh = b * H + h
        q_head, do_head = q_ptr, do_ptr
        if TMA == 0:
            q_head += b * sq_b + h * sq_h
            do_head += b * sdo_b + h * sdo_h
        facts_head = facts_ptr + bh * 4 * TP
        record_head = record_ptr + bh * tl.cdiv(T, BM) * (2 * BM + 16)
        c_hi_head, c_lo_head = c_hi_ptr + bh * S, c_lo_ptr + bh * S
        lower_head, unseen_head = lower_ptr, unseen_ptr
        if LOWER == 2:
            lower_head += bh * T
            unseen_head += bh * S
        low, mid_low, mid_high, high = query_range(
            start_ptr, end_ptr, unseen_head, n0, last_key, sinky, T, S, q_offset, window,
            BM, STARTS, LOWER)  # fmt: skip
        c_j_hi = tl.load(c_hi_head + j, mask=j < S, other=0.0)
        c_j_lo = tl.load(c_lo_head + j, mask=j < S, other=0.0)
        ref_hi = tl.load(c_hi_head + last_key)
        ref_lo = tl.load(c_lo_head + last_key)
        key_bias = (ref_hi - c_j_hi) + (ref_lo - c_j_lo)
        # Eight sums a key take no shuffles in the loop; beside k in registers (TMA 3) ptxas then serialises products.
        column_sum = tl.zeros([BN, 8] if TMA == 2 else [BN], tl.float32)
        for it in range(mid_low - low + high - mid_high):
            m0 = tl.where(it < mid_low - low, low + it, mid_high + it - (mid_low - low)) * BM
            column_sum, dk0, dk1, dv0, dv1 = _dkdv_block(
                row_b, h.to(tl.int32), m0, k0, k1, v0, v1, q_head, do_head, facts_head, record_head, start_ptr,
                lower_head, sq_t, sdo_t, offs_m, offs_d0, offs_d1, j, c_j_hi, c_j_lo, key_bias, T, S, TP,
                q_offset, window, sink, scale2, softcap2, inverse_cap, column_sum, dk0, dk1, dv0, dv1,
                True, STARTS, LOWER, SINK, CAP, D1, BM, PRECISION, TMA)  # fmt: skip
        inner = v0
        if TMA == 2:  # in registers beside the interior tiles only, which have room for it
            inner = load_rows(v_block_ptr, row_b, row_kv, n0, sv_t, offs_n, offs_d0, S, True, True)
        for it in range(mid_high - mid_low):
            column_sum, dk0, dk1, dv0, dv1 = _dkdv_block(
                row_b, h.to(tl.int32), (mid_low + it) * BM, k0, k1, inner, v1, q_head, do_head, facts_head,
                record_head, start_ptr, lower_head, sq_t, sdo_t, offs_m, offs_d0, offs_d1, j, ref_hi, ref_lo, key_bias,
                T, S, TP, q_offset, window, sink, scale2, softcap2, inverse_cap, column_sum, dk0, dk1, dv0, dv1,
                False, STARTS, LOWER, SINK, CAP, D1, BM, PRECISION, TMA)  # fmt: skip
        if TMA == 2:
            column_sum = tl.sum(column_sum, 1)
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
