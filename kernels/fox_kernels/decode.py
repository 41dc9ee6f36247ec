"""Decoding: one or a few queries against a long cache, the keys split over the GPU.

One program per sequence, kv head and stretch of keys; the T * G queries of the head's group are the rows of its tile,
so K and V are read once for all of them. Each program leaves its part's o and lse, a second kernel merges them. c is
kept as two floats beside the cache (`fused_append.append` lengthens it); every decay is the exact difference c_i - c_j.

What padding and pruning leave differs from sequence to sequence and from head to head: then all stretches are of one
length, as many to a head as it has keys left, and each program finds out which is its own (`share`). Where pruning
starts costs a pass over all keys (`skip_before`), unless a bound on their norms is cached like c (`key_bound`): then a
small kernel finds it from a few values of c.
"""

# Kernels are launched with plain values and a grid in brackets, which their annotations don't show:
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import functools
import itertools
import math

import torch
import triton
import triton.language as tl

from .blocks import cap_kind, soft_capped, visible
from .decode_search import first_kept_torch, key_bound, search_kernel, search_steps, skip_before
from .forward import LOG2_E, aligned, unit_last
from .launch import cdiv, launch, of_int, power_of_2, regular
from .tiles import SMALL_SHARED, capability, split_head_dim, table_for

__all__ = ["Decoder", "first_kept_torch", "key_bound", "launch_decode", "pays", "skip_before"]

MAX_ROWS = 64  # T * H / Hkv that share a tile
MIN_KEYS = 256
MAX_PAIRS = 65535  # (sequence, kv head) pairs: a grid is no longer in its second dimension
MAX_SHARED = 1024  # (sequence, kv head) pairs; more fill the GPU whatever each has left
MIN_BLOCKS = tl.constexpr(4)  # to a program: fewer are not worth merging


def pays(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Return whether the problem is a decoding one: few query rows per kv head, many keys."""
    (_, T, H, _), (S, Hkv) = q.shape, k.shape[1:3]
    few = q.numel() > 0 and T * (H // Hkv) <= MAX_ROWS and T <= 16 and q.shape[0] * Hkv <= MAX_PAIRS
    return few and S >= MIN_KEYS and S >= 16 * T


@triton.jit
def lowest(pair, heads, low, start_ptr, first_ptr, known, STARTS: tl.constexpr, PRUNE: tl.constexpr):
    """The first key that (sequence, kv head) pairs read, sinks aside."""
    low = pair * 0 + low
    if STARTS:
        low = tl.maximum(low, tl.load(start_ptr + pair // heads, mask=known, other=0))
    if PRUNE:
        low = tl.maximum(low, tl.load(first_ptr + pair, mask=known, other=0))
    return low


@triton.jit
def share(
    S, pairs, heads, low, slots, start_ptr, first_ptr,
    BN: tl.constexpr, LEAST: tl.constexpr, PAIRS: tl.constexpr, STARTS: tl.constexpr, PRUNE: tl.constexpr,
):  # fmt: skip
    """How many programs each pair has, the first that is another's, and the blocks of keys to a program."""
    pair = tl.arange(0, PAIRS)
    low = lowest(pair, heads, low, start_ptr, first_ptr, pair < pairs, STARTS, PRUNE)
    blocks = tl.where(pair < pairs, tl.cdiv(tl.maximum(S - low, 0), BN), 0)
    chunk = tl.maximum(tl.cdiv(tl.sum(blocks, 0), slots), LEAST)
    programs = tl.cdiv(blocks, chunk)
    return programs, tl.cumsum(programs, 0), chunk


@triton.jit(do_not_specialize=["S", "chunk", "slots", "pairs", "window", "sink"])
def split_kernel(
    q_ptr, k_ptr, v_ptr, c_hi_ptr, c_lo_ptr, start_ptr, first_ptr, part_ptr, part_lse_ptr,
    sq_b, sq_t, sq_h, sk_b, sk_s, sk_h, sv_b, sv_s, sv_h, sc_b, sc_h,
    T, S, H, pairs, chunk, slots, window, sink, scale2, softcap2, inverse_cap,
    GROUP: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr,
    STARTS: tl.constexpr, WINDOW: tl.constexpr, SINK: tl.constexpr, CAP: tl.constexpr, PRUNE: tl.constexpr,
    PAIRS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    heads = H // GROUP
    low = 0
    if WINDOW:
        low = tl.maximum(S - T - window + 1, 0)
    split, kv = tl.program_id(0), tl.program_id(1).to(tl.int64)
    out = kv * tl.num_programs(0) + split
    if PAIRS > 0:
        programs, ends, chunk = share(
            S, pairs, heads, low, slots, start_ptr, first_ptr, BN, MIN_BLOCKS, PAIRS, STARTS, PRUNE
        )
        out = split.to(tl.int64)
        mine = tl.sum((ends <= split).to(tl.int32), 0)
        if mine >= pairs:
            return
        split -= tl.sum(tl.where(tl.arange(0, PAIRS) == mine, ends - programs, 0), 0)
        kv = mine.to(tl.int64)
    b, h_kv = kv // heads, kv % heads
    rows, offs_n = tl.arange(0, ROWS), tl.arange(0, BN)
    offs_d0 = tl.arange(0, D0)
    offs_d1 = D0 + tl.arange(0, D1 if D1 > 0 else D0)
    real = rows < T * GROUP
    t, h = tl.minimum(rows // GROUP, T - 1), h_kv * GROUP + rows % GROUP
    pos = S - T + t

    q_rows = q_ptr + b * sq_b + t * sq_t + h * sq_h
    q0 = tl.load(q_rows[:, None] + offs_d0[None, :], mask=real[:, None], other=0.0)
    q1 = q0
    acc0 = tl.zeros([ROWS, D0], tl.float32)
    acc1 = acc0
    if D1 > 0:
        q1 = tl.load(q_rows[:, None] + offs_d1[None, :], mask=real[:, None], other=0.0)
        acc1 = tl.zeros([ROWS, D1], tl.float32)
    c_rows = b * sc_b + h * sc_h
    c_i_hi, c_i_lo = tl.load(c_hi_ptr + c_rows + pos), tl.load(c_lo_ptr + c_rows + pos)
    k_ptr += b * sk_b + h_kv * sk_h
    v_ptr += b * sv_b + h_kv * sv_h

    least = split * 0
    if STARTS:
        least = tl.maximum(tl.load(start_ptr + b), 0)
    low = lowest(kv.to(tl.int32), heads, low, start_ptr, first_ptr, True, STARTS, PRUNE)
    begin = low + split * chunk * BN
    end = tl.minimum(begin + chunk * BN, S)
    sinks_end = tl.minimum(least + sink, low)
    sink_blocks = split * 0
    if SINK:  # the first program visits the sinks before what is left
        sink_blocks = tl.where(split == 0, tl.cdiv(tl.maximum(sinks_end - least, 0), BN), 0)

    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)

    for it in range(sink_blocks + tl.cdiv(tl.maximum(end - begin, 0), BN)):
        n0 = begin + it * BN
        j = n0 + offs_n
        inside = j < end
        if SINK:
            n0 = tl.where(it < sink_blocks, least + it * BN, begin + (it - sink_blocks) * BN)
            j = n0 + offs_n
            inside = j < tl.where(it < sink_blocks, sinks_end, end)
        k_rows = k_ptr + n0.to(tl.int64) * sk_s + offs_n[:, None] * sk_s
        v_rows = v_ptr + n0.to(tl.int64) * sv_s + offs_n[:, None] * sv_s
        k0 = tl.load(k_rows + offs_d0[None, :], mask=inside[:, None], other=0.0)
        v0 = tl.load(v_rows + offs_d0[None, :], mask=inside[:, None], other=0.0)
        s = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
        if D1 > 0:
            k1 = tl.load(k_rows + offs_d1[None, :], mask=inside[:, None], other=0.0)
            v1 = tl.load(v_rows + offs_d1[None, :], mask=inside[:, None], other=0.0)
            s = tl.dot(q1, tl.trans(k1), s, input_precision=PRECISION)
        if CAP:
            s, _t = soft_capped(s * scale2, softcap2, inverse_cap, CAP == 2)
        else:
            s = s * scale2
        gates = c_rows[:, None] + j[None, :]
        known = real[:, None] & inside[None, :]
        bias = c_i_hi[:, None] - tl.load(c_hi_ptr + gates, mask=known, other=0.0)
        bias += c_i_lo[:, None] - tl.load(c_lo_ptr + gates, mask=known, other=0.0)
        if SINK:
            bias = tl.where((j < least + sink)[None, :], 0.0, bias)
        seen = visible(pos[:, None], j[None, :], least, S, window, sink, True, STARTS, WINDOW) & known
        s = tl.where(seen, s + bias, float("-inf"))
        top = tl.maximum(m, tl.max(s, 1))
        base = tl.where(top == float("-inf"), 0.0, top)
        p = tl.exp2(s - base[:, None])
        alpha = tl.exp2(m - base)
        l = l * alpha + tl.sum(p, 1)
        acc0 = tl.dot(p.to(v0.dtype), v0, acc0 * alpha[:, None], input_precision=PRECISION)
        if D1 > 0:
            acc1 = tl.dot(p.to(v1.dtype), v1, acc1 * alpha[:, None], input_precision=PRECISION)
        m = top

    empty = l == 0  # NaN isn't
    l_safe = tl.where(empty, 1.0, l)
    out = out * T * GROUP + rows
    tl.store(part_lse_ptr + out, tl.where(empty, float("-inf"), m + tl.log2(l_safe)), mask=real)
    part = part_ptr + out[:, None] * (D0 + D1)
    tl.store(part + offs_d0[None, :], acc0 / l_safe[:, None], mask=real[:, None])
    if D1 > 0:
        tl.store(part + offs_d1[None, :], acc1 / l_safe[:, None], mask=real[:, None])


@triton.jit(do_not_specialize=["S", "splits", "slots", "pairs", "window"])
def merge_kernel(
    part_ptr, part_lse_ptr, o_ptr, lse_ptr, start_ptr, first_ptr, T, S, H, pairs, splits, slots, window,
    GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PARTS: tl.constexpr,
    BN: tl.constexpr, STARTS: tl.constexpr, WINDOW: tl.constexpr, PRUNE: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    row, kv = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows, heads = T * GROUP, H // GROUP
    out = kv * splits
    if PAIRS > 0:
        low = 0
        if WINDOW:
            low = tl.maximum(S - T - window + 1, 0)
        programs, ends, _ = share(
            S, pairs, heads, low, slots, start_ptr, first_ptr, BN, MIN_BLOCKS, PAIRS, STARTS, PRUNE
        )
        mine = tl.arange(0, PAIRS) == kv
        splits = tl.sum(tl.where(mine, programs, 0), 0)
        out = tl.sum(tl.where(mine, ends - programs, 0), 0).to(tl.int64)
    offs_d, offs_p = tl.arange(0, DP), tl.arange(0, PARTS)
    part_lse_ptr += out * rows + row
    part_ptr += (out * rows + row) * D
    top, total = float("-inf"), 0.0
    o = tl.zeros([DP], tl.float32)
    for s0 in range(0, splits, PARTS):  # all at once, 256 parts of D = 256 would not fit the registers
        s = s0 + offs_p
        mask = (s < splits)[:, None] & (offs_d < D)[None, :]  # parts that weigh nothing too: no load waits for another
        lse = tl.load(part_lse_ptr + s * rows, mask=s < splits, other=float("-inf"))
        part = tl.load(part_ptr + (s * rows)[:, None] * D + offs_d[None, :], mask=mask, other=0.0)
        new = tl.maximum(top, tl.max(lse, 0))
        base = tl.where(new == float("-inf"), 0.0, new)
        weight, old = tl.exp2(lse - base), tl.exp2(top - base)
        total = total * old + tl.sum(weight, 0)
        o = o * old + tl.sum(tl.where((weight != 0)[:, None], part * weight[:, None], 0.0), 0)
        top = new
    base = tl.where(top == float("-inf"), 0.0, top)
    safe = tl.where(total == 0, 1.0, total)
    o = o / safe
    b, t = kv // heads, row // GROUP
    h = (kv % heads) * GROUP + row % GROUP
    tl.store(o_ptr + ((b * T + t) * H + h) * D + offs_d, o.to(o_ptr.dtype.element_ty), mask=offs_d < D)
    tl.store(lse_ptr + (b * H + h) * T + t, tl.where(total == 0, float("-inf"), base + tl.log2(safe)))


@functools.cache
def processors(device: torch.device) -> int:
    """Return how many multiprocessors a device has; asking CUDA takes longer than a launch."""
    return 8 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


def splits_for(pairs: int, processors: int) -> int:
    """Return into how many parts to split the keys of each (sequence, kv head) pair.

    One program per processor reads fastest (0.73 of a copy's rate at 32k, two 0.72; H100); where whole splits would
    leave a tenth of the processors idle, two.
    """
    splits = processors // pairs
    if splits * pairs < 0.9 * processors:
        splits = 2 * processors // pairs
    return max(1, min(256, splits))


def slots_for(pairs: int, processors: int) -> int:
    """Return how many stretches to share out where the pairs differ; each pair's last is shorter, and comes on top."""
    return processors if 4 * pairs <= processors else 2 * max(pairs, processors)


def block_for(D: int, rows: int, size: int) -> int:
    """Return how many keys a step takes; products in float32 run on the ordinary units, from registers."""
    if size == 4:
        return 32 if D <= 64 and rows <= 16 else 16
    return 32 if D > 128 else 64 if D > 64 else 128


@functools.cache
def stages_for(rows: int, block: int, D: int, size: int, capability: tuple[int, int]) -> int:
    """Return how many blocks of keys, values and gates fit the shared memory at a time; elements of `size` bytes.

    99 KB on Ada and small Blackwell, 163 on Ampere, 227 on Hopper; three blocks are as fast as four.
    """
    small = table_for(torch.bfloat16, capability) is SMALL_SHARED
    room = 99 << 10 if small else (227 if capability[0] == 9 else 163) << 10
    room -= block * D * size + rows * (5 * block + D * size)
    return max(1, min(3, 1 + room // (2 * block * D * size + 8 * block * rows)))


class Decoder:
    """Decoding calls that differ in S, strides and addresses only: what else they need is worked out once.

    An option is as in `launch_decode`; searches: where pruning starts is found given k_bound.
    """

    def __init__(self, shape, Hkv, dtype, device, *, scale, padded, window, sink, softcap, prune, pruned, searches):
        B, T, H, D = shape
        group, size = H // Hkv, dtype.itemsize
        if T * group > MAX_ROWS:
            raise ValueError(
                f"decode packs T * H / Hkv <= {MAX_ROWS} rows into a tile, got {T} * {group}: use forgetting_attention"
            )
        D0, D1 = split_head_dim(D)
        cap, wide, tile_rows = cap_kind(softcap, dtype), power_of_2(D), max(16, power_of_2(T * group))
        self.T, self.H, self.D, self.rows, self.pairs, self.device = T, H, D, T * group, B * Hkv, device
        self.window, self.sink, self.searches = window, sink, searches
        self.readable = aligned if D1 else unit_last
        self.factors = (scale * LOG2_E, *((0.0, 0.0) if softcap is None else (softcap * LOG2_E, 2.0 / softcap)))
        self.floor = prune * LOG2_E if searches else 0.0
        self.block = block_for(D, tile_rows, size)
        self.stages = stages_for(tile_rows, self.block, D, size, (0, 0) if device.type == "cpu" else capability(device))
        shares = (padded or pruned) and self.pairs <= MAX_SHARED
        self.slots = slots_for(self.pairs, processors(device)) if shares else 0
        self.splits = splits_for(self.pairs, processors(device))
        self.most_parts = max(1, 16384 // wide)
        self.scratch = (cdiv(self.pairs, 4) * 4, cdiv(B * H * T, 4) * 4)  # floats for first and lse2, by 16 bytes
        self.kinds = (dtype, T, H)
        shared = power_of_2(self.pairs) if shares else 0
        bounded, precision = window is not None, "ieee" if size == 4 else "tf32"
        self.split = (
            group, D0, D1, tile_rows, self.block, padded, bounded, sink > 0, cap, pruned, shared, precision
        )  # fmt: skip
        self.merge = (group, D, wide), (self.block, padded, bounded, pruned, shared)
        self.search = (group, D, wide, power_of_2(T * group), cap > 0, cap == 2)
        self.compiled = {}

    def __call__(self, q, k, v, c_hi, c_lo, *, seq_start=None, first=None, k_bound=None, lse2=None):
        """Return o (B, T, H, D), and leave the log-sum-exp in lse2 (B, H, T) float32 if given."""
        T, H, D, S, pairs = self.T, self.H, self.D, k.shape[1], self.pairs
        if seq_start is not None:
            seq_start = seq_start.to(torch.int32).contiguous()
        window, sink = 0 if self.window is None else min(self.window, S), min(self.sink, S)  # ints of 32 bits
        blocks = cdiv(min(S, window + T - 1) if window else S, self.block)
        most = cdiv(blocks, MIN_BLOCKS.value)
        if self.slots:
            chunk, splits, grid = 0, 0, (min(self.slots + pairs, pairs * most), 1, 1)
            most = min(self.slots, most)
        else:
            chunk = cdiv(blocks, min(most, self.splits))
            splits = most = cdiv(blocks, chunk)
            grid = (splits, pairs, 1)
        parts = min(power_of_2(most), self.most_parts)
        steps = search_steps(S) if self.searches else 0

        c_b, c_h, _ = c_hi.stride()
        given = (q, k, v, c_hi, c_lo, seq_start, k_bound)
        addresses = [None if x is None else x.data_ptr() for x in given]
        q_strides, k_strides, v_strides = q.stride(), k.stride(), v.stride()
        kinds = ()
        if first is None and regular(q_strides, k_strides, v_strides, addresses):
            kinds = (*self.kinds, of_int(c_b), of_int(c_h))
        else:
            q, k, v = self.readable(q), self.readable(k), self.readable(v)
            q_strides, k_strides, v_strides = q.stride(), k.stride(), v.stride()
        known = self.compiled.get((kinds, parts, steps))
        strides = (*q_strides[:3], *k_strides[:3], *v_strides[:3], c_b, c_h)

        room, lse_room = self.scratch
        ends = (room, room + lse_room, room + lse_room + grid[0] * grid[1] * self.rows * D)
        scratch = torch.empty(ends[2] + grid[0] * grid[1] * self.rows, dtype=torch.float32, device=self.device)
        o = torch.empty_like(q, memory_format=torch.contiguous_format)
        if known is None:
            found, own_lse2, part, part_lse = scratch.tensor_split(ends)
            first = found.view(torch.int32) if self.searches else first
            lse2, out = own_lse2 if lse2 is None else lse2, o
        else:
            q, k, v, c_hi, c_lo, seq_start, k_bound = addresses
            start, out = scratch.data_ptr(), o.data_ptr()
            first = start if self.searches else None
            lse2 = start + 4 * ends[0] if lse2 is None else lse2.data_ptr()
            part, part_lse = start + 4 * ends[1], start + 4 * ends[2]

        launches = [
            (
                split_kernel,
                grid,
                (
                    q, k, v, c_hi, c_lo, seq_start, first, part, part_lse, *strides,
                    T, S, H, pairs, chunk, self.slots, window, sink, *self.factors,
                ),
            ),
            (
                merge_kernel,
                (self.rows, pairs, 1),
                (part, part_lse, out, lse2, seq_start, first, T, S, H, pairs, splits, self.slots, window),
            ),
        ]  # fmt: skip
        if self.searches:
            never = self.floor - math.log2(S)
            arguments = (q, k, c_hi, c_lo, k_bound, first, *strides[:6], c_b, c_h, T, S, H, *self.factors, never)
            launches.insert(0, (search_kernel, (pairs, 1, 1), arguments))
        if known is not None:
            for run, (_, grid, arguments) in zip(known, launches, strict=True):
                run(grid, (), arguments, addressed=True)
            return o
        (before, after), runs = self.merge, []
        constants = {
            search_kernel: (*self.search, steps), split_kernel: self.split, merge_kernel: (*before, parts, *after)
        }  # fmt: skip
        for kernel, grid, arguments in launches:
            stages = self.stages if kernel is split_kernel else 3
            runs.append(launch(kernel, grid, arguments, constants[kernel], stages=stages, kinds=kinds))
        if kinds and None not in runs:
            self.compiled[kinds, parts, steps] = runs
        return o


decoder_for = functools.lru_cache(256)(Decoder)


def launch_decode(
    q, k, v, c_hi, c_lo, *, scale, seq_start=None, window=None, sink=0, softcap=None, prune=None, first=None,
    k_bound=None,
):  # fmt: skip
    """Return o (B, T, H, D) and lse2 (B, H, T) of the last T positions of a cache of S; T * H / Hkv <= MAX_ROWS.

    q (B, T, H, D); k, v (B, S, Hkv, D), any strides: copied where `forward.unit_last` says so, at D = 80 and 96
    `forward.aligned`; c_hi, c_lo (B, H, S) float32, any strides with unit last, so that a longer buffer can be sliced.
    With prune, keys before first (B, Hkv), sinks aside, are left out; if None, those that hold at most exp(prune) of
    every query's weight given k_bound (B, Hkv) float32 >= |k_j|, or without that what `skip_before` gives, which reads
    all keys. Raises ValueError when the group's rows do not fit a tile.
    """
    (B, T, H, _), Hkv = q.shape, k.shape[2]
    if B * Hkv > MAX_PAIRS:
        given = (q, k, v, c_hi, c_lo, seq_start, first, k_bound)
        cut = [itertools.repeat(None) if x is None else x.split(MAX_PAIRS // Hkv) for x in given]
        parts = [
            launch_decode(
                *x[:5], scale=scale, seq_start=x[5], window=window, sink=sink, softcap=softcap, prune=prune,
                first=x[6], k_bound=x[7],
            )
            for x in zip(*cut, strict=False)
        ]  # fmt: skip
        return torch.cat([o for o, _ in parts]), torch.cat([lse2 for _, lse2 in parts])
    searches = prune is not None and first is None and k_bound is not None
    decoder = decoder_for(
        q.shape, Hkv, q.dtype, q.device, scale=scale, padded=seq_start is not None, window=window, sink=sink,
        softcap=softcap, prune=prune, pruned=prune is not None or first is not None, searches=searches,
    )  # fmt: skip
    if prune is not None and first is None and k_bound is None:
        first = skip_before(q, k, c_hi.contiguous(), c_lo.contiguous(), scale, softcap, prune)
    lse2 = torch.empty(B, H, T, dtype=torch.float32, device=q.device)
    o = decoder(q, k, v, c_hi, c_lo, seq_start=seq_start, first=first, k_bound=k_bound, lse2=lse2)
    return o, lse2
