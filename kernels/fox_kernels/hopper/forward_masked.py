"""The first blocks of a tile in the Hopper forward, with the mask: nothing else is under way in their warpgroup."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from .forward_softmax import Rows, row_sums, scores, softmax, widened


@gluon.jit
def masked_block(q_slot, s, phase, n, smem, bars, rows, zero, scale, m_i, l_i, S_L: gl.constexpr, SEEN: gl.constexpr,
                 CUT: gl.constexpr):  # fmt: skip
    """The weights of the first SEEN keys of block n, which is in slot s, and what `softmax` returns with them."""
    BN: gl.constexpr = CUT.BN
    D: gl.constexpr = CUT.D
    DX: gl.constexpr = CUT.DX
    mbarrier.wait(bars.k_full.index(s), phase)
    q = smem.q.index(q_slot).reshape([64, D])
    k = smem.k.index(s).reshape([BN, D])
    bias = smem.b.index(s)
    bias_lo = smem.bl.index(s)
    if SEEN < BN:
        k = k.slice(0, SEEN)
        bias = bias.slice(0, SEEN)
        bias_lo = bias_lo.slice(0, SEEN)
    qk = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    if DX:
        qx = smem.qx.index(q_slot).reshape([64, DX])
        qk = warpgroup_mma(qx, smem.kx.index(s).reshape([BN, DX]).permute((1, 0)), qk, is_async=True)
    qk = warpgroup_mma_wait(0, deps=(qk,))
    x, rest = scores(qk, bias, bias_lo, n * (BN // SEEN), rows, False, CUT.HAS_START, CUT.SINK, S_L, SEEN)
    mbarrier.arrive(bars.k_empty.index(s), count=1)
    return softmax(x, scale, rest, m_i, l_i, SEEN)


@gluon.jit
def half_block(q_slot, s, phase, n, smem, bars, rows, scale, m_i, l_i, acc, P_L: gl.constexpr, CUT: gl.constexpr):
    """The weights of block n whose second half lies behind all rows, the rows' state, and acc.

    acc has the product of the weights' rounding error and V added. For a tile's first block and a head dim in one
    block of columns.
    """
    BN: gl.constexpr = CUT.BN
    D: gl.constexpr = CUT.D
    HN: gl.constexpr = BN // 2
    H_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HN, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, H_L)
    zero = gl.zeros([64, HN], gl.float32, layout=H_L)
    facts = Rows(gl.convert_layout(rows.ends, ROW), gl.convert_layout(rows.start, ROW),
                 gl.convert_layout(rows.origin, ROW), gl.convert_layout(rows.decay, ROW),
                 gl.convert_layout(rows.decay_lo, ROW))  # fmt: skip
    p, _alpha, m, total = masked_block(q_slot, s, phase, n, smem, bars, facts, zero, scale,
                                       gl.convert_layout(m_i, ROW), row_sums(zero, HN), H_L, HN, CUT)  # fmt: skip
    rounded = p.to(smem.q.dtype)
    lost_of_p = (p - widened(rounded)).to(smem.q.dtype)
    mbarrier.wait(bars.v_full.index(s), phase)
    v = smem.v.index(s).reshape([BN, D]).slice(0, HN)
    acc = warpgroup_mma_wait(0, deps=(warpgroup_mma(gl.convert_layout(lost_of_p, P_L), v, acc, is_async=True),))
    both = gl.join(rounded, gl.zeros_like(rounded)).permute((0, 2, 1)).reshape([64, BN])
    return (
        gl.convert_layout(both, P_L),
        gl.convert_layout(m, m_i.type.layout),
        gl.convert_layout(total, l_i.type.layout),
        acc,
    )
