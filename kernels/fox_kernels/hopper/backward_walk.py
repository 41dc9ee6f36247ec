"""A consumer warpgroup's steps in the Hopper backward: dk and dv of its 64 keys, its share of dq, sums of dS."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..common.blocks import LOG2E
from .backward_shared import DQ_EMPTY, DQ_FULL, Q_FULL, scalar
from .backward_sums import by_thread, pairs_of_keys, sums_over_keys, sums_over_queries

# Gluon itself numbers its barriers from 0: one per partition and one to switch. BEHIND: for even and for odd steps;
# STORED, READ: for each warpgroup's dS and, of two generations, each
BEHIND, MEET, STORED, READ = gl.constexpr(5), gl.constexpr(7), gl.constexpr(8), gl.constexpr(12)
NO_BIAS, DELTA_ONLY = gl.constexpr(4), gl.constexpr(5)  # blocks of kb_s behind those of two slots and warpgroups


@gluon.jit
def tell(barrier):
    """Tell the other consumer warpgroup, which will listen, that this one has come here."""
    barrier = gl.to_tensor(barrier)
    gl.inline_asm_elementwise(
        "bar.arrive $1, 256; mov.u32 $0, 0;", "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def listen(barrier):
    """Wait until the other consumer warpgroup has told of this barrier, or has come to wait for it as well."""
    barrier = gl.to_tensor(barrier)
    gl.inline_asm_elementwise(
        "bar.sync $1, 256; mov.u32 $0, 0;", "=r,r", [barrier], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _over_channels(a, b, zero, D: gl.constexpr, DH: gl.constexpr):
    """Begin a b^T over the head dim's DH columns; those behind it are zeros."""
    if DH == D:
        return warpgroup_mma(a, b.permute((1, 0)), zero, use_acc=False, is_async=True)
    else:
        first, second = b.slice(0, 64, dim=1), b.slice(64, DH - 64, dim=1)
        out = warpgroup_mma(a.slice(0, 64, dim=1), first.permute((1, 0)), zero, use_acc=False, is_async=True)
        return warpgroup_mma(a.slice(64, DH - 64, dim=1), second.permute((1, 0)), out, is_async=True)


@gluon.jit
def _share_of_dq(w: gl.constexpr, ds_s, kv_s, place, kv, zero_q, D: gl.constexpr, BM: gl.constexpr):
    """Begin dq over all 128 keys, with 64 queries half of its columns, with 128 half of its rows.

    With 128 queries the other warpgroup's dS is waited for, while the products with this one's run.
    """
    QC: gl.constexpr = D if BM == 128 else D // 2
    dq = zero_q
    for i in gl.static_range(2):
        if BM == 128 and i == 1:
            listen(MEET)
        part = ds_s.index(place + ((w + i) % 2 if BM == 128 else i))
        half = kv_s.index(kv + ((w + i) % 2 if BM == 128 else i)).reshape([64, D])
        if BM == 64:
            half = half.slice(w * QC, QC, dim=1)
        else:
            part = part.slice(w * 64, 64, dim=1)
        dq = warpgroup_mma(part.permute((1, 0)), half, dq, use_acc=i > 0, is_async=True)
    return dq


@gluon.jit
def hand_over(dq, dq_s, bars, place, phase):
    """Leave dq to the writer as soon as it is done with the one before."""
    mbarrier.wait(bars.index(DQ_EMPTY), phase)
    dq_s.index(place).store(by_thread(dq))
    fence_async_shared()
    mbarrier.arrive(bars.index(DQ_FULL), count=1)


@gluon.jit
def weights(st, step, keys, decay_s, decay_lo_s, row_s, row_lo_s, sink_row_s, live_s, start_s, shift, sm_scale,
             HAS_START: gl.constexpr, SINK: gl.constexpr, BM: gl.constexpr, BIAS_BY_MMA: gl.constexpr,
             S_L: gl.constexpr):  # fmt: skip
    """P^T from the scores of a step: its decays as one float each where every row sees every key, else as two."""
    KEY: gl.constexpr = gl.SliceLayout(1, S_L)
    QUERY: gl.constexpr = gl.SliceLayout(0, S_L)
    if step & 1:
        total = decay_s.load(KEY)[:, None] + row_s.load(QUERY)[None, :]
        total = total + (decay_lo_s.load(KEY)[:, None] + row_lo_s.load(QUERY)[None, :])
        rows = (step >> 5) * BM + shift + gl.arange(0, BM, layout=QUERY)
        seen = keys[:, None] <= rows[None, :]
        if HAS_START:
            seen = seen & (keys[:, None] >= start_s.load(QUERY)[None, :])
        if SINK > 0:
            total = gl.where(live_s.load(KEY)[:, None] > 0, total, sink_row_s.load(QUERY)[None, :])
        pt = gl.exp2(gl.where(seen, st * (sm_scale * LOG2E) + total, -float("inf")))
    else:
        pt = st * (sm_scale * LOG2E)
        if not BIAS_BY_MMA:
            pt += decay_s.load(KEY)[:, None] + row_s.load(QUERY)[None, :]
        pt = gl.exp2(pt)
    return pt


@gluon.jit
def walk(w: gl.constexpr, steps, it, n, kv, slot, dk, dv, sums, smem, bars, shift, sm_scale, CUT: gl.constexpr):
    """Walk a chunk of heads: dk, dv and dS's sums over queries with these steps added, and the number of steps."""
    HAS_START: gl.constexpr = CUT.HAS_START
    SINK: gl.constexpr = CUT.SINK
    D: gl.constexpr = CUT.D
    BM: gl.constexpr = CUT.BM
    NB: gl.constexpr = CUT.NB
    HEADS: gl.constexpr = CUT.HEADS
    GENERATIONS: gl.constexpr = CUT.GENERATIONS
    BIAS_BY_MMA: gl.constexpr = CUT.BIAS_BY_MMA
    QC: gl.constexpr = D if BM == 128 else D // 2
    DEFERRED: gl.constexpr = BM == 64  # with two generations of dS; else _share_of_dq waits
    S_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    Q_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, QC, 16])
    P_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dk.type.layout, k_width=2)
    KEY: gl.constexpr = gl.SliceLayout(1, S_L)
    QUERY: gl.constexpr = gl.SliceLayout(0, S_L)
    dtype: gl.constexpr = smem.qdo.dtype
    zero = gl.zeros([64, BM], gl.float32, layout=S_L)
    zero_q = gl.zeros([64, QC], gl.float32, layout=Q_L)
    for i in range(steps):
        # an opaque zero keeps two dozen invariant matrix descriptors from being hoisted into registers
        z = gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r,r", [it], dtype=gl.int32, is_pure=False, pack=1)
        s = it % NB + z
        mbarrier.wait(bars.index(Q_FULL + s), (it // NB) & 1)
        k = smem.kv.index(kv + w + z).reshape([64, D])
        v = smem.kv.index(kv + 2 + w + z).reshape([64, D])
        q = smem.qdo.index(s).reshape([BM, D])
        do = smem.qdo.index(NB + s).reshape([BM, D])
        if DEFERRED and w == 1:
            listen(BEHIND + it % 2)
        st = _over_channels(k, q, zero, D, CUT.DH)
        step = scalar(smem.step.index(s))
        if BIAS_BY_MMA:  # the gates' and lse's part of the scores; zeros where it is added exactly
            parts = gl.where((step & 1) > 0, NO_BIAS, slot * 2 + w)
            st = warpgroup_mma(smem.kb.index(parts), smem.qb.index(s).permute((1, 0)), st, is_async=True)
        dpt = _over_channels(v, do, zero, D, CUT.DH)
        if BIAS_BY_MMA:  # less delta
            ones = smem.kb.index(DELTA_ONLY + z)
            dpt = warpgroup_mma(ones, smem.qb.index(s).permute((1, 0)), dpt, is_async=True)
        head = z  # the first of the chunk
        if HEADS > 1:
            head += (step >> 1) & 15
        place = ((slot * HEADS + head) * 2 + w) * 2
        st = warpgroup_mma_wait(2 if BIAS_BY_MMA or CUT.DH < D else 1, deps=(st,))
        keys = n * 128 + w * 64 + gl.arange(0, 64, layout=KEY)
        pt = weights(st, step, keys, smem.key.index(place), smem.key.index(place + 1), smem.row.index(s),
                      smem.row.index(NB + s), smem.row.index(3 * NB + s), smem.live.index(slot * 2 + w),
                      smem.start.index(s), shift, sm_scale, HAS_START, SINK, BM, BIAS_BY_MMA, S_L)  # fmt: skip
        dv = warpgroup_mma(gl.convert_layout(pt.to(dtype), P_L), do, dv, is_async=True)
        if DEFERRED and w == 0:  # half a step behind: this one uses the tensor cores while the other does not
            tell(BEHIND + it % 2)
        dpt = warpgroup_mma_wait(1, deps=(dpt,))
        if not BIAS_BY_MMA:
            dpt = dpt - smem.row.index(2 * NB + s).load(QUERY)[None, :]
        exact = pt * dpt
        dst = exact.to(dtype)
        sums += sums_over_queries(exact, head - z, BM, HEADS)
        if SINK > 0:
            exact = gl.where(smem.live.index(slot * 2 + w).load(KEY)[:, None] > 0, exact, 0.0)
        pairs = pairs_of_keys(exact, BM)
        now = it % GENERATIONS
        if DEFERRED:  # of the step before, whose dS the other warpgroup has stored long ago
            if i > 0:
                listen(STORED + 2 * (1 - w) + (now ^ 1))
            dq = _share_of_dq(w, smem.ds, smem.kv, (now ^ 1) * 2 + z, kv + z, zero_q, D, BM)
        else:
            listen(READ + 2 * (1 - w))
            smem.ds.index(w + z).store(dst)
            fence_async_shared()
            dq = _share_of_dq(w, smem.ds, smem.kv, z, kv + z, zero_q, D, BM)
        dk = warpgroup_mma(gl.convert_layout(dst, P_L), q, dk, is_async=True)
        if DEFERRED:
            listen(READ + 2 * (1 - w) + now)
            smem.ds.index(now * 2 + w + z).store(dst)
            fence_async_shared()
            tell(STORED + 2 * w + now)
        # The writer may still read the last step's. ptxas adds up before dS is stored; with 64 queries it is better
        # done while the products run, so it hangs on a read from here
        late = 0 * steps
        if BM == 64:
            late = scalar(smem.step.index(s))
        smem.sum.index(it % (GENERATIONS * 2) * 2 + w + z).store(sums_over_keys(pairs, late, BM))
        dv, dq = warpgroup_mma_wait(1, deps=(dv, dq))
        if not DEFERRED:
            tell(READ + 2 * w)
            hand_over(dq, smem.dq, bars, w + z, (it & 1) ^ 1)
        elif i > 0:
            tell(READ + 2 * w + (now ^ 1))
            hand_over(dq, smem.dq, bars, w + z, it & 1)
        dk = warpgroup_mma_wait(0, deps=(dk,))
        mbarrier.arrive(bars.index(Q_FULL + NB + s), count=1)
        it += 1
    if DEFERRED and steps > 0:  # of the last step
        last = (it + 1) % 2
        listen(STORED + 2 * (1 - w) + last)
        dq = _share_of_dq(w, smem.ds, smem.kv, last * 2, kv, zero_q, D, BM)
        dq = warpgroup_mma_wait(0, deps=(dq,))
        tell(READ + 2 * w + last)
        hand_over(dq, smem.dq, bars, w, it & 1)
    return dk, dv, sums, it
