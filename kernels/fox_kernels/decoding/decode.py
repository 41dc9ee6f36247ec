"""The kernels of decoding: one or a few queries against a long cache, the keys split over the GPU.

One program per sequence, kv head and stretch of keys; the T * G queries of the head's group are the rows of its tile,
so K and V are read once for all of them. Each program writes its part's o and lse, a second kernel merges them. c is
kept as two floats beside the cache (`append.append` lengthens it); every decay is the exact difference c_i - c_j.
Blocks of keys begin at multiples of their size: only so does Triton know that c may be copied 16 bytes at a time.

With a length on the device the cache holds as many tokens as it says before the T new ones, and S is only the most that
it may hold: one captured graph serves every length up to S. With an offset all sequences share buffers: position j of
sequence b lies at offset[b] + j.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..common.blocks import scaled, visible
from ..common.groups import Strides
from .search import advance


class CacheStrides(NamedTuple):
    """Strides of q and of the cache, c as (B, GROUP, Hkv, S): "token" is 0 where the query heads of a group share c."""

    q: Strides
    k: Strides
    v: Strides
    c: Strides


class Parts(NamedTuple):
    """Partial results of the programs: o and lse over their keys; where each pair's begin, None if all have as many."""

    o: Any
    lse: Any
    begin: Any


class Tile(NamedTuple):
    """Constants of the split kernel, beside the `Problem`.

    pairs: (sequence, kv head) pairs that share out the programs, rounded up; 0: each has as many.
    aligned: of how many gates in a row the address is a multiple.
    """

    rows: int
    block: int
    pairs: int
    aligned: int


class Walk(NamedTuple):
    """Keys that a pair reads: [least, sinks_end) and [low, S), in blocks that begin at multiples of their size.

    sink_blocks: blocks of sinks alone; blocks: with these from low on.
    """

    least: Any
    sinks_end: Any
    low: Any
    sink_blocks: Any
    blocks: Any


@triton.jit
def walk_of(pair, known, S, T, heads, window, sink, start, first, BN: tl.constexpr):
    """The `Walk` of one or more (sequence, kv head) pairs."""
    least = pair * 0
    if start is not None:
        least = tl.maximum(tl.load(start + pair // heads, mask=known, other=0), 0)
    low = least
    if window is not None:
        low = tl.maximum(low, S - T - window + 1)
    if first is not None:
        low = tl.maximum(low, tl.load(first + pair, mask=known, other=0))
    sinks_end, sink_blocks = least, pair * 0
    if sink is not None:
        sinks_end = tl.minimum(least + sink, low)
        sink_blocks = tl.maximum(tl.minimum(tl.cdiv(sinks_end, BN), low // BN) - least // BN, 0)
    return Walk(least, sinks_end, low, sink_blocks, sink_blocks + tl.maximum(tl.cdiv(S, BN) - low // BN, 1))


@triton.jit(do_not_specialize=["S", "slots", "pairs", "window", "sink"])
def split_kernel(
    q, k, v, c, start, first, length, offset, parts, strides, T, S, H, pairs, slots, window, sink, scale, horizon2,
    PROBLEM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    BN: tl.constexpr = TILE.block
    ROWS: tl.constexpr = TILE.rows
    PAIRS: tl.constexpr = TILE.pairs
    ALIGNED: tl.constexpr = TILE.aligned
    D0: tl.constexpr = PROBLEM.d0
    D1: tl.constexpr = PROBLEM.d1
    GROUP: tl.constexpr = PROBLEM.group
    heads = H // GROUP
    if length is not None:
        S = tl.load(length) + T
    split, splits, kv = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    out = kv.to(tl.int64) * splits + split
    if PAIRS > 0:  # stretches of one length, shared out over all pairs
        pair = tl.arange(0, PAIRS)
        some = pair < pairs
        blocks = walk_of(pair, some, S, T, heads, window, sink, start, first, BN).blocks
        blocks = tl.where(some, blocks, 0)
        chunk = tl.maximum(tl.cdiv(tl.sum(blocks, 0), slots), 1)
        programs = tl.cdiv(blocks, chunk)
        ends = tl.cumsum(programs, 0)
        kv = tl.sum((ends <= split).to(tl.int32), 0)
        if split == 0:
            tl.store(parts.begin + pair, ends - programs, mask=some)
            tl.store(parts.begin + pairs, tl.sum(programs, 0))
        if kv >= pairs:
            return
        out = split.to(tl.int64)
        split -= tl.sum(tl.where(pair == kv, ends - programs, 0), 0)
    walk = walk_of(kv, True, S, T, heads, window, sink, start, first, BN)
    if PAIRS == 0:
        chunk = tl.cdiv(walk.blocks, splits)
    begin = split * chunk
    b, h_kv = (kv // heads).to(tl.int64), (kv % heads).to(tl.int64)
    rows, offs_n = tl.arange(0, ROWS), tl.arange(0, BN)
    offs_d0 = tl.arange(0, D0)
    offs_d1 = D0 + tl.arange(0, D1 if D1 > 0 else D0)
    real = rows < T * GROUP
    t, h = tl.minimum(rows // GROUP, T - 1), h_kv * GROUP + rows % GROUP
    pos = S - T + t

    q_rows = q + b * strides.q.batch + t * strides.q.token + h * strides.q.head
    q0 = tl.load(q_rows[:, None] + offs_d0[None, :], mask=real[:, None], other=0.0)
    q1 = q0
    acc0 = tl.zeros([ROWS, D0], tl.float32)
    acc1 = acc0
    if D1 > 0:
        q1 = tl.load(q_rows[:, None] + offs_d1[None, :], mask=real[:, None], other=0.0)
        acc1 = tl.zeros([ROWS, D1], tl.float32)
    c_rows = b * strides.c.batch + h_kv * strides.c.head + rows % GROUP * strides.c.token
    if offset is not None:
        at = tl.multiple_of(tl.load(offset + b).to(tl.int64), 64)
        c_rows += at
        k += at * strides.k.token
        v += at * strides.v.token
    c_i_hi, c_i_lo = tl.load(c.hi + c_rows + pos), tl.load(c.lo + c_rows + pos)
    k += b * strides.k.batch + h_kv * strides.k.head
    v += b * strides.v.batch + h_kv * strides.v.head
    limit = tl.cdiv(S, ALIGNED) * ALIGNED
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)

    for it in range(begin, tl.minimum(begin + chunk, walk.blocks)):
        block = walk.low // BN + it - walk.sink_blocks
        if sink is not None:
            block = tl.where(it < walk.sink_blocks, walk.least // BN + it, block)
        n0 = block * BN
        j = n0 + offs_n
        inside = j < S
        if start is not None or window is not None or first is not None:
            live = j >= walk.low
            if sink is not None:
                live = live | ((j >= walk.least) & (j < walk.sinks_end))
            inside = inside & live
        k_rows = k + n0.to(tl.int64) * strides.k.token + offs_n[:, None] * strides.k.token
        v_rows = v + n0.to(tl.int64) * strides.v.token + offs_n[:, None] * strides.v.token
        k0 = tl.load(k_rows + offs_d0[None, :], mask=inside[:, None], other=0.0)
        v0 = tl.load(v_rows + offs_d0[None, :], mask=inside[:, None], other=0.0)
        s = tl.dot(q0, tl.trans(k0), input_precision=PROBLEM.precision)
        if D1 > 0:
            k1 = tl.load(k_rows + offs_d1[None, :], mask=inside[:, None], other=0.0)
            v1 = tl.load(v_rows + offs_d1[None, :], mask=inside[:, None], other=0.0)
            s = tl.dot(q1, tl.trans(k1), s, input_precision=PROBLEM.precision)
        s, _tanh = scaled(s, scale, PROBLEM.exact_tanh)
        gates = c_rows[:, None] + j[None, :]
        known = real[:, None] & (j < limit)[None, :]
        bias = c_i_hi[:, None] - tl.load(c.hi + gates, mask=known, other=0.0)
        bias += c_i_lo[:, None] - tl.load(c.lo + gates, mask=known, other=0.0)
        lower, is_sink = None, None
        if window is not None:
            lower = pos[:, None] - window + 1
        if sink is not None:
            is_sink = (j < walk.least + sink)[None, :]
            bias = tl.where(is_sink, 0.0, bias)
        seen = visible(pos[:, None], j[None, :], None if start is None else walk.least, lower, is_sink, S)
        if horizon2 is not None:  # a sink's bias is 0; NaN is to be seen
            seen = seen & ((bias <= 0.0 - horizon2) == 0)
        s = tl.where(seen, s + bias, float("-inf"))
        top = tl.maximum(m, tl.max(s, 1))
        base = tl.where(top == float("-inf"), 0.0, top)
        p = tl.exp2(s - base[:, None])
        alpha = tl.exp2(m - base)
        l = l * alpha + tl.sum(p, 1)
        acc0 = tl.dot(p.to(v0.dtype), v0, acc0 * alpha[:, None], input_precision=PROBLEM.precision)
        if D1 > 0:
            acc1 = tl.dot(p.to(v1.dtype), v1, acc1 * alpha[:, None], input_precision=PROBLEM.precision)
        m = top

    empty = l == 0  # NaN isn't
    l_safe = tl.where(empty, 1.0, l)
    out = out * T * GROUP + rows
    tl.store(parts.lse + out, tl.where(empty, float("-inf"), m + tl.log2(l_safe)), mask=real)
    part = parts.o + out[:, None] * (D0 + D1)
    tl.store(part + offs_d0[None, :], acc0 / l_safe[:, None], mask=real[:, None])
    if D1 > 0:
        tl.store(part + offs_d1[None, :], acc1 / l_safe[:, None], mask=real[:, None])


@triton.jit(do_not_specialize=["S", "splits"])
def merge_kernel(
    parts, o, lse, c, first, length, offset, strides, T, S, H, splits, horizon2,
    GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, kv = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows, heads = T * GROUP, H // GROUP
    if first is not None and row == rows:  # the last row of programs looks where the next step may begin
        if length is not None:
            S = tl.load(length) + T
        advance(first, kv, S - T, H, c, strides, offset, horizon2, GROUP, ROWS)
        return
    out = kv * splits
    if parts.begin is not None:
        out = tl.load(parts.begin + kv).to(tl.int64)
        splits = tl.load(parts.begin + kv + 1) - out.to(tl.int32)
    offs_d, offs_p = tl.arange(0, DP), tl.arange(0, PARTS)
    lse_rows = parts.lse + out * rows + row
    o_rows = parts.o + (out * rows + row) * D
    top, total = float("-inf"), 0.0
    merged = tl.zeros([DP], tl.float32)
    for s0 in range(0, splits, PARTS):  # all at once, 256 parts of D = 256 would not fit the registers
        s = s0 + offs_p
        mask = (s < splits)[:, None] & (offs_d < D)[None, :]  # parts that weigh nothing too: no load waits for another
        part_lse = tl.load(lse_rows + s * rows, mask=s < splits, other=float("-inf"))
        part = tl.load(o_rows + (s * rows)[:, None] * D + offs_d[None, :], mask=mask, other=0.0)
        new = tl.maximum(top, tl.max(part_lse, 0))
        base = tl.where(new == float("-inf"), 0.0, new)
        weight, old = tl.exp2(part_lse - base), tl.exp2(top - base)
        total = total * old + tl.sum(weight, 0)
        merged = merged * old + tl.sum(tl.where((weight != 0)[:, None], part * weight[:, None], 0.0), 0)
        top = new
    base = tl.where(top == float("-inf"), 0.0, top)
    safe = tl.where(total == 0, 1.0, total)
    b, t = kv // heads, row // GROUP
    h = (kv % heads) * GROUP + row % GROUP
    tl.store(o + ((b * T + t) * H + h) * D + offs_d, (merged / safe).to(o.dtype.element_ty), mask=offs_d < D)
    tl.store(lse + (b * H + h) * T + t, tl.where(total == 0, float("-inf"), base + tl.log2(safe)))
