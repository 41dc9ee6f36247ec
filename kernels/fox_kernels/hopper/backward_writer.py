"""The writer of the Hopper backward: adds dq and row sums to memory, in turn, and stores dk, dv and column sums."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .backward_shared import (
    DQ_EMPTY,
    DQ_FULL,
    HEAD_DONE,
    HEAD_EMPTY,
    HEAD_FULL,
    I_HEADS,
    I_HI,
    I_INDEX,
    I_LO,
    INFO,
    KV_EMPTY,
    acquire,
    key_tile,
    scalar,
)
from .gluon_names import thread_barrier, tma_reduce_add, tma_store


@gluon.jit
def _first(m, b, bh, num_m, START, TILE_LO, T, S, CUT: gl.constexpr):
    """The first key tile that adds to query tile m; it never falls from one m to the next."""
    if CUT.HAS_START == 2:
        return gl.load(TILE_LO + bh * num_m + m)
    elif CUT.HAS_START:
        return gl.load(START + b * S + S - T + m * CUT.BM) // CUT.KEYS
    else:
        return 0 * m


@gluon.jit
def writer(written, sums_of, tickets, edges, tile_lo, smem, bars, T, T_PAD, S, H, KV_GROUP, num_n, num_bh, group,
           CUT: gl.constexpr):  # fmt: skip
    HAS_START: gl.constexpr = CUT.HAS_START
    SINK: gl.constexpr = CUT.SINK
    BM: gl.constexpr = CUT.BM
    BN: gl.constexpr = CUT.KEYS
    HALVES: gl.constexpr = BN // 64
    PAIRS: gl.constexpr = 3 - HALVES  # of blocks of dq's columns
    NKV: gl.constexpr = CUT.NKV
    HEADS: gl.constexpr = CUT.HEADS
    DETERMINISTIC: gl.constexpr = CUT.DETERMINISTIC
    dq_desc, dk_desc, dv_desc = written
    VEC: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    # heads that a horizon ends at different query tiles are not visited in turn: no looking ahead
    EACH: gl.constexpr = HAS_START == 2 and HEADS > 1
    num_m = T_PAD // BM
    it = 0
    step = 0
    tiles = 0
    chunk = 0
    mbarrier.wait(bars.index(HEAD_FULL), 0)
    index = scalar(smem.info.index(I_INDEX))
    while index >= 0:
        n, bhk = key_tile(index, num_n, num_bh, group)
        b = bhk // (H // KV_GROUP)
        hk = bhk - b * (H // KV_GROUP)
        for g0 in range(0, KV_GROUP, HEADS):
            heads = gl.minimum(KV_GROUP - g0, HEADS)
            bh0 = b * H + hk * KV_GROUP + g0
            slot = chunk & 1
            mbarrier.wait(bars.index(HEAD_FULL + slot), (chunk >> 1) & 1)
            lo = scalar(smem.info.index(slot * INFO + I_LO))
            hi = scalar(smem.info.index(slot * INFO + I_HI))
            now = -1 + 0 * n
            turn = n
            last = gl.maximum(hi - 1, 0)
            # all key tiles before this one add to all query tiles of this walk: the turn is n, nothing is read for it
            whole = 0 * n == 0
            if HAS_START:
                for g in range(heads):
                    if EACH:
                        whole = whole & (scalar(smem.info.index(slot * INFO + I_HEADS + g)) == hi)
                    whole = whole & (_first(last, b, bh0 + g, num_m, edges.start, tile_lo, T, S, CUT) == 0)
            if DETERMINISTIC and not (EACH or whole):
                turn = n - _first(last, b, bh0, num_m, edges.start, tile_lo, T, S, CUT)
            for i in range(lo, hi):
                m = hi - 1 - (i - lo)
                for g in range(heads):
                    bh = bh0 + g
                    visited = 0 * m == 0
                    if EACH:
                        visited = whole | (m < scalar(smem.info.index(slot * INFO + I_HEADS + g)))
                    if visited:
                        rows = bh * T_PAD + m * BM
                        ticket = tickets + bh * num_m + m
                        more = g + 1 < heads
                        ahead = gl.where(more, m, gl.maximum(m - 1, lo))
                        after = gl.where(more, bh + 1, bh0)
                        later = turn
                        if DETERMINISTIC:  # before the wait for dq: as a rule the turn has come by then
                            if EACH and not whole:
                                turn = n - _first(m, b, bh, num_m, edges.start, tile_lo, T, S, CUT)
                                now = -1 + 0 * n
                            while now < turn:
                                now = acquire(ticket)
                            if not (EACH or whole):  # the next tile's, from memory: where nobody waits for this one
                                later = n - _first(ahead, b, after, num_m, edges.start, tile_lo, T, S, CUT)
                        down = 64 if BM == 128 else 0
                        across = 0 if BM == 128 else dq_desc.block_type.shape[1]
                        for pair in gl.static_range(PAIRS):
                            if pair > 0:
                                tma.store_wait(0)
                                mbarrier.arrive(bars.index(DQ_EMPTY), count=1)
                                it += 1
                            mbarrier.wait(bars.index(DQ_FULL), it & 1)
                            left = pair * 2 * across
                            if DETERMINISTIC and turn == 0:  # the first to come finds no zeros
                                for w in gl.static_range(2):
                                    tma_store(dq_desc, [rows + w * down, left + w * across], smem.dq.index(w))
                            else:
                                for w in gl.static_range(2):
                                    tma_reduce_add(dq_desc, [rows + w * down, left + w * across], smem.dq.index(w))
                        # while those run, and before the release: row sums are added in turn, too
                        # all queries', of each half of the keys
                        sums = gl.zeros([BM], gl.float32, layout=VEC)
                        for part in gl.static_range(4 * HALVES):  # of 16 keys
                            place = smem.sum.index(step % (smem.sum.shape[0] // HALVES) * HALVES + part // 4)
                            sums += place.slice(part % 4 * BM, BM).load(VEC)
                        gl.atomic_add(sums_of.row_sum + rows + gl.arange(0, BM, layout=VEC), sums, sem="relaxed")
                        tma.store_wait(0)
                        mbarrier.arrive(bars.index(DQ_EMPTY), count=1)
                        if DETERMINISTIC:
                            if whole or not EACH:
                                now = acquire(tickets + after * num_m + ahead)  # while this one's sums land
                            turn = later
                            gl.inline_asm_elementwise(
                                "cp.async.bulk.wait_group 0; mov.b32 $0, 0;", "=r,r", [m], dtype=gl.int32,
                                is_pure=False, pack=1,
                            )  # fmt: skip
                            thread_barrier()
                            gl.atomic_add(ticket, 1, sem="release", scope="gpu")
                        it += 1
                        step += 1
            # column sums of these heads, where their decays were or, of 64 keys, behind them
            mbarrier.wait(bars.index(HEAD_DONE + slot), (chunk >> 1) & 1)
            for g in range(heads):
                for w in gl.static_range(HALVES):
                    keys = n * BN + w * 64 + gl.arange(0, 64, layout=VEC)
                    column = smem.key.index(((slot * HEADS + g) * 2 + w + 2 - HALVES) * 2).load(VEC)
                    if SINK > 0:
                        column = gl.where(smem.live.index(slot * 2 + w).load(VEC) > 0, column, 0.0)
                    gl.store(sums_of.dc + (bh0 + g).to(gl.int64) * S + keys, -column, mask=keys < S)
            mbarrier.arrive(bars.index(HEAD_EMPTY + slot), count=1)
            chunk += 1
        kv = tiles % NKV
        for w in gl.static_range(HALVES):
            tma_store(dk_desc, [b, n * BN + w * 64, hk, 0], smem.kv.index(kv * 4 + w))
            tma_store(dv_desc, [b, n * BN + w * 64, hk, 0], smem.kv.index(kv * 4 + HALVES + w))
        tma.store_wait(0)
        mbarrier.arrive(bars.index(KV_EMPTY + kv), count=1)
        tiles += 1
        mbarrier.wait(bars.index(HEAD_FULL + (chunk & 1)), (chunk >> 1) & 1)
        index = scalar(smem.info.index((chunk & 1) * INFO + I_INDEX))
