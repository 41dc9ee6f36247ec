"""A consumer's steps on a block of scores in the Hopper forward: decay, mask, weights, rounding errors."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

WIDEN_BF16 = gl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")
WIDEN_FP16 = gl.constexpr("{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }")


class Rows(NamedTuple):
    """A tile's queries: the last and first key that each sees, its document's first, its decay in two floats."""

    ends: Any
    start: Any
    origin: Any
    decay: Any
    decay_lo: Any


@gluon.jit
def sees_whole(n, first_end, clean_lo, BN: gl.constexpr):
    """Whether every row of the tile sees all of key block n, and none of its keys is a sink."""
    return (n * BN >= clean_lo) & (n * BN + BN - 1 <= first_end)


@gluon.jit
def scores(qk, b_s, bl_s, n, rows, whole, HAS_START: gl.constexpr, SINK: gl.constexpr, S_L: gl.constexpr,
           BN: gl.constexpr):  # fmt: skip
    """Scores of key block n over `scale`, -inf where invisible, and the term still to be added to each row.

    qk has its bias already in blocks that every row sees whole. Those lie before the tile's first row, so both halves
    of the decay, c_first - c_j and c_i - c_first, are <= 0 and add up without cancellation; elsewhere c_i - c_j is
    formed from two floats each.
    """
    if whole:
        rest = rows.decay
    else:
        bias = b_s.load(gl.SliceLayout(0, S_L))
        bias_lo = bl_s.load(gl.SliceLayout(0, S_L))
        offs_n = n * BN + gl.arange(0, BN, layout=gl.SliceLayout(0, S_L))
        total = (rows.decay[:, None] + bias[None, :]) + (rows.decay_lo[:, None] + bias_lo[None, :])
        seen = offs_n[None, :] <= rows.ends[:, None]
        near = offs_n[None, :] >= rows.start[:, None]
        if SINK > 0:  # the sink's keys don't decay
            sink = offs_n[None, :] < (rows.origin + SINK)[:, None]
            total = gl.where(sink, 0.0, total)
            if HAS_START == 2:
                near = near | (sink & (offs_n[None, :] >= rows.origin[:, None]))
        if HAS_START:
            seen = seen & near
        qk = gl.where(seen, qk + total, -float("inf"))
        rest = gl.zeros_like(rows.decay)
    return qk, rest


@gluon.jit
def widened(x):
    """x of 16 bits in float32, taken from the pairs that lie in a register: Triton's own cast rounds anew, slowly."""
    TEXT: gl.constexpr = WIDEN_BF16 if x.dtype == gl.bfloat16 else WIDEN_FP16
    return gl.inline_asm_elementwise(TEXT, "=f,=f,r", [x], dtype=gl.float32, is_pure=True, pack=2)


@gluon.jit
def row_sums(p, BN: gl.constexpr):
    """(64, BN) to (64, 4): each thread's sums over the keys that it has, still to be added over 4 threads."""
    return gl.sum(gl.sum(p.reshape([64, BN // 8, 4, 2]), 3), 1)


@gluon.jit
def softmax(s, scale, rest, m_i, l_i, BN: gl.constexpr):
    """Weights of a block, what to multiply o so far by, and the largest score and each thread's sums so far."""
    m = gl.maximum(m_i, (gl.max(s, 1) + rest) * scale)
    m_finite = gl.where(m == -float("inf"), 0.0, m)  # a row that has seen no key yet
    p = gl.exp2(s * scale - (m_finite - rest * scale)[:, None])
    alpha = gl.exp2(m_i - m_finite)
    total = row_sums(p, BN)
    share = gl.convert_layout(alpha, gl.SliceLayout(1, total.type.layout))[:, None]
    return p, alpha, m, l_i * share + total


@gluon.jit
def times_v(p, smem, s, acc, acc_x, P_L: gl.constexpr, PX_L: gl.constexpr, BN: gl.constexpr, D: gl.constexpr,
            DX: gl.constexpr):  # fmt: skip
    """acc, and acc_x of the head dim's second block, with the weights p times V of slot s added."""
    acc = warpgroup_mma(gl.convert_layout(p, P_L), smem.v.index(s).reshape([BN, D]), acc, is_async=True)
    if DX:
        vx = smem.vx.index(s).reshape([BN, DX])
        acc_x = warpgroup_mma(gl.convert_layout(p, PX_L), vx, acc_x, is_async=True)
        acc, acc_x = warpgroup_mma_wait(0, deps=(acc, acc_x))
    else:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    return acc, acc_x


@gluon.jit
def lost(o, dtype: gl.constexpr):
    """The rounding error of o."""
    return (o - widened(o.to(dtype))).to(dtype)
