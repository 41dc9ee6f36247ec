"""Forgetting Attention forward in Gluon for Hopper: one producer, NC consumer warpgroups of 64 query rows, persistent.

The producer partition copies q, k, v by TMA and turns the two-float cumulative gates of each key block into a bias per
key (c_first - c_j); the consumers run FlashAttention-3's pipeline (the next scores while the last weights meet V), in
turns. The bias is three more columns of k (its bfloat16 parts) against ones in q: one step of the tensor cores instead
of a load and an addition per score. Tiles are handed out heaviest first by an atomic counter. A row sees the keys
start_i <= j <= i + S - T, which covers packed documents, left padding and windows with one vector, and a horizon with
one per head; blocks that every row sees whole skip the mask. In the others, which hold most of the weight of the rows
whose o is largest, the weights meet V in two parts of 16 bits. While a tile is under way the producer fetches the next
one's queries and first blocks.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .forward_consumer import consumer
from .forward_producer import producer

PRODUCER_WARPS = gl.constexpr(4)


class Memory(NamedTuple):
    """Buffers in shared memory; x: of the head dim's second block of columns. None where there is nothing to hold."""

    q: Any
    k: Any
    v: Any
    o: Any
    r: Any  # the rounding error of o
    qx: Any
    kx: Any
    vx: Any
    ox: Any
    rx: Any
    d: Any  # each row's decay and its remainder
    dl: Any
    b: Any  # each key's bias and its remainder
    bl: Any
    kb: Any  # the bias as 16 more columns of k, and q's against them
    qb: Any
    n: Any  # of two tiles, the next one: is there one, m, b, h


class Barriers(NamedTuple):
    """Barriers of the slots of q, k and v, and of the next tile."""

    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any
    n_full: Any
    n_empty: Any


@gluon.jit(do_not_specialize=["T", "S", "H", "KV_GROUP", "num_m", "num_bh", "group"])
def fox_forward(q_desc, k_desc, v_desc, o_desc, r_desc, qx_desc, kx_desc, vx_desc, ox_desc, rx_desc, c, lse, start,
                origin, counter, scale, T, S, H, KV_GROUP, num_m, num_bh, group, CUT: gl.constexpr):  # fmt: skip
    """o, its rounding error, and lse. Head dim D, or D + DX in blocks of columns (80 = 64 + 16, 96 = 64 + 32)."""
    NC: gl.constexpr = CUT.NC
    BN: gl.constexpr = CUT.BN
    D: gl.constexpr = CUT.D
    DX: gl.constexpr = CUT.DX
    NB: gl.constexpr = CUT.NB
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    QB: gl.constexpr = 2 if D == 64 and DX == 0 else 1  # slots of q
    q_s = gl.allocate_shared_memory(q_desc.dtype, [QB * NC, 1, 64, 1, D], q_desc.layout)
    o_s = q_s  # with 256 columns there is no room for a buffer of its own
    if D < 256:
        o_s = gl.allocate_shared_memory(q_desc.dtype, [NC, 1, 64, 1, D], o_desc.layout)
    r_s = None
    if r_desc is not None:
        r_s = o_s  # with 128 columns there is no room for a buffer of its own
        if D == 64:
            r_s = gl.allocate_shared_memory(q_desc.dtype, [NC, 1, 64, 1, D], o_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [NB, 1, BN, 1, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [NB, 1, BN, 1, D], v_desc.layout)
    qx_s = None
    kx_s = None
    vx_s = None
    ox_s = None
    rx_s = None
    if DX:
        qx_s = gl.allocate_shared_memory(q_desc.dtype, [NC, 1, 64, 1, DX], qx_desc.layout)
        ox_s = gl.allocate_shared_memory(q_desc.dtype, [NC, 1, 64, 1, DX], ox_desc.layout)
        if r_desc is not None:
            rx_s = gl.allocate_shared_memory(q_desc.dtype, [NC, 1, 64, 1, DX], ox_desc.layout)
        kx_s = gl.allocate_shared_memory(k_desc.dtype, [NB, 1, BN, 1, DX], kx_desc.layout)
        vx_s = gl.allocate_shared_memory(v_desc.dtype, [NB, 1, BN, 1, DX], vx_desc.layout)
    d_s = gl.allocate_shared_memory(gl.float32, [QB * NC, 64], VECTOR)
    dl_s = gl.allocate_shared_memory(gl.float32, [QB * NC, 64], VECTOR)
    b_s = gl.allocate_shared_memory(gl.float32, [NB, BN], VECTOR)
    bl_s = gl.allocate_shared_memory(gl.float32, [NB, BN], VECTOR)
    PARTS_K: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BN, 16], gl.bfloat16)
    PARTS_Q: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 16], gl.bfloat16)
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    kb_s = gl.allocate_shared_memory(gl.bfloat16, [NB, BN, 16], PARTS_K)
    qb_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 16], PARTS_Q)
    qb_s.index(0).store(gl.full([64, 16], 0.0, gl.bfloat16, layout=ROWS))
    qb_s.index(1).store(gl.full([64, 16], 1.0, gl.bfloat16, layout=ROWS))
    fence_async_shared()
    n_s = gl.allocate_shared_memory(gl.int32, [8, 1], VECTOR)  # of two tiles, the next one: is there one, m, b, h
    q_full = gl.allocate_shared_memory(gl.int64, [QB * NC, 1], BARRIER)
    q_empty = gl.allocate_shared_memory(gl.int64, [QB * NC, 1], BARRIER)
    k_full = gl.allocate_shared_memory(gl.int64, [NB, 1], BARRIER)
    k_empty = gl.allocate_shared_memory(gl.int64, [NB, 1], BARRIER)
    v_full = gl.allocate_shared_memory(gl.int64, [NB, 1], BARRIER)
    v_empty = gl.allocate_shared_memory(gl.int64, [NB, 1], BARRIER)
    n_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    n_empty = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    for i in gl.static_range(QB * NC):
        mbarrier.init(q_full.index(i), count=2)  # the TMA copy and the rows' decays
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(NB):
        mbarrier.init(k_full.index(i), count=2)  # the TMA copy and the bias row
        mbarrier.init(k_empty.index(i), count=NC)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=NC)
    for i in gl.static_range(2):
        mbarrier.init(n_full.index(i), count=1)
        mbarrier.init(n_empty.index(i), count=NC)
    smem = Memory(q_s, k_s, v_s, o_s, r_s, qx_s, kx_s, vx_s, ox_s, rx_s, d_s, dl_s, b_s, bl_s, kb_s, qb_s, n_s)
    bars = Barriers(q_full, q_empty, k_full, k_empty, v_full, v_empty, n_full, n_empty)
    written = (o_desc, ox_desc, r_desc, rx_desc)
    read = (q_desc, k_desc, v_desc, qx_desc, kx_desc, vx_desc)
    starts = (start, origin)
    if NC == 2:
        gl.warp_specialize([
            (consumer, (0, written, lse, starts, smem, bars, scale, T, S, H, CUT, QB)),
            (consumer, (1, written, lse, starts, smem, bars, scale, T, S, H, CUT, QB)),
            (producer, (read, c, starts, counter, smem, bars, scale, T, S, H, KV_GROUP, num_m, num_bh, group, CUT, QB)),
        ], [4, PRODUCER_WARPS], [CUT.REGISTERS, 32])  # fmt: skip
    else:
        gl.warp_specialize([
            (consumer, (0, written, lse, starts, smem, bars, scale, T, S, H, CUT, QB)),
            (consumer, (1, written, lse, starts, smem, bars, scale, T, S, H, CUT, QB)),
            (consumer, (2, written, lse, starts, smem, bars, scale, T, S, H, CUT, QB)),
            (producer, (read, c, starts, counter, smem, bars, scale, T, S, H, KV_GROUP, num_m, num_bh, group, CUT, QB)),
        ], [4, 4, PRODUCER_WARPS], [CUT.REGISTERS, CUT.REGISTERS, 32])  # fmt: skip
