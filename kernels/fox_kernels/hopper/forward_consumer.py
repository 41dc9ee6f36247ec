"""A consumer warpgroup of the Hopper forward: o and lse of its 64 query rows, in turns with the others."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .forward_masked import half_block, masked_block
from .forward_producer import edges_of, key_blocks, origin_of
from .forward_softmax import Rows, lost, row_sums, scores, sees_whole, softmax, times_v, widened
from .gluon_names import thread_barrier, tma_store

PING_PONG_BARRIER = gl.constexpr(8)  # Gluon itself numbers its barriers from 0: one per partition and one to switch


@gluon.jit
def _turn(w, NC: gl.constexpr, ARRIVE: gl.constexpr):
    """Ping-pong: wait for this warpgroup's turn to issue its matrix products, or hand the turn to the next one."""
    if ARRIVE:
        turn = gl.to_tensor(PING_PONG_BARRIER + (w + 1) % NC)
        gl.inline_asm_elementwise(
            "bar.arrive $1, 256; mov.u32 $0, 0;", "=r,r", [turn], dtype=gl.int32, is_pure=False, pack=1
        )
    else:
        turn = gl.to_tensor(PING_PONG_BARRIER + w)
        gl.inline_asm_elementwise(
            "bar.sync $1, 256; mov.u32 $0, 0;", "=r,r", [turn], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def _next(smem, bars, tiles):
    """The next tile as the producer says: whether there is one, its place in the rows, batch and head."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    slot = tiles & 1
    mbarrier.wait(bars.n_full.index(slot), (tiles >> 1) & 1)
    more = gl.max(smem.n.index(slot * 4).load(L), 0)
    m = gl.max(smem.n.index(slot * 4 + 1).load(L), 0)
    b = gl.max(smem.n.index(slot * 4 + 2).load(L), 0)
    h = gl.max(smem.n.index(slot * 4 + 3).load(L), 0)
    mbarrier.arrive(bars.n_empty.index(slot), count=1)
    return more, m, b, h


@gluon.jit
def consumer(w, written, L, starts, smem, bars, scale, T, S, H, CUT: gl.constexpr, QB: gl.constexpr):
    HAS_START: gl.constexpr = CUT.HAS_START
    SINK: gl.constexpr = CUT.SINK
    NC: gl.constexpr = CUT.NC
    BN: gl.constexpr = CUT.BN
    D: gl.constexpr = CUT.D
    DX: gl.constexpr = CUT.DX
    NB: gl.constexpr = CUT.NB
    ACROSS: gl.constexpr = CUT.ACROSS
    o_desc, ox_desc, r_desc, rx_desc = written
    START, ORIGIN = starts
    BM: gl.constexpr = NC * 64
    S_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    X_L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DX if DX else 8, 16]
    )
    P_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_L, k_width=2)
    PX_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=X_L, k_width=2)
    ROW: gl.constexpr = gl.SliceLayout(1, S_L)
    dtype: gl.constexpr = smem.q.dtype
    zero = gl.zeros([64, BN], gl.float32, layout=S_L)
    o_buf = smem.o.index(w).reshape([64, D])
    if DX:
        ox_buf = smem.ox.index(w).reshape([64, DX])
    if w == NC - 1:
        _turn(w, NC, True)
    it = 0
    tiles = 0
    more, m, b, h = _next(smem, bars, 0)
    while more > 0:
        bh = b * H + h
        row0, first_end, nb_hi, n_main, sb_hi, n_all, clean_lo = key_blocks(
            m, b, bh, START, ORIGIN, T, S, HAS_START, SINK, BM, BN
        )
        rows = row0 + w * 64 + gl.arange(0, 64, layout=ROW)
        ends = rows + (S - T)
        start = gl.zeros([64], gl.int32, layout=ROW)
        if HAS_START:
            start = gl.load(edges_of(START, b, bh, S, HAS_START) + ends, mask=rows < T, other=0)
        origin = origin_of(ORIGIN, b, S, gl.minimum(ends, S - 1), start, HAS_START if SINK else 0)
        m_i = gl.full([64], -float("inf"), gl.float32, layout=ROW)
        l_i = row_sums(zero, BN)
        acc = gl.zeros([64, D], gl.float32, layout=O_L)
        acc_x = gl.zeros([64, DX if DX else 8], gl.float32, layout=X_L)

        q_slot = tiles % QB * NC + w
        mbarrier.wait(bars.q_full.index(q_slot), (tiles // QB) & 1)
        decay = smem.d.index(q_slot).load(ROW)
        decay_lo = smem.dl.index(q_slot).load(ROW)
        facts = Rows(ends, start, origin, decay, decay_lo)
        skipped = nb_hi - gl.minimum((row0 + w * 64 + 63 + S - T) // BN + 1, nb_hi)
        if skipped > 0:  # a block behind all rows of this warpgroup
            mbarrier.wait(bars.k_full.index(it % NB), (it // NB) & 1)
            mbarrier.arrive(bars.k_empty.index(it % NB), count=1)
            mbarrier.wait(bars.v_full.index(it % NB), (it // NB) & 1)
            mbarrier.arrive(bars.v_empty.index(it % NB), count=1)
            _turn(w, NC, False)
            _turn(w, NC, True)
            it += 1

        # the block with the diagonal of this warpgroup's rows; ACROSS: first that of its last rows
        last = skipped
        if ACROSS:
            first_row = row0 + w * 64 + S - T
            last = gl.minimum(skipped + (first_row + 63) // BN - first_row // BN, n_main - 1)
            for i in range(skipped, last):
                s = it % NB
                p, alpha, m_i, l_i = masked_block(
                    q_slot, s, (it // NB) & 1, nb_hi - 1 - i, smem, bars, facts, zero, scale, m_i, l_i, S_L, BN, CUT
                )
                rounded = p.to(dtype)
                mbarrier.wait(bars.v_full.index(s), (it // NB) & 1)
                lost_of_p = (p - widened(rounded)).to(dtype)
                acc, acc_x = times_v(lost_of_p, smem, s, acc, acc_x, P_L, PX_L, BN, D, DX)
                acc, acc_x = times_v(rounded, smem, s, acc, acc_x, P_L, PX_L, BN, D, DX)
                mbarrier.arrive(bars.v_empty.index(s), count=1)
                _turn(w, NC, False)
                _turn(w, NC, True)
                it += 1
        s = it % NB
        if CUT.HALF and w == 0:  # the keys of the second half lie behind all rows of this warpgroup
            pr, m_i, l_i, acc = half_block(
                q_slot, s, (it // NB) & 1, nb_hi - 1, smem, bars, facts, scale, m_i, l_i, acc, P_L, CUT
            )
        else:
            p, alpha, m_i, l_i = masked_block(
                q_slot, s, (it // NB) & 1, nb_hi - 1 - last, smem, bars, facts, zero, scale, m_i, l_i, S_L, BN, CUT
            )
            if ACROSS:
                acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_L))[:, None]
                if DX:
                    acc_x = acc_x * gl.convert_layout(alpha, gl.SliceLayout(1, X_L))[:, None]
            rounded = p.to(dtype)
            lost_of_p = (p - widened(rounded)).to(dtype)
            mbarrier.wait(bars.v_full.index(s), (it // NB) & 1)
            acc, acc_x = times_v(lost_of_p, smem, s, acc, acc_x, P_L, PX_L, BN, D, DX)
            pr = gl.convert_layout(rounded, P_L)

        if NC == 3:  # else the compiler puts a barrier in front of every wait for v below
            thread_barrier()
        # the next scores and the last weights times V in flight together
        for i in range(last + 1, n_all):
            n = nb_hi - 1 - i
            if SINK > 0:
                n = gl.where(i < n_main, n, sb_hi - 1 - (i - n_main))
            v_slot = it % NB
            v_phase = (it // NB) & 1
            it += 1
            # an opaque zero keeps loop-invariant matrix descriptors from being hoisted into registers
            z = gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r,r", [it], dtype=gl.int32, is_pure=False, pack=1)
            s = it % NB + z
            mbarrier.wait(bars.k_full.index(s), (it // NB) & 1)
            if NC == 3:
                mbarrier.wait(bars.v_full.index(v_slot), v_phase)
            _turn(w, NC, False)
            qk = warpgroup_mma(
                smem.q.index(q_slot + z).reshape([64, D]),
                smem.k.index(s).reshape([BN, D]).permute((1, 0)),
                zero,
                use_acc=False,
                is_async=True,
            )
            if DX:
                qx = smem.qx.index(q_slot + z).reshape([64, DX])
                qk = warpgroup_mma(qx, smem.kx.index(s).reshape([BN, DX]).permute((1, 0)), qk, is_async=True)
            whole = sees_whole(n, first_end, clean_lo, BN)
            # zeros for a block whose bias is added exactly
            ones = smem.qb.index(whole.to(gl.int32))
            qk = warpgroup_mma(ones, smem.kb.index(s).permute((1, 0)), qk, is_async=True)
            if NC < 3:
                mbarrier.wait(bars.v_full.index(v_slot), v_phase)
            acc = warpgroup_mma(pr, smem.v.index(v_slot).reshape([BN, D]), acc, is_async=True)
            if DX:
                pr_x = gl.convert_layout(pr, PX_L)
                acc_x = warpgroup_mma(pr_x, smem.vx.index(v_slot).reshape([BN, DX]), acc_x, is_async=True)
            _turn(w, NC, True)
            qk = warpgroup_mma_wait(2 if DX else 1, deps=(qk,))
            x, rest = scores(qk, smem.b.index(s), smem.bl.index(s), n, facts, whole, HAS_START, SINK, S_L, BN)
            p, alpha, m_i, l_i = softmax(x, scale, rest, m_i, l_i, BN)
            if DX:
                acc, acc_x = warpgroup_mma_wait(0, deps=(acc, acc_x))
                acc_x = acc_x * gl.convert_layout(alpha, gl.SliceLayout(1, X_L))[:, None]
            else:
                acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(bars.k_empty.index(s), count=1)
            mbarrier.arrive(bars.v_empty.index(v_slot), count=1)
            pr = gl.convert_layout(p.to(dtype), P_L)
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_L))[:, None]
        if D < 256:  # else o takes q's place first
            mbarrier.arrive(bars.q_empty.index(q_slot), count=1)

        # the last weights times V; the next tile meanwhile
        s = it % NB
        mbarrier.wait(bars.v_full.index(s), (it // NB) & 1)
        acc = warpgroup_mma(pr, smem.v.index(s).reshape([BN, D]), acc, is_async=True)
        if DX:
            pr_x = gl.convert_layout(pr, PX_L)
            acc_x = warpgroup_mma(pr_x, smem.vx.index(s).reshape([BN, DX]), acc_x, is_async=True)
        it += 1
        tiles += 1
        more, m, b_next, h_next = _next(smem, bars, tiles)
        if DX:
            acc, acc_x = warpgroup_mma_wait(0, deps=(acc, acc_x))
        else:
            acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(bars.v_empty.index(s), count=1)
        l_i = gl.convert_layout(gl.sum(l_i, 1), ROW)
        inv = gl.where(l_i == 0, 0.0, 1.0 / l_i)  # a NaN goes on
        gl.store(L + bh.to(gl.int64) * T + rows, gl.where(l_i == 0, -float("inf"), m_i + gl.log2(l_i)), mask=rows < T)
        tma.store_wait(0)
        acc = acc * gl.convert_layout(inv, gl.SliceLayout(1, O_L))[:, None]
        o_buf.store(acc.to(dtype))
        if DX:
            acc_x = acc_x * gl.convert_layout(inv, gl.SliceLayout(1, X_L))[:, None]
            ox_buf.store(acc_x.to(dtype))
        fence_async_shared()
        tma_store(o_desc, [b, row0 + w * 64, h, 0], smem.o.index(w))
        if DX:
            tma_store(ox_desc, [b, row0 + w * 64, h, D], smem.ox.index(w))
        if r_desc is not None:
            if D >= 128:  # the residual's buffer is o's
                tma.store_wait(0)
            smem.r.index(w).reshape([64, D]).store(lost(acc, dtype))
            if DX:
                smem.rx.index(w).reshape([64, DX]).store(lost(acc_x, dtype))
            fence_async_shared()
            tma_store(r_desc, [b, row0 + w * 64, h, 0], smem.r.index(w))
            if DX:
                tma_store(rx_desc, [b, row0 + w * 64, h, D], smem.rx.index(w))
        if D == 256:
            tma.store_wait(0)
            mbarrier.arrive(bars.q_empty.index(q_slot), count=1)

        b = b_next
        h = h_next
    tma.store_wait(0)
