"""The producer of the Hopper backward: copies k, v, q and do by TMA, and finds each block's decays and walk."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..common.blocks import LOG2E
from .backward_shared import (
    HEAD_EMPTY,
    HEAD_FULL,
    I_HEADS,
    I_HI,
    I_INDEX,
    I_LO,
    I_STEPS,
    INFO,
    KV_EMPTY,
    KV_FULL,
    Q_FULL,
    acquire,
    key_tile,
)
from .forward_producer import difference, edges_of
from .gluon_names import tma_load


@gluon.jit
def _begin_together(index, num_tiles, COPIED, PER_ROUND: gl.constexpr):
    """Count the tile before as copied, then hold this one back until all those of earlier rounds are.

    Else the walks of long rows drift apart, until q, do and dq no longer come from the L2 cache: at 262144 tokens,
    16 query heads of 64 on 4 key/value heads, 536 GB from memory instead of 86. PER_ROUND 0: no rounds.
    """
    if PER_ROUND > 0:
        gl.atomic_add(COPIED, 1, sem="relaxed")
        before = gl.where(index < num_tiles, index // PER_ROUND * PER_ROUND, 0)
        copied = acquire(COPIED)
        while copied < before:
            copied = acquire(COPIED)


@gluon.jit
def _query_tiles(n, b, bh, num_n, edges, T, S, CUT: gl.constexpr):
    """Query tiles [lo, hi) that see key tile n, and the rows [clean_lo, clean_hi) that see it whole and no sink."""
    HAS_START: gl.constexpr = CUT.HAS_START
    SINK: gl.constexpr = CUT.SINK
    BM: gl.constexpr = CUT.BM
    BN: gl.constexpr = CUT.KEYS
    n0 = n * BN
    n_last = gl.minimum(n0 + BN, S) - 1
    shift = S - T
    lo = gl.maximum(n0 - shift, 0) // BM
    end = S
    clean_hi = T + BM
    if HAS_START:
        clean_hi = gl.load(edges_of(edges.end, b, bh, S, HAS_START) + n0) - shift
    if HAS_START == 1:  # a horizon's ends are in tile_hi, in accord with tile_lo, as the turns must be
        end = gl.load(edges.end + b * S + n_last)
    clean_lo = n0 + BN - 1 - shift
    hi = (gl.minimum(end - shift, T) + BM - 1) // BM
    if HAS_START == 2:
        hi = gl.minimum(hi, gl.load(edges.tile_hi + bh * num_n + n))
    if SINK > 0:
        # do the first SINK keys of the last document that starts here or before, or an earlier one's, lie in this tile?
        first = 0
        last_start = 0
        if HAS_START:
            first = gl.load(edges.start + b * S + n0)
            last_start = gl.load(edges.start + b * S + n_last)
        if (first + SINK > n0) | (last_start > first):
            clean_hi = 0
    return lo, gl.maximum(hi, lo), clean_lo, clean_hi


@gluon.jit
def _parts(x, L: gl.constexpr):
    """Three bfloat16 columns that add up to x."""
    x = gl.convert_layout(x, gl.SliceLayout(1, L))
    high = x.to(gl.bfloat16)
    rest = x - high.to(gl.float32)
    middle = rest.to(gl.bfloat16)
    low = (rest - middle.to(gl.float32)).to(gl.bfloat16)
    return high[:, None], middle[:, None], low[:, None]


@gluon.jit
def _store_parts(parts_s, x, delta, ROWS: gl.constexpr, QUERIES: gl.constexpr):
    """Eight columns: of queries x's three parts, three ones, two parts of -delta; of keys three ones, x's parts."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [gl.num_warps(), 1], [1, 0])
    high, middle, low = _parts(x, L)
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, L))[None, :]
    FIRST: gl.constexpr = 0 if QUERIES else 3
    one = gl.full([ROWS, 8], 1.0, gl.bfloat16, layout=L)
    parts = gl.where(column < 6, one, gl.zeros_like(one))
    parts = gl.where(column == FIRST, high, parts)
    parts = gl.where(column == FIRST + 1, middle, parts)
    parts = gl.where(column == FIRST + 2, low, parts)
    if QUERIES:
        high, middle, low = _parts(-delta, L)
        parts = gl.where(column == 6, high, gl.where(column == 7, middle, parts))
    parts_s.slice(0, 8, dim=1).store(parts)


@gluon.jit
def producer(read, c, lines, edges, counter, smem, bars, sm_scale, T, T_PAD, S, H, KV_GROUP, num_n, num_bh, group,
             CUT: gl.constexpr):  # fmt: skip
    HAS_START: gl.constexpr = CUT.HAS_START
    SINK: gl.constexpr = CUT.SINK
    BM: gl.constexpr = CUT.BM
    BN: gl.constexpr = CUT.KEYS
    HALVES: gl.constexpr = BN // 64
    NB: gl.constexpr = CUT.NB
    NKV: gl.constexpr = CUT.NKV
    HEADS: gl.constexpr = CUT.HEADS
    BIAS_BY_MMA: gl.constexpr = CUT.BIAS_BY_MMA
    k_desc, v_desc, q_desc, do_desc = read
    VEC: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    one = gl.full([1], 1, gl.int32, layout=VEC)
    index = gl.atomic_add(counter, 1)  # the first too: only programs that run have tiles that others wait for
    it = 0
    tiles = 0
    chunk = 0
    while index < num_n * num_bh:
        n, bhk = key_tile(index, num_n, num_bh, group)
        b = bhk // (H // KV_GROUP)
        hk = bhk - b * (H // KV_GROUP)
        n_last = gl.minimum(n * BN + BN, S) - 1
        kv = tiles % NKV
        mbarrier.wait(bars.index(KV_EMPTY + kv), ((tiles // NKV) & 1) ^ 1)
        mbarrier.expect(bars.index(KV_FULL + kv), HALVES * (k_desc.block_type.nbytes + v_desc.block_type.nbytes))
        for w in gl.static_range(HALVES):
            full = bars.index(KV_FULL + kv)
            tma_load(k_desc, [b, n * BN + w * 64, hk, 0], full, smem.kv.index(kv * 4 + w))
            tma_load(v_desc, [b, n * BN + w * 64, hk, 0], full, smem.kv.index(kv * 4 + HALVES + w))
        for g0 in range(0, KV_GROUP, HEADS):
            # what the consumers need to know of these heads: the walk, and each key's decay from the tile's last key
            heads = gl.minimum(KV_GROUP - g0, HEADS)
            bh0 = b * H + hk * KV_GROUP + g0
            slot = chunk & 1
            mbarrier.wait(bars.index(HEAD_EMPTY + slot), ((chunk >> 1) & 1) ^ 1)
            top = 0 * n
            steps = 0 * n
            lo = 0 * n
            clean_lo = 0 * n
            clean_hi = 0 * n + T + BM
            for g in range(heads):
                bh = bh0 + g
                lo, hi, clean_lo, clean = _query_tiles(n, b, bh, num_n, edges, T, S, CUT)
                clean_hi = gl.minimum(clean_hi, clean)
                top = gl.maximum(top, hi)
                steps += hi - lo
                c_hi = c.hi + bh.to(gl.int64) * S
                c_lo = c.lo + bh.to(gl.int64) * S
                ref_hi = gl.load(c_hi + n_last)
                ref_lo = gl.load(c_lo + n_last)
                for w in gl.static_range(HALVES):
                    keys = n * BN + w * 64 + gl.arange(0, 64, layout=VEC)
                    key_hi = gl.load(c_hi + keys, mask=keys < S, other=0.0)
                    key_lo = gl.load(c_lo + keys, mask=keys < S, other=0.0)
                    high, low = difference(ref_hi, ref_lo, key_hi, key_lo)
                    place = ((slot * HEADS + g) * 2 + w) * 2
                    smem.key.index(place).store(high)
                    smem.key.index(place + 1).store(low)
                    if BIAS_BY_MMA:
                        _store_parts(smem.kb.index(slot * 2 + w), high / (sm_scale * LOG2E), high, 64, False)
                smem.info.index(slot * INFO + I_HEADS + g).store(one * hi)
            if SINK > 0:
                for w in gl.static_range(HALVES):
                    keys = n * BN + w * 64 + gl.arange(0, 64, layout=VEC)
                    sink_end = gl.full([64], SINK, gl.int32, layout=VEC)
                    if HAS_START:
                        sink_end += gl.load(edges.start + b * S + keys, mask=keys < S, other=0)
                    smem.live.index(slot * 2 + w).store(gl.where(keys < sink_end, 0.0, 1.0))
            smem.info.index(slot * INFO + I_INDEX).store(one * index)
            smem.info.index(slot * INFO + I_LO).store(one * lo)
            smem.info.index(slot * INFO + I_HI).store(one * top)
            smem.info.index(slot * INFO + I_STEPS).store(one * steps)
            if BIAS_BY_MMA:
                fence_async_shared()
            mbarrier.arrive(bars.index(HEAD_FULL + slot), count=1)
            chunk += 1

            for i in range(lo, top):
                m = top - 1 - (i - lo)
                masked = ((m * BM < clean_lo) | (m * BM + BM > clean_hi)).to(gl.int32)
                rows = m * BM + gl.arange(0, BM, layout=VEC)
                inside = rows < T
                for g in range(heads):
                    bh = bh0 + g
                    visited = 0 * m == 0
                    if HAS_START == 2 and HEADS > 1:
                        visited = m < gl.max(smem.info.index(slot * INFO + I_HEADS + g).load(VEC), 0)
                    if visited:
                        if HALVES == 1:  # do has a slot of its own, before q's
                            full = bars.index(Q_FULL + it % NB)
                            mbarrier.wait(bars.index(Q_FULL + NB + it % NB), ((it // NB) & 1) ^ 1)
                            mbarrier.expect(full, do_desc.block_type.nbytes)
                            tma_load(do_desc, [b, m * BM, hk * KV_GROUP + g0 + g, 0], full, smem.qdo.index(it % NB))
                            mbarrier.arrive(full, count=1)
                            it += 1
                        s = it % NB
                        c_hi = c.hi + bh.to(gl.int64) * S
                        c_lo = c.lo + bh.to(gl.int64) * S
                        ref_hi = gl.load(c_hi + n_last)
                        ref_lo = gl.load(c_lo + n_last)
                        row_hi = gl.load(c_hi + S - T + rows, mask=inside, other=0.0)
                        row_lo = gl.load(c_lo + S - T + rows, mask=inside, other=0.0)
                        row_lse = gl.load(lines.lse + bh.to(gl.int64) * T + rows, mask=inside, other=-float("inf"))
                        row_delta = gl.load(lines.delta + bh.to(gl.int64) * T_PAD + rows)
                        if HAS_START:
                            starts = edges_of(edges.start, b, bh, S, HAS_START)
                            start = gl.load(starts + S - T + rows, mask=inside, other=S)
                        full = bars.index(Q_FULL + s)
                        mbarrier.wait(bars.index(Q_FULL + NB + s), ((it // NB) & 1) ^ 1)
                        mbarrier.expect(full, q_desc.block_type.nbytes * HALVES)
                        h = hk * KV_GROUP + g0 + g
                        tma_load(q_desc, [b, m * BM, h, 0], full, smem.qdo.index(s))
                        if HALVES == 2:  # as large as q
                            tma_load(do_desc, [b, m * BM, h, 0], full, smem.qdo.index(NB + s))
                        high, low = difference(row_hi, row_lo, ref_hi, ref_lo)
                        empty = row_lse == -float("inf")  # rows beyond T and rows that see nothing: weight 0
                        high, low = difference(high, low, gl.where(empty, 0.0, row_lse), gl.zeros_like(low))
                        smem.row.index(s).store(gl.where(empty, -float("inf"), high))
                        smem.row.index(NB + s).store(low)
                        if BIAS_BY_MMA:
                            bias = gl.where(empty, -1e30, high / (sm_scale * LOG2E))
                            _store_parts(smem.qb.index(s), bias, row_delta, BM, True)
                            fence_async_shared()
                        else:
                            smem.row.index(2 * NB + s).store(row_delta)
                        if SINK > 0:
                            smem.row.index(3 * NB + s).store(gl.where(empty, -float("inf"), -row_lse))
                        if HAS_START:
                            smem.start.index(s).store(start)
                        smem.step.index(s).store(one * (m * 32 + g * 2 + masked))
                        mbarrier.arrive(full, count=1)
                        it += 1
        index = gl.atomic_add(counter, 1)
        _begin_together(index, num_n * num_bh, counter + 1, CUT.PER_ROUND)
        tiles += 1
    mbarrier.wait(bars.index(HEAD_EMPTY + (chunk & 1)), ((chunk >> 1) & 1) ^ 1)
    smem.info.index((chunk & 1) * INFO + I_INDEX).store(one * -1)
    mbarrier.arrive(bars.index(HEAD_FULL + (chunk & 1)), count=1)
