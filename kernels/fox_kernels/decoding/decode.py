"""The kernels of decoding: one or a few queries against a long cache, the keys split over the GPU.

One program per sequence, kv head and stretch of keys; the T * G queries of the head's group are the rows of its tile,
so K and V are read once for all of them. Each program writes its part's o and lse, a second kernel merges them. c is
kept as two floats beside the cache (`append.append` lengthens it); every decay is the exact difference c_i - c_j.
Blocks of keys begin at multiples of their size: only so does Triton know that c may be copied 16 bytes at a time.

With a length_ptr the cache holds as many tokens as it says before the T new ones, and S is only the most that it may
hold: one captured graph serves every length up to S.
"""

import triton
import triton.language as tl

from ..common.blocks import soft_capped, visible
from .search import advance


@triton.jit
def walk(
    pair, known, S, T, heads, window, sink, start_ptr, first_ptr,
    BN: tl.constexpr, STARTS: tl.constexpr, WINDOW: tl.constexpr, SINK: tl.constexpr, HORIZON: tl.constexpr,
):  # fmt: skip
    """What (sequence, kv head) pairs read: [least, sinks_end) and [low, S), in blocks that begin at multiples of BN.

    Returns least, sinks_end, low, how many blocks are the sinks' alone, and how many there are with those from low on.
    """
    least = pair * 0
    if STARTS:
        least = tl.maximum(tl.load(start_ptr + pair // heads, mask=known, other=0), 0)
    low = least
    if WINDOW:
        low = tl.maximum(low, S - T - window + 1)
    if HORIZON:
        low = tl.maximum(low, tl.load(first_ptr + pair, mask=known, other=0))
    sinks_end, sink_blocks = least, pair * 0
    if SINK:
        sinks_end = tl.minimum(least + sink, low)
        sink_blocks = tl.maximum(tl.minimum(tl.cdiv(sinks_end, BN), low // BN) - least // BN, 0)
    return least, sinks_end, low, sink_blocks, sink_blocks + tl.maximum(tl.cdiv(S, BN) - low // BN, 1)


@triton.jit(do_not_specialize=["S", "slots", "pairs", "window", "sink"])
def split_kernel(
    q_ptr, k_ptr, v_ptr, c_hi_ptr, c_lo_ptr, start_ptr, first_ptr, length_ptr, part_ptr, part_lse_ptr, begin_ptr,
    sq_b, sq_t, sq_h, sk_b, sk_s, sk_h, sv_b, sv_s, sv_h, sc_b, sc_h,
    T, S, H, pairs, slots, window, sink, scale2, softcap2, inverse_cap, horizon2,
    GROUP: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr,
    STARTS: tl.constexpr, WINDOW: tl.constexpr, SINK: tl.constexpr, CAP: tl.constexpr,
    HORIZON: tl.constexpr, PAIRS: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    heads = H // GROUP
    if length_ptr is not None:
        S = tl.load(length_ptr) + T
    split, splits, kv = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    out = kv.to(tl.int64) * splits + split
    SEARCHED: tl.constexpr = first_ptr is not None
    BOUNDED: tl.constexpr = STARTS or WINDOW or SEARCHED
    if PAIRS > 0:  # stretches of one length, shared out over all pairs
        pair = tl.arange(0, PAIRS)
        some = pair < pairs
        _a, _b, _c, _d, blocks = walk(
            pair, some, S, T, heads, window, sink, start_ptr, first_ptr, BN, STARTS, WINDOW, SINK, SEARCHED
        )
        blocks = tl.where(some, blocks, 0)
        chunk = tl.maximum(tl.cdiv(tl.sum(blocks, 0), slots), 1)
        programs = tl.cdiv(blocks, chunk)
        ends = tl.cumsum(programs, 0)
        kv = tl.sum((ends <= split).to(tl.int32), 0)
        if split == 0:
            tl.store(begin_ptr + pair, ends - programs, mask=some)
            tl.store(begin_ptr + pairs, tl.sum(programs, 0))
        if kv >= pairs:
            return
        out = split.to(tl.int64)
        split -= tl.sum(tl.where(pair == kv, ends - programs, 0), 0)
    least, sinks_end, low, sink_blocks, blocks = walk(
        kv, True, S, T, heads, window, sink, start_ptr, first_ptr, BN, STARTS, WINDOW, SINK, SEARCHED
    )
    if PAIRS == 0:
        chunk = tl.cdiv(blocks, splits)
    begin = split * chunk
    b, h_kv = (kv // heads).to(tl.int64), (kv % heads).to(tl.int64)
    rows, offs_n = tl.arange(0, ROWS), tl.arange(0, BN)
    offs_d0 = tl.arange(0, D0)
    offs_d1 = D0 + tl.arange(0, D1 if D1 > 0 else D0)
    real = rows < T * GROUP
    t, h = tl.minimum(rows // GROUP, T - 1), h_kv * GROUP + rows % GROUP
    pos = S - T + t

    q_rows = q_ptr + b * sq_b + t * sq_t + h * sq_h
    q0 = tl.load(q_rows[:, None] + offs_d0[None, :], mask=real[:, None], other=0.0)
    q1 = q0
    acc0 = tl.zeros([ROWS, D0], tl.float32)
    acc1 = acc0
    if D1 > 0:
        q1 = tl.load(q_rows[:, None] + offs_d1[None, :], mask=real[:, None], other=0.0)
        acc1 = tl.zeros([ROWS, D1], tl.float32)
    c_rows = b * sc_b + h * sc_h
    c_i_hi, c_i_lo = tl.load(c_hi_ptr + c_rows + pos), tl.load(c_lo_ptr + c_rows + pos)
    k_ptr += b * sk_b + h_kv * sk_h
    v_ptr += b * sv_b + h_kv * sv_h

    limit = tl.cdiv(S, ALIGNED) * ALIGNED
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)

    for it in range(begin, tl.minimum(begin + chunk, blocks)):
        block = low // BN + it - sink_blocks
        if SINK:
            block = tl.where(it < sink_blocks, least // BN + it, block)
        n0 = block * BN
        j = n0 + offs_n
        inside = j < S
        if BOUNDED:
            live = j >= low
            if SINK:
                live = live | ((j >= least) & (j < sinks_end))
            inside = inside & live
        k_rows = k_ptr + n0.to(tl.int64) * sk_s + offs_n[:, None] * sk_s
        v_rows = v_ptr + n0.to(tl.int64) * sv_s + offs_n[:, None] * sv_s
        k0 = tl.load(k_rows + offs_d0[None, :], mask=inside[:, None], other=0.0)
        v0 = tl.load(v_rows + offs_d0[None, :], mask=inside[:, None], other=0.0)
        s = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
        if D1 > 0:
            k1 = tl.load(k_rows + offs_d1[None, :], mask=inside[:, None], other=0.0)
            v1 = tl.load(v_rows + offs_d1[None, :], mask=inside[:, None], other=0.0)
            s = tl.dot(q1, tl.trans(k1), s, input_precision=PRECISION)
        if CAP:
            s, _t = soft_capped(s * scale2, softcap2, inverse_cap, CAP == 2)
        else:
            s = s * scale2
        gates = c_rows[:, None] + j[None, :]
        known = real[:, None] & (j < limit)[None, :]
        bias = c_i_hi[:, None] - tl.load(c_hi_ptr + gates, mask=known, other=0.0)
        bias += c_i_lo[:, None] - tl.load(c_lo_ptr + gates, mask=known, other=0.0)
        if SINK:
            bias = tl.where((j < least + sink)[None, :], 0.0, bias)
        lower = pos[:, None] - window + 1
        seen = visible(pos[:, None], j[None, :], least, lower, S, sink, STARTS, WINDOW)
        if HORIZON:  # a sink's bias is 0; NaN is to be seen
            seen = seen & ((bias <= 0.0 - horizon2) == 0)
        s = tl.where(seen, s + bias, float("-inf"))
        top = tl.maximum(m, tl.max(s, 1))
        base = tl.where(top == float("-inf"), 0.0, top)
        p = tl.exp2(s - base[:, None])
        alpha = tl.exp2(m - base)
        l = l * alpha + tl.sum(p, 1)
        acc0 = tl.dot(p.to(v0.dtype), v0, acc0 * alpha[:, None], input_precision=PRECISION)
        if D1 > 0:
            acc1 = tl.dot(p.to(v1.dtype), v1, acc1 * alpha[:, None], input_precision=PRECISION)
        m = top

    empty = l == 0  # NaN isn't
    l_safe = tl.where(empty, 1.0, l)
    out = out * T * GROUP + rows
    tl.store(part_lse_ptr + out, tl.where(empty, float("-inf"), m + tl.log2(l_safe)), mask=real)
    part = part_ptr + out[:, None] * (D0 + D1)
    tl.store(part + offs_d0[None, :], acc0 / l_safe[:, None], mask=real[:, None])
    if D1 > 0:
        tl.store(part + offs_d1[None, :], acc1 / l_safe[:, None], mask=real[:, None])


@triton.jit(do_not_specialize=["S", "splits"])
def merge_kernel(
    part_ptr, part_lse_ptr, o_ptr, lse_ptr, begin_ptr, c_hi_ptr, c_lo_ptr, first_ptr, length_ptr,
    sc_b, sc_h, T, S, H, splits, horizon2,
    GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PARTS: tl.constexpr, SEARCHED: tl.constexpr,
):  # fmt: skip
    row, kv = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows, heads = T * GROUP, H // GROUP
    if SEARCHED > 0 and row == rows:  # the last row of programs looks where the next step may begin
        if length_ptr is not None:
            S = tl.load(length_ptr) + T
        advance(first_ptr, kv, S - T, H, c_hi_ptr, c_lo_ptr, sc_b, sc_h, horizon2, GROUP, SEARCHED)
        return
    out = kv * splits
    if begin_ptr is not None:
        out = tl.load(begin_ptr + kv).to(tl.int64)
        splits = tl.load(begin_ptr + kv + 1) - out.to(tl.int32)
    offs_d, offs_p = tl.arange(0, DP), tl.arange(0, PARTS)
    part_lse_ptr += out * rows + row
    part_ptr += (out * rows + row) * D
    top, total = float("-inf"), 0.0
    o = tl.zeros([DP], tl.float32)
    for s0 in range(0, splits, PARTS):  # all at once, 256 parts of D = 256 would not fit the registers
        s = s0 + offs_p
        mask = (s < splits)[:, None] & (offs_d < D)[None, :]  # parts that weigh nothing too: no load waits for another
        lse = tl.load(part_lse_ptr + s * rows, mask=s < splits, other=float("-inf"))
        part = tl.load(part_ptr + (s * rows)[:, None] * D + offs_d[None, :], mask=mask, other=0.0)
        new = tl.maximum(top, tl.max(lse, 0))
        base = tl.where(new == float("-inf"), 0.0, new)
        weight, old = tl.exp2(lse - base), tl.exp2(top - base)
        total = total * old + tl.sum(weight, 0)
        o = o * old + tl.sum(tl.where((weight != 0)[:, None], part * weight[:, None], 0.0), 0)
        top = new
    base = tl.where(top == float("-inf"), 0.0, top)
    safe = tl.where(total == 0, 1.0, total)
    o = o / safe
    b, t = kv // heads, row // GROUP
    h = (kv % heads) * GROUP + row % GROUP
    tl.store(o_ptr + ((b * T + t) * H + h) * D + offs_d, o.to(o_ptr.dtype.element_ty), mask=offs_d < D)
    tl.store(lse_ptr + (b * H + h) * T + t, tl.where(total == 0, float("-inf"), base + tl.log2(safe)))
