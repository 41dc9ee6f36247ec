"""Forgetting Attention backward in Gluon for Hopper: dq, dk, dv and the gate's gradient in one persistent kernel.

A key tile is 128 keys: two consumer warpgroups of 64 keys each hold dk and dv in registers and walk the query tiles
that see them, at each the query heads of a GQA group in turn, in the transposed form S^T = K Q^T. They exchange dS
through shared memory and each computes half of dq over all 128 keys; with 64 queries a step later, so that neither
waits for the other, who is half a step behind. At head dim 256 they share a tile of 64 keys (`backward_wide`). A writer
partition adds dq to a float32 one by TMA: in key order behind a ticket per query tile (deterministic), or as it comes.
The gate needs row and column sums of the same dS, in float32, sinks left out of the rows'. The column sums of several
heads go into a column each of one tile. BIAS_BY_MMA: gates, lse and delta enter as 16 more columns of the operands.

Order: key tiles are handed out by an atomic counter to programs that run, ascending within a head, and walk the queries
downward. So a tile waits only for tiles that a program has already begun or done, whatever else runs on the GPU: no
deadlock. And as it starts one step behind its predecessor and has fewer steps, it hardly waits at all.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .backward_consumer import consumer
from .backward_producer import producer
from .backward_shared import DQ_EMPTY, DQ_FULL, HEAD_DONE, HEAD_EMPTY, HEAD_FULL, INFO, KV_EMPTY, KV_FULL, Q_FULL
from .backward_walk import DELTA_ONLY
from .backward_writer import writer


class Memory(NamedTuple):
    """Buffers in shared memory; few, as each costs every partition a register."""

    kv: Any
    qdo: Any
    ds: Any
    dq: Any
    row: Any
    sum: Any
    key: Any
    live: Any
    start: Any
    info: Any
    step: Any
    kb: Any
    qb: Any


@gluon.jit(do_not_specialize=["T", "T_PAD", "S", "H", "KV_GROUP", "num_n", "num_bh", "group"])
def fox_backward(q_desc, k_desc, v_desc, do_desc, dq_desc, dk_desc, dv_desc, c, rows, sums, ticket, counter, edges,
                 tile_lo, lost, sm_scale, T, T_PAD, S, H, KV_GROUP, num_n, num_bh, group,
                 CUT: gl.constexpr):  # fmt: skip
    """dk, dv of every key tile, their shares of a float32 dq, and both sums of dS."""
    SINK: gl.constexpr = CUT.SINK
    D: gl.constexpr = CUT.D
    BM: gl.constexpr = CUT.BM
    NB: gl.constexpr = CUT.NB
    NKV: gl.constexpr = CUT.NKV
    HALVES: gl.constexpr = CUT.KEYS // 64
    HEADS: gl.constexpr = CUT.HEADS
    GENERATIONS: gl.constexpr = CUT.GENERATIONS
    BIAS_BY_MMA: gl.constexpr = CUT.BIAS_BY_MMA
    dtype: gl.constexpr = q_desc.dtype
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    SQUARE: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BM], dtype)
    kv_s = gl.allocate_shared_memory(dtype, [NKV * 2 * HALVES, 1, 64, 1, D], k_desc.layout)  # k of 64 keys each, v
    qdo_s = gl.allocate_shared_memory(dtype, [HALVES * NB, 1, BM, 1, D], q_desc.layout)  # q of each stage, do of each
    ds_s = gl.allocate_shared_memory(dtype, [HALVES * GENERATIONS, 64, BM], SQUARE)  # each half's, one or two steps'
    dq_s = gl.allocate_shared_memory(gl.float32, [2, 64, dq_desc.block_type.shape[1]], dq_desc.layout)
    # of each stage: c_i - lse_i and its remainder, delta, -lse
    row_s = gl.allocate_shared_memory(gl.float32, [(4 if SINK else 3) * NB, BM], VECTOR)
    sum_s = gl.allocate_shared_memory(gl.float32, [2 * HALVES * GENERATIONS, 4 * BM], VECTOR)
    key_s = gl.allocate_shared_memory(gl.float32, [HEADS * 8, 64], VECTOR)
    live_s = gl.allocate_shared_memory(gl.float32, [4, 64], VECTOR)
    start_s = gl.allocate_shared_memory(gl.int32, [NB, BM], VECTOR)
    info_s = gl.allocate_shared_memory(gl.int32, [2 * INFO, 1], VECTOR)
    step_s = gl.allocate_shared_memory(gl.int32, [NB, 1], VECTOR)
    # 16 more columns of q and do: parts of each row's bias, ones, -delta; of k and v: ones, parts of each key's bias
    kb_s = None
    qb_s = None
    if BIAS_BY_MMA:
        PARTS: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
        kb_s = gl.allocate_shared_memory(
            gl.bfloat16, [6, 64, 16], gl.NVMMASharedLayout.get_default_for([64, 16], gl.bfloat16)
        )
        qb_s = gl.allocate_shared_memory(
            gl.bfloat16, [NB, BM, 16], gl.NVMMASharedLayout.get_default_for([BM, 16], gl.bfloat16)
        )
        column = gl.arange(0, 16, layout=gl.SliceLayout(0, PARTS))[None, :]
        for i in gl.static_range(6):
            none = gl.full([64, 16], 0.0, gl.bfloat16, layout=PARTS)
            if i == DELTA_ONLY:
                none = gl.where((column == 6) | (column == 7), gl.full([64, 16], 1.0, gl.bfloat16, layout=PARTS), none)
            kb_s.index(i).store(none)
        for i in gl.static_range(NB):
            qb_s.index(i).store(gl.full([BM, 16], 0.0, gl.bfloat16, layout=PARTS))
        fence_async_shared()
    bars = gl.allocate_shared_memory(gl.int64, [Q_FULL + 2 * NB, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bars.index(DQ_FULL), count=2)
    mbarrier.init(bars.index(DQ_EMPTY), count=1)
    for i in gl.static_range(2):
        mbarrier.init(bars.index(HEAD_FULL + i), count=1)
        mbarrier.init(bars.index(HEAD_EMPTY + i), count=1)
        mbarrier.init(bars.index(HEAD_DONE + i), count=2)
        mbarrier.init(bars.index(KV_FULL + i), count=1)
        mbarrier.init(bars.index(KV_EMPTY + i), count=1)
    for i in gl.static_range(NB):
        mbarrier.init(bars.index(Q_FULL + i), count=2)  # the TMA copies and the row vectors
        mbarrier.init(bars.index(Q_FULL + NB + i), count=2)
    chunks = (KV_GROUP + HEADS - 1) // HEADS
    smem = Memory(kv_s, qdo_s, ds_s, dq_s, row_s, sum_s, key_s, live_s, start_s, info_s, step_s, kb_s, qb_s)
    read, written = (k_desc, v_desc, q_desc, do_desc), (dq_desc, dk_desc, dv_desc)
    gl.warp_specialize([
        (consumer, (0, smem, bars, lost, S - T, chunks, num_n, num_bh, group, sm_scale, CUT)),
        (consumer, (1, smem, bars, lost, S - T, chunks, num_n, num_bh, group, sm_scale, CUT)),
        (producer, (read, c, rows, edges, counter, smem, bars, sm_scale, T, T_PAD, S, H, KV_GROUP, num_n, num_bh, group,
                    CUT)),
        (writer, (written, sums, ticket, edges, tile_lo, smem, bars, T, T_PAD, S, H, KV_GROUP, num_n, num_bh, group,
                  CUT)),
    ], [4, 2, 2], [CUT.REGISTERS, CUT.COPIER_REGISTERS, CUT.COPIER_REGISTERS])  # fmt: skip
