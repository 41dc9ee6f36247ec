"""Forgetting Attention forward in Gluon for Hopper: one producer, NC consumer warpgroups of 64 query rows, persistent.

The producer partition copies q, k, v by TMA and turns the two-float cumulative gates of each key block into a bias per
key (c_first - c_j); the consumers run FlashAttention-3's pipeline (the next scores while the last weights meet V), in
turns. With BIAS_BY_MMA the bias is three more columns of k (its bfloat16 parts) against ones in q: one step of the
tensor cores instead of a load and an addition per score. Tiles are handed out heaviest first by an atomic counter.
A row sees the keys start_i <= j <= i + S - T, which covers packed documents, left padding and windows with one vector;
blocks that every row sees whole skip the mask.
"""

# Gluon is a language of its own in Python's clothes: what its names mean inside a kernel their annotations don't say.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false, reportOptionalMemberAccess=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper_forward_producer import difference, key_blocks, over, producer, tile_of

PRODUCER_WARPS = gl.constexpr(4)
BELOW_TOP = gl.constexpr(40.0)
WIDEN_BF16 = gl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")
WIDEN_FP16 = gl.constexpr("{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }")
PING_PONG_BARRIER = gl.constexpr(8)  # Gluon itself numbers its barriers from 0: one per partition and one to switch


@gluon.jit
def _whole(n, first_end, clean_lo, BN: gl.constexpr):
    """Whether every row of the tile sees all of key block n, and none of its keys is a sink."""
    return (n * BN >= clean_lo) & (n * BN + BN - 1 <= first_end)


@gluon.jit
def _scores(qk, b_s, bl_s, n, ends, start, decay, decay_lo, whole, HAS_START: gl.constexpr, SINK: gl.constexpr,
            S_L: gl.constexpr, BN: gl.constexpr, BIAS_BY_MMA: gl.constexpr):  # fmt: skip
    """Scores of key block n over `scale`, -inf where invisible, and what is still to be added to each row.

    Blocks that every row sees whole lie before the tile's first row, so both halves of the decay, c_first - c_j and
    c_i - c_first, are <= 0 and add up without cancellation; elsewhere c_i - c_j is formed from two floats each.
    """
    if whole:
        if not BIAS_BY_MMA:
            qk = qk + b_s.load(gl.SliceLayout(0, S_L))[None, :]
        rest = decay
    else:
        bias = b_s.load(gl.SliceLayout(0, S_L))
        bias_lo = bl_s.load(gl.SliceLayout(0, S_L))
        offs_n = n * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, S_L))
        total = (decay[:, None] + bias[None, :]) + (decay_lo[:, None] + bias_lo[None, :])
        seen = offs_n[None, :] <= ends[:, None]
        if HAS_START:
            seen = seen & (offs_n[None, :] >= start[:, None])
        if SINK > 0:  # the sink's keys don't decay
            total = gl.where(offs_n[None, :] < (start + SINK)[:, None], 0.0, total)
        qk = gl.where(seen, qk + total, -float("inf"))
        rest = gl.zeros_like(decay)
    return qk, rest


@gluon.jit
def _widened(x):
    """x of 16 bits in float32, taken from the pairs that lie in a register: Triton's own cast rounds anew, slowly."""
    TEXT: gl.constexpr = WIDEN_BF16 if x.dtype == gl.bfloat16 else WIDEN_FP16
    return gl.inline_asm_elementwise(TEXT, "=f,=f,r", [x], dtype=gl.float32, is_pure=True, pack=2)


@gluon.jit
def _row_sums(p, BN: gl.constexpr):
    """(64, BN) to (64, 4): each thread's sums over the keys that it has, still to be added over 4 threads."""
    return gl.sum(gl.sum(p.reshape([64, BN // 8, 4, 2]), 3), 1)


@gluon.jit
def _softmax(s, scale, rest, top, m_i, l_i, r_i, BN: gl.constexpr):
    """Weights of a block and their sums per thread, what to multiply by what came before, and the running sums.

    top is the largest score so far. The weights are relative to m, the largest of their own block, so that every block
    has one that is exactly 1 and not rounded for the product with v; but to no less than top - BELOW_TOP, so that what
    came before stays finite. l_i sums the weights; so does r_i, to which the caller adds what rounding does to them.
    """
    block = (gl.max(s, 1) + rest) * scale
    top = gl.maximum(top, block)
    m = gl.maximum(block, top - BELOW_TOP)
    m_finite = gl.where(m == -float("inf"), 0.0, m)  # a row that has seen no key yet
    p = gl.exp2(s * scale - (m_finite - rest * scale)[:, None])
    alpha = gl.exp2(m_i - m_finite)
    total = _row_sums(p, BN)
    share = gl.convert_layout(alpha, gl.SliceLayout(1, total.type.layout))[:, None]
    return p, total, alpha, top, m, l_i * share + total, r_i * share + total


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
def _lost(o, dtype: gl.constexpr):
    """What rounding loses of o."""
    return (o - _widened(o.to(dtype))).to(dtype)


@gluon.jit
def _consumer(w, o_desc, ox_desc, r_desc, rx_desc, C_HI, C_LO, L, START, LO, q_s, k_s, v_s, o_s, r_s, qx_s, kx_s,
              vx_s, ox_s, rx_s, b_s, bl_s, kb_s, qb_s, n_s,
              q_full, q_empty, k_full, k_empty, v_full, v_empty, n_full, n_empty, scale, T, S, H, num_m, num_bh, group,
              HAS_START: gl.constexpr, HAS_LO: gl.constexpr, SINK: gl.constexpr, NC: gl.constexpr, BN: gl.constexpr,
              D: gl.constexpr, DX: gl.constexpr, NB: gl.constexpr, PING_PONG: gl.constexpr,
              BIAS_BY_MMA: gl.constexpr, HAS_RESIDUAL: gl.constexpr):  # fmt: skip
    BM: gl.constexpr = NC * 64
    S_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    X_L: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DX if DX else 8, 16]
    )
    P_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_L, k_width=2)
    PX_L: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=X_L, k_width=2)
    ROW: gl.constexpr = gl.SliceLayout(1, S_L)
    dtype: gl.constexpr = q_s.dtype
    num_tiles = num_m * num_bh
    zero = gl.zeros([64, BN], gl.float32, layout=S_L)
    q = q_s.index(w).reshape([64, D])
    o_buf = o_s.index(w).reshape([64, D])
    if DX:
        qx = qx_s.index(w).reshape([64, DX])
        ox_buf = ox_s.index(w).reshape([64, DX])
    if PING_PONG and w == NC - 1:
        _turn(w, NC, True)
    index = gl.program_id(0)
    it = 0
    tiles = 0
    while index < num_tiles:
        m, bh = tile_of(index, num_m, num_bh, group)
        b = bh // H
        h = bh - b * H
        row0, first_end, nb_hi, n_main, sb_hi, n_all, clean_lo = key_blocks(
            m, b, bh, START, LO, T, S, HAS_START, HAS_LO, SINK, BM, BN
        )
        c_hi = C_HI + bh.to(gl.int64) * S
        c_lo = C_LO + bh.to(gl.int64) * S
        rows = row0 + w * 64 + gl.arange(0, 64, layout=ROW)
        ends = rows + (S - T)
        start = gl.zeros([64], gl.int32, layout=ROW)
        if HAS_START:
            start = gl.load(START + b * S + ends, mask=rows < T, other=0)
        row_hi = gl.load(c_hi + ends, mask=rows < T, other=0.0)
        row_lo = gl.load(c_lo + ends, mask=rows < T, other=0.0)
        decay, decay_lo = difference(row_hi, row_lo, gl.load(c_hi + first_end), gl.load(c_lo + first_end))
        decay, decay_lo = over(decay, decay_lo, scale)
        top = gl.full([64], -float("inf"), gl.float32, layout=ROW)
        m_i = gl.full([64], -float("inf"), gl.float32, layout=ROW)
        l_i = _row_sums(zero, BN)
        r_i = l_i
        acc = gl.zeros([64, D], gl.float32, layout=O_L)
        acc_x = gl.zeros([64, DX if DX else 8], gl.float32, layout=X_L)

        # the diagonal block: scores only
        s = it % NB
        mbarrier.wait(q_full.index(w), tiles & 1)
        mbarrier.wait(k_full.index(s), (it // NB) & 1)
        qk = warpgroup_mma(q, k_s.index(s).reshape([BN, D]).permute((1, 0)), zero, use_acc=False, is_async=True)
        if DX:
            qk = warpgroup_mma(qx, kx_s.index(s).reshape([BN, DX]).permute((1, 0)), qk, is_async=True)
        qk = warpgroup_mma_wait(0, deps=(qk,))
        x, rest = _scores(qk, b_s.index(s), bl_s.index(s), nb_hi - 1, ends, start, decay, decay_lo, False, HAS_START,
                          SINK, S_L,
                          BN, BIAS_BY_MMA)  # fmt: skip
        mbarrier.arrive(k_empty.index(s), count=1)
        p, total, alpha, top, m_i, l_i, r_i = _softmax(x, scale, rest, top, m_i, l_i, r_i, BN)
        whole = n_all < 0  # no: the tile's rows see parts of the diagonal block

        # the next scores and the last weights times V in flight together
        for i in range(1, n_all):
            n = nb_hi - 1 - i
            if SINK > 0:
                n = gl.where(i < n_main, n, sb_hi - 1 - (i - n_main))
            v_slot = it % NB
            v_phase = (it // NB) & 1
            it += 1
            # an opaque zero keeps loop-invariant matrix descriptors from being hoisted into registers
            z = gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r,r", [it], dtype=gl.int32, is_pure=False, pack=1)
            s = it % NB + z
            rounded = p.to(dtype)
            if not whole:  # two instructions a score: too dear for the rest, where they matter less
                r_i += _row_sums(_widened(rounded), BN) - total
            pr = gl.convert_layout(rounded, P_L)
            mbarrier.wait(k_full.index(s), (it // NB) & 1)
            if PING_PONG:
                _turn(w, NC, False)
            qk = warpgroup_mma(
                q_s.index(w + z).reshape([64, D]),
                k_s.index(s).reshape([BN, D]).permute((1, 0)),
                zero,
                use_acc=False,
                is_async=True,
            )
            if DX:
                qx = qx_s.index(w + z).reshape([64, DX])
                qk = warpgroup_mma(qx, kx_s.index(s).reshape([BN, DX]).permute((1, 0)), qk, is_async=True)
            whole = _whole(n, first_end, clean_lo, BN)
            if BIAS_BY_MMA:  # zeros for a block whose bias is added exactly
                ones = qb_s.index(whole.to(gl.int32))
                qk = warpgroup_mma(ones, kb_s.index(s).permute((1, 0)), qk, is_async=True)
            mbarrier.wait(v_full.index(v_slot), v_phase)
            acc = warpgroup_mma(pr, v_s.index(v_slot).reshape([BN, D]), acc, is_async=True)
            if DX:
                pr_x = gl.convert_layout(pr, PX_L)
                acc_x = warpgroup_mma(pr_x, vx_s.index(v_slot).reshape([BN, DX]), acc_x, is_async=True)
            if PING_PONG:
                _turn(w, NC, True)
            qk = warpgroup_mma_wait(2 if DX else 1, deps=(qk,))
            x, rest = _scores(qk, b_s.index(s), bl_s.index(s), n, ends, start, decay, decay_lo, whole, HAS_START,
                              SINK, S_L, BN,
                              BIAS_BY_MMA)  # fmt: skip
            mbarrier.arrive(k_empty.index(s), count=1)
            p, total, alpha, top, m_i, l_i, r_i = _softmax(x, scale, rest, top, m_i, l_i, r_i, BN)
            if DX:
                acc, acc_x = warpgroup_mma_wait(0, deps=(acc, acc_x))
                acc_x = acc_x * gl.convert_layout(alpha, gl.SliceLayout(1, X_L))[:, None]
            else:
                acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(v_empty.index(v_slot), count=1)
            acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_L))[:, None]
        mbarrier.arrive(q_empty.index(w), count=1)

        # the last weights times V, then o = acc / r, the weights' sum as rounded for it, and lse from their exact sum l
        s = it % NB
        rounded = p.to(dtype)
        if not whole:
            r_i += _row_sums(_widened(rounded), BN) - total
        pr = gl.convert_layout(rounded, P_L)
        mbarrier.wait(v_full.index(s), (it // NB) & 1)
        acc = warpgroup_mma(pr, v_s.index(s).reshape([BN, D]), acc, is_async=True)
        if DX:
            pr_x = gl.convert_layout(pr, PX_L)
            acc_x = warpgroup_mma(pr_x, vx_s.index(s).reshape([BN, DX]), acc_x, is_async=True)
            acc, acc_x = warpgroup_mma_wait(0, deps=(acc, acc_x))
        else:
            acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_empty.index(s), count=1)
        it += 1
        l_i = gl.convert_layout(gl.sum(l_i, 1), ROW)
        r_i = gl.convert_layout(gl.sum(r_i, 1), ROW)
        inv = gl.where(l_i == 0, 0.0, 1.0 / r_i)  # a NaN goes on
        gl.store(L + bh.to(gl.int64) * T + rows, gl.where(l_i == 0, -float("inf"), m_i + gl.log2(l_i)), mask=rows < T)
        tma.store_wait(0)
        acc = acc * gl.convert_layout(inv, gl.SliceLayout(1, O_L))[:, None]
        o_buf.store(acc.to(dtype))
        if DX:
            acc_x = acc_x * gl.convert_layout(inv, gl.SliceLayout(1, X_L))[:, None]
            ox_buf.store(acc_x.to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(o_desc, [b, row0 + w * 64, h, 0], o_s.index(w))
        if DX:
            tma.async_copy_shared_to_global(ox_desc, [b, row0 + w * 64, h, D], ox_s.index(w))
        if HAS_RESIDUAL:
            if D == 128:  # no room for a buffer of its own
                tma.store_wait(0)
            r_s.index(w).reshape([64, D]).store(_lost(acc, dtype))
            if DX:
                rx_s.index(w).reshape([64, DX]).store(_lost(acc_x, dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(r_desc, [b, row0 + w * 64, h, 0], r_s.index(w))
            if DX:
                tma.async_copy_shared_to_global(rx_desc, [b, row0 + w * 64, h, D], rx_s.index(w))

        mbarrier.wait(n_full, tiles & 1)
        index = gl.max(n_s.load(gl.SliceLayout(1, gl.BlockedLayout([1, 1], [32, 1], [4, 1], [1, 0]))), 0)
        mbarrier.arrive(n_empty, count=1)
        tiles += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["T", "S", "H", "KV_GROUP", "num_m", "num_bh", "group"])
def fox_forward(q_desc, k_desc, v_desc, o_desc, r_desc, qx_desc, kx_desc, vx_desc, ox_desc, rx_desc, C_HI, C_LO, L,
                START, LO, COUNTER,
                scale,
                T, S, H, KV_GROUP, num_m, num_bh, group, HAS_START: gl.constexpr, HAS_LO: gl.constexpr,
                SINK: gl.constexpr,
                NC: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, DX: gl.constexpr, NB: gl.constexpr,
                PING_PONG: gl.constexpr, BIAS_BY_MMA: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
                REGISTERS: gl.constexpr):  # fmt: skip
    """o, what rounding it lost, and lse. Head dim D, or D + DX in blocks of columns (80 = 64 + 16, 96 = 64 + 32)."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_s = gl.allocate_shared_memory(q_desc.dtype, [NC, 1, 64, 1, D], q_desc.layout)
    o_s = gl.allocate_shared_memory(q_desc.dtype, [NC, 1, 64, 1, D], o_desc.layout)
    r_s = o_s
    if HAS_RESIDUAL and D == 64:
        r_s = gl.allocate_shared_memory(q_desc.dtype, [NC, 1, 64, 1, D], o_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [NB, 1, BN, 1, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [NB, 1, BN, 1, D], v_desc.layout)
    if DX:
        qx_s = gl.allocate_shared_memory(q_desc.dtype, [NC, 1, 64, 1, DX], qx_desc.layout)
        ox_s = gl.allocate_shared_memory(q_desc.dtype, [NC, 1, 64, 1, DX], ox_desc.layout)
        rx_s = ox_s
        if HAS_RESIDUAL:
            rx_s = gl.allocate_shared_memory(q_desc.dtype, [NC, 1, 64, 1, DX], ox_desc.layout)
        kx_s = gl.allocate_shared_memory(k_desc.dtype, [NB, 1, BN, 1, DX], kx_desc.layout)
        vx_s = gl.allocate_shared_memory(v_desc.dtype, [NB, 1, BN, 1, DX], vx_desc.layout)
    else:
        qx_s = q_s
        ox_s = o_s
        rx_s = o_s
        kx_s = k_s
        vx_s = v_s
    b_s = gl.allocate_shared_memory(gl.float32, [NB, BN], VECTOR)
    bl_s = gl.allocate_shared_memory(gl.float32, [NB, BN], VECTOR)
    if BIAS_BY_MMA:
        PARTS_K: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, 16], gl.bfloat16)
        PARTS_Q: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 16], gl.bfloat16)
        ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
        kb_s = gl.allocate_shared_memory(gl.bfloat16, [NB, BN, 16], PARTS_K)
        qb_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 16], PARTS_Q)
        qb_s.index(0).store(gl.full([64, 16], 0.0, gl.bfloat16, layout=ROWS))
        qb_s.index(1).store(gl.full([64, 16], 1.0, gl.bfloat16, layout=ROWS))
        fence_async_shared()
    else:
        kb_s = b_s
        qb_s = b_s
    n_s = gl.allocate_shared_memory(gl.int32, [1], VECTOR)
    q_full = gl.allocate_shared_memory(gl.int64, [NC, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [NC, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [NB, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [NB, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [NB, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [NB, 1], BARRIER)
    n_full = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    n_empty = gl.allocate_shared_memory(gl.int64, [1], BARRIER)
    for i in gl.static_range(NC):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(NB):
        mbarrier.init(k_full.index(i), count=2)  # the TMA copy and the bias row
        mbarrier.init(k_empty.index(i), count=NC)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=NC)
    mbarrier.init(n_full, count=1)
    mbarrier.init(n_empty, count=NC)
    if NC == 2:
        gl.warp_specialize([
        (_consumer, (0, o_desc, ox_desc, r_desc, rx_desc, C_HI, C_LO, L, START, LO, q_s, k_s, v_s, o_s, r_s, qx_s,
                     kx_s, vx_s, ox_s, rx_s, b_s, bl_s, kb_s, qb_s, n_s,
                     q_full, q_empty, k_full, k_empty, v_full, v_empty, n_full, n_empty, scale, T, S, H, num_m,
                     num_bh, group,
                     HAS_START, HAS_LO, SINK, NC, BN, D, DX, NB, PING_PONG, BIAS_BY_MMA, HAS_RESIDUAL)),
        (_consumer, (1, o_desc, ox_desc, r_desc, rx_desc, C_HI, C_LO, L, START, LO, q_s, k_s, v_s, o_s, r_s, qx_s,
                     kx_s, vx_s, ox_s, rx_s, b_s, bl_s, kb_s, qb_s, n_s,
                     q_full, q_empty, k_full, k_empty, v_full, v_empty, n_full, n_empty, scale, T, S, H, num_m,
                     num_bh, group,
                     HAS_START, HAS_LO, SINK, NC, BN, D, DX, NB, PING_PONG, BIAS_BY_MMA, HAS_RESIDUAL)),
        (producer, (q_desc, k_desc, v_desc, qx_desc, kx_desc, vx_desc, C_HI, C_LO, START, LO, COUNTER,
                     q_s, k_s, v_s, qx_s, kx_s, vx_s, b_s, bl_s, kb_s, qb_s, n_s, q_full, q_empty, k_full, k_empty,
                     v_full, v_empty, n_full, n_empty,
                     scale, T, S, H, KV_GROUP, num_m, num_bh, group, HAS_START, HAS_LO, SINK, NC, BN, D, DX, NB,
                     BIAS_BY_MMA)),
        ], [4, PRODUCER_WARPS], [REGISTERS, 32])  # fmt: skip
    else:
        gl.warp_specialize([
        (_consumer, (0, o_desc, ox_desc, r_desc, rx_desc, C_HI, C_LO, L, START, LO, q_s, k_s, v_s, o_s, r_s, qx_s,
                     kx_s, vx_s, ox_s, rx_s, b_s, bl_s, kb_s, qb_s, n_s,
                     q_full, q_empty, k_full, k_empty, v_full, v_empty, n_full, n_empty, scale, T, S, H, num_m,
                     num_bh, group,
                     HAS_START, HAS_LO, SINK, NC, BN, D, DX, NB, PING_PONG, BIAS_BY_MMA, HAS_RESIDUAL)),
        (_consumer, (1, o_desc, ox_desc, r_desc, rx_desc, C_HI, C_LO, L, START, LO, q_s, k_s, v_s, o_s, r_s, qx_s,
                     kx_s, vx_s, ox_s, rx_s, b_s, bl_s, kb_s, qb_s, n_s,
                     q_full, q_empty, k_full, k_empty, v_full, v_empty, n_full, n_empty, scale, T, S, H, num_m,
                     num_bh, group,
                     HAS_START, HAS_LO, SINK, NC, BN, D, DX, NB, PING_PONG, BIAS_BY_MMA, HAS_RESIDUAL)),
        (_consumer, (2, o_desc, ox_desc, r_desc, rx_desc, C_HI, C_LO, L, START, LO, q_s, k_s, v_s, o_s, r_s, qx_s,
                     kx_s, vx_s, ox_s, rx_s, b_s, bl_s, kb_s, qb_s, n_s,
                     q_full, q_empty, k_full, k_empty, v_full, v_empty, n_full, n_empty, scale, T, S, H, num_m,
                     num_bh, group,
                     HAS_START, HAS_LO, SINK, NC, BN, D, DX, NB, PING_PONG, BIAS_BY_MMA, HAS_RESIDUAL)),
        (producer, (q_desc, k_desc, v_desc, qx_desc, kx_desc, vx_desc, C_HI, C_LO, START, LO, COUNTER,
                     q_s, k_s, v_s, qx_s, kx_s, vx_s, b_s, bl_s, kb_s, qb_s, n_s, q_full, q_empty, k_full, k_empty,
                     v_full, v_empty, n_full, n_empty,
                     scale, T, S, H, KV_GROUP, num_m, num_bh, group, HAS_START, HAS_LO, SINK, NC, BN, D, DX, NB,
                     BIAS_BY_MMA)),
        ], [4, 4, PRODUCER_WARPS], [REGISTERS, REGISTERS, 32])  # fmt: skip
