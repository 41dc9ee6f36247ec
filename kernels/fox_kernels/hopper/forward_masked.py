"""The first blocks of a tile in the Hopper forward, with the mask: nothing else is under way in their warpgroup."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from .forward_softmax import row_sums, scores, softmax, widened


@gluon.jit
def masked_block(q_slot, s, phase, n, q_s, k_s, qx_s, kx_s, b_s, bl_s, k_full, k_empty, ends, start, decay, decay_lo,
                 zero, scale, m_i, l_i, HAS_START: gl.constexpr, SINK: gl.constexpr, S_L: gl.constexpr,
                 BN: gl.constexpr, SEEN: gl.constexpr, D: gl.constexpr, DX: gl.constexpr):  # fmt: skip
    """The weights of the first SEEN keys of block n, which is in slot s, and what `softmax` returns with them."""
    mbarrier.wait(k_full.index(s), phase)
    q = q_s.index(q_slot).reshape([64, D])
    k = k_s.index(s).reshape([BN, D])
    bias = b_s.index(s)
    bias_lo = bl_s.index(s)
    if SEEN < BN:
        k = k.slice(0, SEEN)
        bias = bias.slice(0, SEEN)
        bias_lo = bias_lo.slice(0, SEEN)
    qk = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    if DX:
        qx = qx_s.index(q_slot).reshape([64, DX])
        qk = warpgroup_mma(qx, kx_s.index(s).reshape([BN, DX]).permute((1, 0)), qk, is_async=True)
    qk = warpgroup_mma_wait(0, deps=(qk,))
    x, rest = scores(qk, bias, bias_lo, n * (BN // SEEN), ends, start, decay, decay_lo, False, HAS_START, SINK, S_L,
                     SEEN)  # fmt: skip
    mbarrier.arrive(k_empty.index(s), count=1)
    return softmax(x, scale, rest, m_i, l_i, SEEN)


@gluon.jit
def half_block(q_slot, s, phase, n, q_s, k_s, v_s, b_s, bl_s, k_full, k_empty, v_full, ends, start, decay, decay_lo,
               scale, m_i, l_i, acc, HAS_START: gl.constexpr, SINK: gl.constexpr, P_L: gl.constexpr, BN: gl.constexpr,
               D: gl.constexpr):  # fmt: skip
    """The weights of block n whose second half lies behind all rows, the rows' state, and acc.

    acc has the product of the weights' rounding error and V added. For a tile's first block and a head dim in one
    block of columns.
    """
    HN: gl.constexpr = BN // 2
    H_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HN, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, H_L)
    zero = gl.zeros([64, HN], gl.float32, layout=H_L)
    p, _alpha, m, total = masked_block(q_slot, s, phase, n, q_s, k_s, q_s, k_s, b_s, bl_s, k_full, k_empty,
                                       gl.convert_layout(ends, ROW), gl.convert_layout(start, ROW),
                                       gl.convert_layout(decay, ROW), gl.convert_layout(decay_lo, ROW), zero, scale,
                                       gl.convert_layout(m_i, ROW), row_sums(zero, HN), HAS_START, SINK, H_L, BN, HN,
                                       D, 0)  # fmt: skip
    rounded = p.to(q_s.dtype)
    lost_of_p = (p - widened(rounded)).to(q_s.dtype)
    mbarrier.wait(v_full.index(s), phase)
    v = v_s.index(s).reshape([BN, D]).slice(0, HN)
    acc = warpgroup_mma_wait(0, deps=(warpgroup_mma(gl.convert_layout(lost_of_p, P_L), v, acc, is_async=True),))
    both = gl.join(rounded, gl.zeros_like(rounded)).permute((0, 2, 1)).reshape([64, BN])
    return (
        gl.convert_layout(both, P_L),
        gl.convert_layout(m, m_i.type.layout),
        gl.convert_layout(total, l_i.type.layout),
        acc,
    )
