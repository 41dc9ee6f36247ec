"""Forgetting Attention backward in Gluon for Hopper: dq, dk, dv and the gate's gradient in one kernel.

One program owns 128 keys: two consumer warpgroups of 64 keys each hold dk and dv in registers and walk the query tiles
that see them (every query head of a GQA group in turn), in the transposed form S^T = K Q^T. They exchange dS through
shared memory, each computes half of dq's columns over all 128 keys, and a writer partition adds them to a float32 dq by
TMA: in key order behind a ticket per query tile (deterministic; programs ascend in keys and walk the queries downward,
so a program trails its predecessor by one tile), or as they come. Row and column sums of the same rounded dS, which
the gate needs, come out of the tensor cores too: dS times ones (zeros where a key is a sink).
"""

# Gluon is a language of its own in Python's clothes: what its names mean inside a kernel their annotations don't say.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportOptionalMemberAccess=false

import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper_forward_kernel import difference

EXCHANGE_BARRIER = gl.constexpr(8)  # Gluon itself numbers its barriers from 0: one per partition and one to switch
LOG2E = gl.constexpr(1.4426950408889634)
BM = gl.constexpr(64)  # query rows per step
BN = gl.constexpr(128)  # keys per program, 64 per consumer warpgroup
# barriers
KV_FULL, DQ_FULL, DQ_EMPTY = gl.constexpr(0), gl.constexpr(2), gl.constexpr(3)
HEAD_FULL, HEAD_EMPTY, Q_FULL = gl.constexpr(4), gl.constexpr(5), gl.constexpr(6)
# 64-vectors after the stages' four (c_i - lse_i and its remainder, delta, -lse): one of each per consumer warpgroup
V_SUM, V_KEY, V_KEY_LO, V_LIVE = gl.constexpr(0), gl.constexpr(2), gl.constexpr(4), gl.constexpr(6)


@builtin
def _tma_reduce_add(descriptor, coordinates, source, _semantic=None):
    # libtriton 3.6 has the builder; its Python wrapper came later
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, source.handle
    )


@triton.jit(do_not_specialize=["T", "rows"])
def prepare_kernel(
    o_ptr, do_ptr, dlse2_ptr, delta_ptr, dq_ptr, row_sum_ptr, ticket_ptr, so_b, so_t, so_h, sd_b, sd_t, sd_h, sl_b,
    sl_h, sl_t,
    T, H, rows, D: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """delta_i = do_i . o_i, less the gradient of lse_i; zeros for the sums of dq and of dS's rows, and the tickets."""
    tiles = rows // BM
    bh = (tl.program_id(0) // tiles).to(tl.int64)
    b, h = bh // H, bh % H
    offs_m = (tl.program_id(0) % tiles) * BM + tl.arange(0, BM)
    offs_d = tl.arange(0, D)
    inside = offs_m < T
    row = offs_m.to(tl.int64)[:, None]
    o = tl.load(o_ptr + b * so_b + h * so_h + row * so_t + offs_d[None, :], mask=inside[:, None], other=0.0)
    do = tl.load(do_ptr + b * sd_b + h * sd_h + row * sd_t + offs_d[None, :], mask=inside[:, None], other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if dlse2_ptr is not None:
        dlse2 = tl.load(dlse2_ptr + b * sl_b + h * sl_h + offs_m.to(tl.int64) * sl_t, mask=inside, other=0.0)
        delta -= dlse2.to(tl.float32) * 1.4426950408889634
    tl.store(delta_ptr + bh * rows + offs_m, delta)
    tl.store(row_sum_ptr + bh * rows + offs_m, tl.zeros([BM], tl.float32))
    tl.store(dq_ptr + (bh * rows + row) * D + offs_d[None, :], tl.zeros([BM, D], tl.float32))
    tl.store(ticket_ptr + tl.program_id(0), 0)


@triton.jit(do_not_specialize=["T", "S", "rows"])
def finish_kernel(
    sum_ptr, dq_ptr, row_sum_ptr, dc_ptr, sq_b, sq_t, sq_h, scale, T, S, H, rows, D: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """dq = scale * its float32 sums, rounded; dc_i += dS's row sum."""
    tiles = rows // BM
    bh = (tl.program_id(0) // tiles).to(tl.int64)
    b, h = bh // H, bh % H
    offs_m = (tl.program_id(0) % tiles) * BM + tl.arange(0, BM)
    offs_d = tl.arange(0, D)
    inside = offs_m < T
    row = offs_m.to(tl.int64)[:, None]
    dq = tl.load(sum_ptr + (bh * rows + row) * D + offs_d[None, :]) * scale
    tl.store(
        dq_ptr + b * sq_b + h * sq_h + row * sq_t + offs_d[None, :],
        dq.to(dq_ptr.dtype.element_ty),
        mask=inside[:, None],
    )
    dc = dc_ptr + bh * S + (S - T) + offs_m
    tl.store(dc, tl.load(dc, mask=inside, other=0.0) + tl.load(row_sum_ptr + bh * rows + offs_m), mask=inside)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit(do_not_specialize=["T", "S", "tiles", "num_n"])
def query_ranges_kernel(
    first_ptr, start_ptr, lo_ptr, hi_ptr, T, S, H, tiles, num_n, HAS_START: tl.constexpr, SIZE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """From the first key each query tile keeps: its first key tile, never falling; each key tile's last query tile."""
    bh = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, SIZE)
    real = m < tiles
    first = tl.load(first_ptr + bh * tiles + m, mask=real, other=S)
    if HAS_START:
        first = tl.maximum(first, tl.load(start_ptr + (bh // H) * S + S - T + m * BM, mask=real, other=S))
    lo = tl.associative_scan(first // BN, 0, _smaller, reverse=True)
    tl.store(lo_ptr + bh * tiles + m, lo, mask=real)
    for n in range(num_n):
        tl.store(hi_ptr + bh * num_n + n, tl.sum((real & (lo <= n)).to(tl.int32), 0))


@gluon.jit
def _key_tile(index, num_n, num_bh, group):
    """The index-th program's key tile: groups of heads, in each group ascending keys (the longest walks first)."""
    per_group = group * num_n
    g = index // per_group
    r = index - g * per_group
    width = gl.minimum(group, num_bh - g * group)
    return r // width, g * group + r % width


@gluon.jit
def _query_tiles(n, b, bh, num_n, START, END, TILE_HI, T, S, HAS_START: gl.constexpr, HAS_PRUNE: gl.constexpr,
                 SINK: gl.constexpr):  # fmt: skip
    """Query tiles [lo, hi) that see key tile n, and the rows [clean_lo, clean_hi) that see it whole and no sink."""
    n0 = n * BN
    n_last = gl.minimum(n0 + BN, S) - 1
    shift = S - T
    lo = gl.maximum(n0 - shift, 0) // BM
    end = S
    clean_hi = T + BM
    if HAS_START:
        end = gl.load(END + b * S + n_last)
        clean_hi = gl.load(END + b * S + n0) - shift
    clean_lo = n0 + BN - 1 - shift
    hi = (gl.minimum(end - shift, T) + BM - 1) // BM
    if HAS_PRUNE:
        hi = gl.minimum(hi, gl.load(TILE_HI + bh * num_n + n))
    if SINK > 0:
        # do the first SINK keys of the last document that starts here or before, or an earlier one's, lie in this tile?
        first = 0
        last_start = 0
        if HAS_START:
            first = gl.load(START + b * S + n0)
            last_start = gl.load(START + b * S + n_last)
        if (first + SINK > n0) | (last_start > first):
            clean_hi = 0
        if last_start + SINK > n0:  # a sink's tile is seen by the whole document
            hi = (gl.minimum(end - shift, T) + BM - 1) // BM
    return lo, hi, clean_lo, clean_hi


@gluon.jit
def _producer(k_desc, v_desc, q_desc, do_desc, C_HI, C_LO, LSE, DELTA, START, END, TILE_HI, kv_s, qdo_s, vec_s,
              start_s, info_s,
              bars, n, b, hk, T, T_PAD, S, H, KV_GROUP, num_n, HAS_START: gl.constexpr, HAS_PRUNE: gl.constexpr,
              SINK: gl.constexpr, NB: gl.constexpr):  # fmt: skip
    VEC: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    for w in gl.static_range(2):
        mbarrier.expect(bars.index(KV_FULL + w), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(k_desc, [b, n * BN + w * 64, hk, 0], bars.index(KV_FULL + w), kv_s.index(w))
        tma.async_copy_global_to_shared(v_desc, [b, n * BN + w * 64, hk, 0], bars.index(KV_FULL + w), kv_s.index(2 + w))
    n_last = gl.minimum(n * BN + BN, S) - 1
    it = 0
    for g in range(KV_GROUP):
        h = hk * KV_GROUP + g
        bh = b * H + h
        lo, hi, clean_lo, clean_hi = _query_tiles(
            n, b, bh, num_n, START, END, TILE_HI, T, S, HAS_START, HAS_PRUNE, SINK
        )
        c_hi = C_HI + bh.to(gl.int64) * S
        c_lo = C_LO + bh.to(gl.int64) * S
        lse = LSE + bh.to(gl.int64) * T
        delta = DELTA + bh.to(gl.int64) * T_PAD
        ref_hi = gl.load(c_hi + n_last)
        ref_lo = gl.load(c_lo + n_last)

        # what the consumers need to know of this head: the walk, and each key's decay from the tile's last key
        mbarrier.wait(bars.index(HEAD_EMPTY), (g & 1) ^ 1)
        info_s.index(0).store(gl.full([1], 0, gl.int32, layout=VEC) + lo)
        info_s.index(1).store(gl.full([1], 0, gl.int32, layout=VEC) + hi)
        info_s.index(2).store(gl.full([1], 0, gl.int32, layout=VEC) + clean_lo)
        info_s.index(3).store(gl.full([1], 0, gl.int32, layout=VEC) + clean_hi)
        for w in gl.static_range(2):
            keys = n * BN + w * 64 + gl.arange(0, 64, layout=VEC)
            key_hi = gl.load(c_hi + keys, mask=keys < S, other=0.0)
            key_lo = gl.load(c_lo + keys, mask=keys < S, other=0.0)
            high, low = difference(ref_hi, ref_lo, key_hi, key_lo)
            vec_s.index(4 * NB + V_KEY + w).store(high)
            vec_s.index(4 * NB + V_KEY_LO + w).store(low)
            if SINK > 0:
                sink_end = gl.full([64], SINK, gl.int32, layout=VEC)
                if HAS_START:
                    sink_end += gl.load(START + b * S + keys, mask=keys < S, other=0)
                vec_s.index(4 * NB + V_LIVE + w).store(gl.where(keys < sink_end, 0.0, 1.0))
        mbarrier.arrive(bars.index(HEAD_FULL), count=1)

        for i in range(lo, hi):
            m = hi - 1 - (i - lo)
            s = it % NB
            rows = m * BM + gl.arange(0, BM, layout=VEC)
            inside = rows < T
            row_hi = gl.load(c_hi + S - T + rows, mask=inside, other=0.0)
            row_lo = gl.load(c_lo + S - T + rows, mask=inside, other=0.0)
            row_lse = gl.load(lse + rows, mask=inside, other=-float("inf"))
            row_delta = gl.load(delta + rows)
            if HAS_START:
                start = gl.load(START + b * S + S - T + rows, mask=inside, other=S)
            mbarrier.wait(bars.index(Q_FULL + NB + s), ((it // NB) & 1) ^ 1)
            mbarrier.expect(bars.index(Q_FULL + s), q_desc.block_type.nbytes + do_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(q_desc, [b, m * BM, h, 0], bars.index(Q_FULL + s), qdo_s.index(s))
            tma.async_copy_global_to_shared(do_desc, [b, m * BM, h, 0], bars.index(Q_FULL + s), qdo_s.index(NB + s))
            high, low = difference(row_hi, row_lo, ref_hi, ref_lo)
            empty = row_lse == -float("inf")  # rows beyond T and rows that see nothing: weight 0
            high, low = difference(high, low, gl.where(empty, 0.0, row_lse), gl.zeros_like(low))
            vec_s.index(s).store(gl.where(empty, -float("inf"), high))
            vec_s.index(NB + s).store(low)
            vec_s.index(2 * NB + s).store(row_delta)
            if SINK > 0:
                vec_s.index(3 * NB + s).store(gl.where(empty, -float("inf"), -row_lse))
            if HAS_START:
                start_s.index(s).store(start)
            mbarrier.arrive(bars.index(Q_FULL + s), count=1)
            it += 1


@gluon.jit
def _acquire(pointer):
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [pointer], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _writer(dq_desc, dk_desc, dv_desc, DC, ROW_SUM, TICKET, START, END, TILE_HI, TILE_LO, kv_s, dq_s, vec_s, bars, n,
            b, hk, T,
            T_PAD, S, H, KV_GROUP, num_n, HAS_START: gl.constexpr, HAS_PRUNE: gl.constexpr, SINK: gl.constexpr,
            NB: gl.constexpr, HD: gl.constexpr, DETERMINISTIC: gl.constexpr):  # fmt: skip
    VEC: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    num_m = T_PAD // BM
    it = 0
    for g in range(KV_GROUP):
        bh = b * H + hk * KV_GROUP + g
        lo, hi, _clean_lo, _clean_hi = _query_tiles(
            n, b, bh, num_n, START, END, TILE_HI, T, S, HAS_START, HAS_PRUNE, SINK
        )
        now = -1 + 0 * n
        for i in range(lo, hi):
            m = hi - 1 - (i - lo)
            turn = n  # how many key tiles add to query tile m before this one
            if DETERMINISTIC and (HAS_START or HAS_PRUNE):
                first = 0
                if HAS_START:
                    first = gl.load(START + b * S + S - T + m * BM) // BN
                if HAS_PRUNE:
                    sink_tile = first
                    first = gl.load(TILE_LO + bh * num_m + m)
                    if SINK > 0:  # the sink's tiles come before the interval's
                        sink_end = SINK - 1
                        if HAS_START:
                            sink_end += gl.load(START + b * S + S - T + m * BM)
                        extra = gl.maximum(gl.minimum(sink_end // BN + 1, first) - sink_tile, 0)
                        first = gl.where(n < first, sink_tile, first - extra)
                turn = n - first
            rows = bh * T_PAD + m * BM
            ticket = TICKET + bh * num_m + m
            if DETERMINISTIC:  # before the wait for dq: as a rule the turn has come by then
                while now < turn:
                    now = _acquire(ticket)
            mbarrier.wait(bars.index(DQ_FULL), it & 1)
            sums = vec_s.index(4 * NB + V_SUM).load(VEC) + vec_s.index(4 * NB + V_SUM + 1).load(VEC)
            gl.atomic_add(ROW_SUM + rows + gl.arange(0, BM, layout=VEC), sums, sem="relaxed")
            for w in gl.static_range(2):
                _tma_reduce_add(dq_desc, [rows, w * HD], dq_s.index(w))
            tma.store_wait(0)
            mbarrier.arrive(bars.index(DQ_EMPTY), count=1)
            if DETERMINISTIC:
                now = _acquire(
                    TICKET + bh * num_m + gl.maximum(m - 1, lo)
                )  # the next tile's, while this one's sums land
                gl.inline_asm_elementwise(
                    "cp.async.bulk.wait_group 0; mov.b32 $0, 0;", "=r,r", [turn], dtype=gl.int32, is_pure=False, pack=1
                )
                gl.thread_barrier()
                gl.atomic_add(ticket, 1, sem="release", scope="gpu")
            it += 1
        # column sums of this head
        mbarrier.wait(bars.index(DQ_FULL), it & 1)
        for w in gl.static_range(2):
            keys = n * BN + w * 64 + gl.arange(0, 64, layout=VEC)
            column = vec_s.index(4 * NB + V_SUM + w).load(VEC)
            if SINK > 0:
                column = gl.where(vec_s.index(4 * NB + V_LIVE + w).load(VEC) > 0, column, 0.0)
            gl.store(DC + bh.to(gl.int64) * S + keys, -column, mask=keys < S)
        mbarrier.arrive(bars.index(DQ_EMPTY), count=1)
        it += 1
    mbarrier.wait(bars.index(DQ_FULL), it & 1)
    for w in gl.static_range(2):
        tma.async_copy_shared_to_global(dk_desc, [b, n * BN + w * 64, hk, 0], kv_s.index(w))
        tma.async_copy_shared_to_global(dv_desc, [b, n * BN + w * 64, hk, 0], kv_s.index(2 + w))
    tma.store_wait(0)


@gluon.jit
def _scalar(info):
    return gl.max(info.load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _consumer(w: gl.constexpr, kv_s, qdo_s, ds_s, dq_s, ones_s, vec_s, start_s, info_s, bars, n, shift, KV_GROUP,
              sm_scale,
              HAS_START: gl.constexpr, SINK: gl.constexpr, D: gl.constexpr, NB: gl.constexpr):  # fmt: skip
    HD: gl.constexpr = D // 2
    S_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    Q_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HD, 16])
    C_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 8, 16])
    P_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_L, k_width=2)
    PC_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=C_L, k_width=2)
    KEY: gl.constexpr = gl.SliceLayout(1, S_L)
    QUERY: gl.constexpr = gl.SliceLayout(0, S_L)
    ONE: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    dtype: gl.constexpr = qdo_s.dtype
    keys = n * BN + w * 64 + gl.arange(0, 64, layout=KEY)

    dk = gl.zeros([64, D], gl.float32, layout=O_L)
    dv = gl.zeros([64, D], gl.float32, layout=O_L)
    zero = gl.zeros([64, BM], gl.float32, layout=S_L)
    zero_q = gl.zeros([BM, HD], gl.float32, layout=Q_L)
    zero_r = gl.zeros([BM, 8], gl.float32, layout=C_L)
    ones_s.index(w).store(gl.full([8, BM], 1.0, dtype, layout=ONE))
    mbarrier.wait(bars.index(KV_FULL), 0)
    mbarrier.wait(bars.index(KV_FULL + 1), 0)
    it = 0
    messages = 0
    for g in range(KV_GROUP):
        mbarrier.wait(bars.index(HEAD_FULL), g & 1)
        lo = _scalar(info_s.index(0))
        hi = _scalar(info_s.index(1))
        clean_lo = _scalar(info_s.index(2))
        clean_hi = _scalar(info_s.index(3))
        decay = vec_s.index(4 * NB + V_KEY + w).load(KEY)
        decay_lo = vec_s.index(4 * NB + V_KEY_LO + w).load(KEY)
        # the row sums of dS leave the sink's keys out: ones where a key decays
        live = gl.full([8, 64], 1.0, dtype, layout=ONE)
        if SINK > 0:
            key_live = vec_s.index(4 * NB + V_LIVE + w).load(KEY)
            live = live * vec_s.index(4 * NB + V_LIVE + w).load(gl.SliceLayout(0, ONE)).to(dtype)[None, :]
        ones_s.index(2 + w).store(live)
        fence_async_shared()
        mbarrier.arrive(bars.index(HEAD_EMPTY), count=1)
        dc = gl.zeros([64, 8], gl.float32, layout=C_L)
        for i in range(lo, hi):
            m = hi - 1 - (i - lo)
            # an opaque zero keeps two dozen invariant matrix descriptors from being hoisted into registers: 200 spills
            z = gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r,r", [m], dtype=gl.int32, is_pure=False, pack=1)
            s = it % NB + z
            mbarrier.wait(bars.index(Q_FULL + s), (it // NB) & 1)
            k = kv_s.index(w + z).reshape([64, D])
            v = kv_s.index(2 + w + z).reshape([64, D])
            q = qdo_s.index(s).reshape([BM, D])
            do = qdo_s.index(NB + s).reshape([BM, D])
            st = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
            dpt = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
            st = warpgroup_mma_wait(1, deps=(st,))
            if (m * BM < clean_lo) | (m * BM + BM > clean_hi):
                r = vec_s.index(s).load(QUERY)
                r_lo = vec_s.index(NB + s).load(QUERY)
                total = (decay[:, None] + r[None, :]) + (decay_lo[:, None] + r_lo[None, :])
                rows = m * BM + shift + gl.arange(0, BM, layout=QUERY)
                seen = keys[:, None] <= rows[None, :]
                if HAS_START:
                    seen = seen & (keys[:, None] >= start_s.index(s).load(QUERY)[None, :])
                if SINK > 0:
                    total = gl.where(key_live[:, None] > 0, total, vec_s.index(3 * NB + s).load(QUERY)[None, :])
                pt = gl.exp2(gl.where(seen, st * (sm_scale * LOG2E) + total, -float("inf")))
            else:
                r = vec_s.index(s).load(QUERY)
                pt = gl.exp2(st * (sm_scale * LOG2E) + (decay[:, None] + r[None, :]))
            dv = warpgroup_mma(gl.convert_layout(pt.to(dtype), P_L), do, dv, is_async=True)
            dpt = warpgroup_mma_wait(1, deps=(dpt,))
            delta = vec_s.index(2 * NB + s).load(QUERY)
            dst = (pt * (dpt - delta[None, :])).to(dtype)
            ds_s.index((it & 1) * 2 + w + z).store(dst)
            fence_async_shared()
            turn = gl.to_tensor(EXCHANGE_BARRIER)
            gl.inline_asm_elementwise(
                "bar.sync $1, 256; mov.u32 $0, 0;", "=r,r", [turn], dtype=gl.int32, is_pure=False, pack=1
            )
            dq = zero_q
            for u in gl.static_range(2):
                half = kv_s.index(u + z).reshape([64, D]).slice(w * HD, HD, dim=1)
                dq = warpgroup_mma(
                    ds_s.index((it & 1) * 2 + u + z).permute((1, 0)), half, dq, use_acc=u > 0, is_async=True
                )
            mine = ds_s.index((it & 1) * 2 + w + z)
            rs = warpgroup_mma(
                mine.permute((1, 0)), ones_s.index(2 + w + z).permute((1, 0)), zero_r, use_acc=False, is_async=True
            )
            dc = warpgroup_mma(gl.convert_layout(dst, PC_L), ones_s.index(w + z).permute((1, 0)), dc, is_async=True)
            dk = warpgroup_mma(gl.convert_layout(dst, P_L), q, dk, is_async=True)
            dv, dq, rs, dc = warpgroup_mma_wait(1, deps=(dv, dq, rs, dc))
            mbarrier.wait(bars.index(DQ_EMPTY), (messages & 1) ^ 1)
            dq_s.index(w + z).store(dq)
            vec_s.index(4 * NB + V_SUM + w + z).store(gl.max(rs, 1))
            fence_async_shared()
            mbarrier.arrive(bars.index(DQ_FULL), count=1)
            dk = warpgroup_mma_wait(0, deps=(dk,))
            mbarrier.arrive(bars.index(Q_FULL + NB + s), count=1)
            it += 1
            messages += 1
        mbarrier.wait(bars.index(DQ_EMPTY), (messages & 1) ^ 1)
        vec_s.index(4 * NB + V_SUM + w).store(gl.max(dc, 1))
        mbarrier.arrive(bars.index(DQ_FULL), count=1)
        messages += 1
    # k and v are read by both warpgroups until the last dq
    turn = gl.to_tensor(EXCHANGE_BARRIER)
    gl.inline_asm_elementwise("bar.sync $1, 256; mov.u32 $0, 0;", "=r,r", [turn], dtype=gl.int32, is_pure=False, pack=1)
    kv_s.index(w).reshape([64, D]).store((dk * sm_scale).to(dtype))
    kv_s.index(2 + w).reshape([64, D]).store(dv.to(dtype))
    fence_async_shared()
    mbarrier.wait(bars.index(DQ_EMPTY), (messages & 1) ^ 1)
    mbarrier.arrive(bars.index(DQ_FULL), count=1)


@gluon.jit(do_not_specialize=["T", "T_PAD", "S", "H", "KV_GROUP", "num_n", "num_bh", "group"])
def fox_backward(q_desc, k_desc, v_desc, do_desc, dq_desc, dk_desc, dv_desc, C_HI, C_LO, LSE, DELTA, DC, ROW_SUM,
                 TICKET, START,
                 END, TILE_HI, TILE_LO, sm_scale, T, T_PAD, S, H, KV_GROUP, num_n, num_bh, group,
                 HAS_START: gl.constexpr,
                 HAS_PRUNE: gl.constexpr, SINK: gl.constexpr, D: gl.constexpr, NB: gl.constexpr,
                 DETERMINISTIC: gl.constexpr,
                 REGISTERS: gl.constexpr):  # fmt: skip
    """dk, dv of 128 keys, their share of a float32 dq, and both sums of dS."""
    dtype: gl.constexpr = q_desc.dtype
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], dtype)
    ONES: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, 64], dtype)
    n, bhk = _key_tile(gl.program_id(0), num_n, num_bh, group)
    b = bhk // (H // KV_GROUP)
    hk = bhk - b * (H // KV_GROUP)
    # few allocations: each costs every partition a register
    kv_s = gl.allocate_shared_memory(dtype, [4, 1, 64, 1, D], k_desc.layout)  # k of both warpgroups, v of both
    qdo_s = gl.allocate_shared_memory(dtype, [2 * NB, 1, BM, 1, D], q_desc.layout)  # q of each stage, do of each
    ds_s = gl.allocate_shared_memory(dtype, [4, 64, BM], SQUARE)  # two generations of both warpgroups'
    dq_s = gl.allocate_shared_memory(gl.float32, [2, BM, D // 2], dq_desc.layout)
    ones_s = gl.allocate_shared_memory(dtype, [4, 8, 64], ONES)
    vec_s = gl.allocate_shared_memory(gl.float32, [4 * NB + V_LIVE + 2, 64], VECTOR)
    start_s = gl.allocate_shared_memory(gl.int32, [NB, BM], VECTOR)
    info_s = gl.allocate_shared_memory(gl.int32, [4, 1], VECTOR)
    bars = gl.allocate_shared_memory(gl.int64, [Q_FULL + 2 * NB, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bars.index(KV_FULL), count=1)
    mbarrier.init(bars.index(KV_FULL + 1), count=1)
    mbarrier.init(bars.index(DQ_FULL), count=2)
    mbarrier.init(bars.index(DQ_EMPTY), count=1)
    mbarrier.init(bars.index(HEAD_FULL), count=1)
    mbarrier.init(bars.index(HEAD_EMPTY), count=2)
    for i in gl.static_range(NB):
        mbarrier.init(bars.index(Q_FULL + i), count=2)  # the TMA copies and the row vectors
        mbarrier.init(bars.index(Q_FULL + NB + i), count=2)  # q_empty
    gl.warp_specialize([
        (_consumer, (0, kv_s, qdo_s, ds_s, dq_s, ones_s, vec_s, start_s, info_s, bars, n, S - T, KV_GROUP, sm_scale,
                     HAS_START,
                     SINK, D, NB)),
        (_consumer, (1, kv_s, qdo_s, ds_s, dq_s, ones_s, vec_s, start_s, info_s, bars, n, S - T, KV_GROUP, sm_scale,
                     HAS_START,
                     SINK, D, NB)),
        (_producer, (k_desc, v_desc, q_desc, do_desc, C_HI, C_LO, LSE, DELTA, START, END, TILE_HI, kv_s, qdo_s, vec_s,
                     start_s,
                     info_s, bars, n, b, hk, T, T_PAD, S, H, KV_GROUP, num_n, HAS_START, HAS_PRUNE, SINK, NB)),
        (_writer, (dq_desc, dk_desc, dv_desc, DC, ROW_SUM, TICKET, START, END, TILE_HI, TILE_LO, kv_s, dq_s, vec_s,
                   bars, n, b,
                   hk, T, T_PAD, S, H, KV_GROUP, num_n, HAS_START, HAS_PRUNE, SINK, NB, D // 2, DETERMINISTIC)),
    ], [4, 2, 2], [REGISTERS, 32, 32])  # fmt: skip
