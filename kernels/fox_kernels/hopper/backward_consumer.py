"""A consumer warpgroup of the Hopper backward: its key tiles' dk, dv and column sums of dS, walk after walk."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .backward_shared import HEAD_DONE, HEAD_FULL, I_INDEX, I_STEPS, INFO, KV_FULL, key_tile, scalar
from .backward_sums import COLUMNS, sums_over_queries
from .backward_walk import MEET, READ, listen, tell, walk
from .backward_wide import wide_walk


@gluon.jit
def consumer(w: gl.constexpr, smem, bars, lost, shift, chunks, num_n, num_bh, group, sm_scale, CUT: gl.constexpr):
    D: gl.constexpr = CUT.D
    BM: gl.constexpr = CUT.BM
    NKV: gl.constexpr = CUT.NKV
    HEADS: gl.constexpr = CUT.HEADS
    GENERATIONS: gl.constexpr = CUT.GENERATIONS
    HALVES: gl.constexpr = CUT.KEYS // 64
    HALF: gl.constexpr = w % HALVES  # of the tile's keys; of 64 keys, w = 0 has dv, w = 1 dk and the sums
    HAS_DV: gl.constexpr = HALVES == 2 or w == 0
    HAS_DK: gl.constexpr = HALVES == 2 or w == 1
    S_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BM, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    dtype: gl.constexpr = smem.qdo.dtype
    listen(MEET)
    if HAS_DV:
        for g in gl.static_range(GENERATIONS):
            tell(READ + 2 * w + g)
    it = 0
    tiles = 0
    chunk = 0
    mbarrier.wait(bars.index(HEAD_FULL), 0)
    index = scalar(smem.info.index(I_INDEX))
    while index >= 0:
        n, bh = key_tile(index, num_n, num_bh, group)
        kv = (tiles % NKV) * 4
        dk = gl.zeros([64, D], gl.float32, layout=O_L)
        dv = gl.zeros([64, D], gl.float32, layout=O_L)
        if lost is not None and w == 0:
            row = bh.to(gl.int64) * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, O_L))
            if n == 0:  # the rounding error of the first rows' weights
                column = gl.arange(0, D, layout=gl.SliceLayout(0, O_L))[None, :]
                if CUT.DH == D:
                    dv = gl.load(lost + row[:, None] * D + column)
                else:
                    dv = gl.load(lost + row[:, None] * CUT.DH + column, mask=column < CUT.DH, other=0.0)
        mbarrier.wait(bars.index(KV_FULL + tiles % NKV), (tiles // NKV) & 1)
        for _c in range(chunks):
            slot = chunk & 1
            mbarrier.wait(bars.index(HEAD_FULL + slot), (chunk >> 1) & 1)
            steps = scalar(smem.info.index(slot * INFO + I_STEPS))
            if HEADS == 1:
                sums = sums_over_queries(gl.zeros([64, BM], gl.float32, layout=S_L), 0, BM, HEADS)
            else:
                sums = gl.zeros([64, 8], gl.float32, layout=COLUMNS)
            run: gl.constexpr = wide_walk if HALVES == 1 else walk
            dk, dv, sums, it = run(w, steps, it, n, kv, slot, dk, dv, sums, smem, bars, shift, sm_scale, CUT)
            columns = gl.arange(0, 8, layout=gl.SliceLayout(0, COLUMNS))[None, :]
            if HAS_DK:  # dv's warpgroup may still read the decays before them
                for g in gl.static_range(HEADS):
                    if HEADS == 1:
                        smem.key.index((slot * 2 + w) * 2).store(gl.sum(sums, 1))
                    else:
                        mine = gl.where(columns == g, sums, -float("inf"))
                        smem.key.index(((slot * HEADS + g) * 2 + w) * 2).store(gl.max(mine, 1))
            if _c + 1 < chunks:  # no wait for the writer, who may be a step behind
                mbarrier.arrive(bars.index(HEAD_DONE + slot), count=1)
            chunk += 1
        listen(MEET)  # both read k and v until the last dq
        if HAS_DK:
            smem.kv.index(kv + HALF).reshape([64, D]).store((dk * sm_scale).to(dtype))
        if HAS_DV:
            smem.kv.index(kv + HALVES + HALF).reshape([64, D]).store(dv.to(dtype))
        fence_async_shared()
        mbarrier.arrive(bars.index(HEAD_DONE + ((chunk & 1) ^ 1)), count=1)
        tiles += 1
        mbarrier.wait(bars.index(HEAD_FULL + (chunk & 1)), (chunk >> 1) & 1)
        index = scalar(smem.info.index((chunk & 1) * INFO + I_INDEX))
