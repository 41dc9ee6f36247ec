"""The steps of the Hopper backward at head dim 256, where a warpgroup's registers hold dv or dk of 64 keys.

A key tile is 64 keys: the first warpgroup has dv, the second dk. Both compute the scores (a sixth product in place of
an exchange of weights), the second dS as well, of which the first makes dq, 64 columns at a time. do and q take turns
in three slots of shared memory, do first: the next do comes during a step, the next q once this do has been used.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .backward_shared import Q_FULL, scalar
from .backward_sums import pairs_of_keys, sums_over_keys, sums_over_queries
from .backward_walk import READ, STORED, hand_over, listen, tell, weights


@gluon.jit
def _part_of_dq(c: gl.constexpr, ds, k, zero):
    """Begin 64 columns of dq."""
    return warpgroup_mma(ds.permute((1, 0)), k.slice(c * 64, 64, dim=1), zero, use_acc=False, is_async=True)


@gluon.jit
def wide_walk(w: gl.constexpr, steps, it, n, kv, slot, dk, dv, sums, smem, bars, shift, sm_scale, CUT: gl.constexpr):
    """As `walk`; w = 0 adds to dv and hands over dq, w = 1 adds to dk and the sums."""
    D: gl.constexpr = CUT.D
    BM: gl.constexpr = CUT.BM
    NB: gl.constexpr = CUT.NB
    S_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    P_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dk.type.layout, k_width=2)
    KEY: gl.constexpr = gl.SliceLayout(1, S_L)
    QUERY: gl.constexpr = gl.SliceLayout(0, S_L)
    dtype: gl.constexpr = smem.qdo.dtype
    zero = gl.zeros([64, BM], gl.float32, layout=S_L)
    keys = n * 64 + gl.arange(0, 64, layout=KEY)
    for _ in range(steps):
        # an opaque zero keeps invariant matrix descriptors from being hoisted into registers
        z = gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r,r", [it], dtype=gl.int32, is_pure=False, pack=1)
        of_do = 2 * it % NB + z
        s = (2 * it + 1) % NB + z
        k = smem.kv.index(z).reshape([64, D])
        do = smem.qdo.index(of_do).reshape([BM, D])
        q = smem.qdo.index(s).reshape([BM, D])
        now = it & 1
        mbarrier.wait(bars.index(Q_FULL + s), ((2 * it + 1) // NB) & 1)
        st = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
        step = scalar(smem.step.index(s))
        mbarrier.wait(bars.index(Q_FULL + of_do), (2 * it // NB) & 1)
        if w == 1:
            v = smem.kv.index(1 + z).reshape([64, D])
            dpt = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
        head = z  # the first of the chunk
        if CUT.HEADS > 1:
            head += (step >> 1) & 15
        place = (slot * CUT.HEADS + head) * 4
        st = warpgroup_mma_wait(w, deps=(st,))
        pt = weights(st, step, keys, smem.key.index(place), smem.key.index(place + 1), smem.row.index(s),
                     smem.row.index(NB + s), smem.row.index(3 * NB + s), smem.live.index(slot * 2),
                     smem.start.index(s), shift, sm_scale, CUT.HAS_START, CUT.SINK, BM, False, S_L)  # fmt: skip
        if w == 0:
            dv = warpgroup_mma(gl.convert_layout(pt.to(dtype), P_L), do, dv, is_async=True)
            mbarrier.arrive(bars.index(Q_FULL + NB + s), count=1)
            listen(STORED + now)
            ds = smem.ds.index(now + z)
            dq = _part_of_dq(0, ds, k, zero)
            for c in gl.static_range(4):  # in two buffers by turns, the next one's products under way
                after = dq
                if c < 3:
                    after = _part_of_dq(c + 1, ds, k, zero)
                dq, dv = warpgroup_mma_wait(1 if c < 3 else 0, deps=(dq, dv))
                if c == 0:
                    mbarrier.arrive(bars.index(Q_FULL + NB + of_do), count=1)
                hand_over(dq, smem.dq, bars, c % 2, c // 2 ^ 1)
                dq = after
            tell(READ + now)
        else:
            dpt = warpgroup_mma_wait(0, deps=(dpt,))
            mbarrier.arrive(bars.index(Q_FULL + NB + of_do), count=1)
            exact = pt * (dpt - smem.row.index(2 * NB + s).load(QUERY)[None, :])
            dst = exact.to(dtype)
            dk = warpgroup_mma(gl.convert_layout(dst, P_L), q, dk, is_async=True)
            sums += sums_over_queries(exact, head - z, BM, CUT.HEADS)
            if CUT.SINK > 0:
                exact = gl.where(smem.live.index(slot * 2).load(KEY)[:, None] > 0, exact, 0.0)
            # once dS of two steps before has been read, the writer has the sums of four steps before, too
            listen(READ + now)
            smem.ds.index(now + z).store(dst)
            smem.sum.index(it % 4 + z).store(sums_over_keys(pairs_of_keys(exact, BM), 0 * steps, BM))
            fence_async_shared()
            tell(STORED + now)
            dk = warpgroup_mma_wait(0, deps=(dk,))
            mbarrier.arrive(bars.index(Q_FULL + NB + s), count=1)
        it += 1
    return dk, dv, sums, it
