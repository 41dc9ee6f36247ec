"""The producer partition of the Hopper forward: which tiles and key blocks, copies of q, k, v, and each key's decay."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .gluon_names import tma_load


@gluon.jit
def tile_of(index, num_m, num_bh, group):
    """The index-th tile: groups of heads whose keys fit the L2 cache together, in each group the longest rows first."""
    per_group = group * num_m
    g = index // per_group
    r = index - g * per_group
    width = gl.minimum(group, num_bh - g * group)
    return num_m - 1 - r // width, g * group + r % width


@gluon.jit
def difference(a_hi, a_lo, b_hi, b_lo):
    """a - b of two-float numbers as a float and its remainder."""
    high = a_hi - b_hi
    back = high - a_hi
    rest = (a_hi - (high - back)) - (b_hi + back) + (a_lo - b_lo)
    total = high + rest
    return total, rest - (total - high)


@gluon.jit
def over(high, low, scale):
    """A two-float number divided by a float, in two floats."""
    quotient = high / scale
    rest = gl.fma(-quotient, scale, high) + low
    return quotient, rest / scale


@gluon.jit
def _store_parts(parts_s, bias, BN: gl.constexpr):
    """Three bfloat16 that add up to each key's bias, as 16 more columns of k: q's are ones there."""
    L: gl.constexpr = gl.BlockedLayout([1, 16], [32, 1], [4, 1], [1, 0])
    bias = gl.convert_layout(bias, gl.SliceLayout(1, L))
    high = bias.to(gl.bfloat16)
    middle = (bias - high.to(gl.float32)).to(gl.bfloat16)
    low = (bias - high.to(gl.float32) - middle.to(gl.float32)).to(gl.bfloat16)
    column = gl.arange(0, 16, layout=gl.SliceLayout(0, L))[None, :]
    parts = gl.where(column == 0, high[:, None], gl.where(column == 1, middle[:, None], low[:, None]))
    parts_s.store(gl.where(column < 3, parts, gl.zeros_like(parts)))
    fence_async_shared()


@gluon.jit
def edges_of(EDGES, b, bh, S, KIND: gl.constexpr):
    """A pointer to the row of START or END: one for all heads (KIND 1) or, with a horizon, one per head (2)."""
    if KIND == 2:
        return EDGES + bh.to(gl.int64) * S
    else:
        return EDGES + b * S


@gluon.jit
def origin_of(ORIGIN, b, S, position, visible, KIND: gl.constexpr):
    """Where the document at a position begins: behind a horizon (KIND 2) not at the first key that it sees, visible."""
    if KIND < 2:
        return visible
    elif ORIGIN is None:
        return 0 * visible
    else:
        return gl.load(ORIGIN + b * S + position)


@gluon.jit
def key_blocks(m, b, bh, START, ORIGIN, T, S, HAS_START: gl.constexpr, SINK: gl.constexpr, BM: gl.constexpr,
               BN: gl.constexpr):  # fmt: skip
    """Which key blocks query tile m visits: main ones down from nb_hi - 1, then the sink's down from sb_hi - 1."""
    row0 = m * BM
    last = gl.minimum(row0 + BM, T) - 1
    first_end = row0 + S - T
    nb_hi = (last + S - T) // BN + 1
    start_first = 0
    start_last = 0
    if HAS_START:
        starts = edges_of(START, b, bh, S, HAS_START)
        start_first = gl.load(starts + first_end)
        start_last = gl.load(starts + last + S - T)
    lo = start_first
    if HAS_START:  # padded rows start behind themselves: yet each warpgroup must have the block its rows lie in
        lo = gl.minimum(lo, first_end)
    nb_lo = gl.minimum(lo // BN, nb_hi - 1)
    n_main = nb_hi - nb_lo
    sb_hi = 0
    n_all = n_main
    clean_lo = start_last
    if SINK > 0:
        origin = origin_of(ORIGIN, b, S, first_end, start_first, HAS_START)
        sb_hi = gl.minimum((origin + SINK + BN - 1) // BN, nb_lo)
        n_all += gl.maximum(sb_hi - origin // BN, 0)
        clean_lo = gl.maximum(clean_lo, origin_of(ORIGIN, b, S, last + S - T, start_last, HAS_START) + SINK)
    return row0, first_end, nb_hi, n_main, sb_hi, n_all, clean_lo


@gluon.jit
def _hand_over(index, smem, bars, tiles, one, num_m, num_bh, group, H):
    """Tell the consumers the next tile: whether there is one, its place in the rows, batch and head."""
    m, bh = tile_of(index, num_m, num_bh, group)
    b = bh // H
    h = bh - b * H
    slot = tiles & 1
    mbarrier.wait(bars.n_empty.index(slot), ((tiles >> 1) & 1) ^ 1)
    smem.n.index(slot * 4).store(one * (index < num_m * num_bh).to(gl.int32))
    smem.n.index(slot * 4 + 1).store(one * m)
    smem.n.index(slot * 4 + 2).store(one * b)
    smem.n.index(slot * 4 + 3).store(one * h)
    mbarrier.arrive(bars.n_full.index(slot), count=1)
    return m, b, h


@gluon.jit
def producer(read, c, starts, COUNTER, smem, bars, scale, T, S, H, KV_GROUP, num_m, num_bh, group, CUT: gl.constexpr,
             QB: gl.constexpr):  # fmt: skip
    HAS_START: gl.constexpr = CUT.HAS_START
    SINK: gl.constexpr = CUT.SINK
    NC: gl.constexpr = CUT.NC
    BN: gl.constexpr = CUT.BN
    D: gl.constexpr = CUT.D
    DX: gl.constexpr = CUT.DX
    NB: gl.constexpr = CUT.NB
    q_desc, k_desc, v_desc, qx_desc, kx_desc, vx_desc = read
    START, ORIGIN = starts
    BM: gl.constexpr = NC * 64
    VEC: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    one = gl.full([1], 1, gl.int32, layout=VEC)
    num_tiles = num_m * num_bh
    it = 0
    tiles = 0
    index = gl.program_id(0)
    m, b, h = _hand_over(index, smem, bars, 0, one, num_m, num_bh, group, H)
    while index < num_tiles:
        bh = b * H + h
        hk = h // KV_GROUP
        row0, first_end, nb_hi, n_main, sb_hi, n_all, _clean_lo = key_blocks(
            m, b, bh, START, ORIGIN, T, S, HAS_START, SINK, BM, BN
        )
        c_hi = c.hi + bh.to(gl.int64) * S
        c_lo = c.lo + bh.to(gl.int64) * S
        ref_hi = gl.load(c_hi + first_end)
        ref_lo = gl.load(c_lo + first_end)
        for w in gl.static_range(NC):
            slot = tiles % QB * NC + w
            rows = row0 + w * 64 + gl.arange(0, 64, layout=VEC)
            row_hi = gl.load(c_hi + S - T + rows, mask=rows < T, other=0.0)
            row_lo = gl.load(c_lo + S - T + rows, mask=rows < T, other=0.0)
            full = bars.q_full.index(slot)
            mbarrier.wait(bars.q_empty.index(slot), ((tiles // QB) & 1) ^ 1)
            mbarrier.expect(full, q_desc.block_type.nbytes + (qx_desc.block_type.nbytes if DX else 0))
            tma_load(q_desc, [b, row0 + w * 64, h, 0], full, smem.q.index(slot))
            if DX:
                tma_load(qx_desc, [b, row0 + w * 64, h, D], full, smem.qx.index(slot))
            decay, decay_lo = difference(row_hi, row_lo, ref_hi, ref_lo)
            decay, decay_lo = over(decay, decay_lo, scale)
            smem.d.index(slot).store(decay)
            smem.dl.index(slot).store(decay_lo)
            mbarrier.arrive(full, count=1)
        tiles += 1
        ahead = gl.maximum(n_all - NB, 1) - 1
        b_next = b
        h_next = h
        for i in range(n_all):
            n = nb_hi - 1 - i
            if SINK > 0:
                n = gl.where(i < n_main, n, sb_hi - 1 - (i - n_main))
            s = it % NB
            ph = ((it // NB) & 1) ^ 1
            offs_n = n * BN + gl.arange(0, BN, layout=VEC)
            hi = gl.load(c_hi + offs_n, mask=offs_n < S, other=0.0)
            lo = gl.load(c_lo + offs_n, mask=offs_n < S, other=0.0)
            mbarrier.wait(bars.k_empty.index(s), ph)
            mbarrier.expect(bars.k_full.index(s), k_desc.block_type.nbytes + (kx_desc.block_type.nbytes if DX else 0))
            tma_load(k_desc, [b, n * BN, hk, 0], bars.k_full.index(s), smem.k.index(s))
            if DX:
                tma_load(kx_desc, [b, n * BN, hk, D], bars.k_full.index(s), smem.kx.index(s))
            bias, bias_lo = difference(ref_hi, ref_lo, hi, lo)
            bias, bias_lo = over(bias, bias_lo, scale)
            smem.b.index(s).store(bias)
            smem.bl.index(s).store(bias_lo)
            _store_parts(smem.kb.index(s), bias, BN)
            mbarrier.arrive(bars.k_full.index(s), count=1)
            mbarrier.wait(bars.v_empty.index(s), ph)
            mbarrier.expect(bars.v_full.index(s), v_desc.block_type.nbytes + (vx_desc.block_type.nbytes if DX else 0))
            tma_load(v_desc, [b, n * BN, hk, 0], bars.v_full.index(s), smem.v.index(s))
            if DX:
                tma_load(vx_desc, [b, n * BN, hk, D], bars.v_full.index(s), smem.vx.index(s))
            it += 1
            if i == ahead:
                index = gl.atomic_add(COUNTER, 1) + gl.num_programs(0)
                m, b_next, h_next = _hand_over(index, smem, bars, tiles, one, num_m, num_bh, group, H)
        b = b_next
        h = h_next
