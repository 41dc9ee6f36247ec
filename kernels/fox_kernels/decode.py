"""Decoding: one or a few queries against a long cache, the keys split over the GPU.

One program per sequence, kv head and stretch of keys; the T * G queries of the head's group are the rows of its tile,
so K and V are read once for all of them. Each program leaves its part's o and lse, a second kernel merges them. c is
kept as two floats beside the cache (`cumsum.append` lengthens it) and every decay is the exact difference c_i - c_j.

With pruning on, what is left of the keys is split. Where it starts costs a pass over all keys (`skip_before`), unless
a bound on their norms is cached like c (`key_bound`): then every program finds it by itself, from a few values of c.
"""

# Kernels are launched with plain values and a grid in brackets, which their annotations don't show:
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import functools
import math

import torch
import triton
import triton.language as tl

from . import prune as pruning
from .blocks import soft_capped, visible
from .forward import LOG2_E, unit_last
from .launch import cdiv, launch, power_of_2
from .tiles import SMALL_SHARED, capability, split_head_dim, table_for

MAX_ROWS = 64  # T * H / Hkv that share a tile
MIN_KEYS = 256
SEARCH_BLOCK, WAYS = tl.constexpr(64), tl.constexpr(64)  # keys, ways of a step of the search for what pruning leaves


def pays(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Return whether the problem is a decoding one: few query rows per kv head, many keys."""
    (_, T, H, _), (S, Hkv) = q.shape, k.shape[1:3]
    return q.numel() > 0 and T * (H // Hkv) <= MAX_ROWS and T <= 16 and S >= MIN_KEYS and S >= 16 * T


@triton.jit
def first_kept(
    own, q_norm, k_bound, c_i_hi, c_i_lo, c_rows, real, c_hi_ptr, c_lo_ptr, T, S, scale2, softcap2, never,
    CAP: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """The first key that some row needs, by the rule of `prune`: what may be skipped is a prefix, searched 64-ways."""
    bound = tl.abs(scale2) * q_norm * k_bound * 1.0001
    if CAP:
        bound = tl.minimum(bound, softcap2)
    skipped = (c_rows * 0).to(tl.int32)  # blocks, per row
    width = 1
    for _ in tl.static_range(STEPS - 1):
        width *= WAYS
    for _ in tl.static_range(STEPS):
        blocks = skipped[:, None] + (1 + tl.arange(0, WAYS))[None, :] * width
        inside = (blocks * BLOCK <= S - T) & real[:, None]
        ends = c_rows[:, None] + tl.where(inside, blocks * BLOCK - 1, 0)
        fall = c_i_hi[:, None] - tl.load(c_hi_ptr + ends, mask=inside, other=0.0)
        fall += c_i_lo[:, None] - tl.load(c_lo_ptr + ends, mask=inside, other=0.0)
        skip = inside & (fall + (bound - own)[:, None] < never)
        skipped += tl.sum(skip.to(tl.int32), 1) * width
        width = width // WAYS
    return tl.min(tl.where(real, skipped, S), 0) * BLOCK


@triton.jit(do_not_specialize=["S", "span", "window", "sink"])
def split_kernel(
    q_ptr, k_ptr, v_ptr, c_hi_ptr, c_lo_ptr, start_ptr, first_ptr, bound_ptr, part_ptr, part_lse_ptr,
    sq_b, sq_t, sq_h, sk_b, sk_s, sk_h, sv_b, sv_s, sv_h, sc_b, sc_h,
    T, S, H, span, window, sink, scale2, softcap2, inverse_cap, never,
    GROUP: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr,
    STARTS: tl.constexpr, WINDOW: tl.constexpr, SINK: tl.constexpr, CAP: tl.constexpr, PRUNE: tl.constexpr,
    STEPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    split, kv = tl.program_id(0), tl.program_id(1).to(tl.int64)
    splits = tl.num_programs(0)
    heads = H // GROUP
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

    begin, end = split * span, tl.minimum((split + 1) * span, S)
    least = split * 0
    if STARTS:
        least = tl.maximum(tl.load(start_ptr + b), 0)
    low = least
    if WINDOW:
        low = tl.maximum(low, S - T - window + 1)
    if STEPS > 0:
        own_rows = k_ptr + pos.to(tl.int64)[:, None] * sk_s
        own_key = tl.load(own_rows + offs_d0[None, :], mask=real[:, None], other=0.0).to(tl.float32)
        own = tl.sum(q0.to(tl.float32) * own_key, 1)
        square = tl.sum(q0.to(tl.float32) * q0.to(tl.float32), 1)
        if D1 > 0:
            own_key = tl.load(own_rows + offs_d1[None, :], mask=real[:, None], other=0.0).to(tl.float32)
            own += tl.sum(q1.to(tl.float32) * own_key, 1)
            square += tl.sum(q1.to(tl.float32) * q1.to(tl.float32), 1)
        own *= scale2
        if CAP:
            own, _own_t = soft_capped(own, softcap2, inverse_cap, PRECISION == "ieee")
        first = first_kept(
            own, tl.sqrt(square), tl.load(bound_ptr + kv), c_i_hi, c_i_lo, c_rows, real, c_hi_ptr, c_lo_ptr, T, S,
            scale2, softcap2, never, CAP, SEARCH_BLOCK, STEPS)  # fmt: skip
        low = tl.maximum(low, first)
    elif PRUNE:
        low = tl.maximum(low, tl.load(first_ptr + kv))
    sinks_end = tl.minimum(least + sink, low)
    sink_blocks = split * 0
    if PRUNE:  # what is left is split evenly, the first program visits the sinks before it
        span = tl.cdiv(tl.cdiv(S - low, splits), BN) * BN
        begin = low + split * span
        end = tl.minimum(begin + span, S)
        sink_blocks = tl.where(split == 0, tl.cdiv(tl.maximum(sinks_end - least, 0), BN), 0)
    else:
        begin = tl.where((begin < sinks_end) & (end > least), tl.maximum(begin, least), tl.maximum(begin, low))

    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)

    for it in range(sink_blocks + tl.cdiv(tl.maximum(end - begin, 0), BN)):
        n0 = begin + it * BN
        j = n0 + offs_n
        inside = j < end
        if PRUNE:
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
            s, _t = soft_capped(s * scale2, softcap2, inverse_cap, PRECISION == "ieee")
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
    out = (kv * splits + split) * T * GROUP + rows
    tl.store(part_lse_ptr + out, tl.where(empty, float("-inf"), m + tl.log2(l_safe)), mask=real)
    if begin < end:  # a part without keys is never read
        part = part_ptr + out[:, None] * (D0 + D1)
        tl.store(part + offs_d0[None, :], acc0 / l_safe[:, None], mask=real[:, None])
        if D1 > 0:
            tl.store(part + offs_d1[None, :], acc1 / l_safe[:, None], mask=real[:, None])


@triton.jit(do_not_specialize=["splits"])
def merge_kernel(
    part_ptr, part_lse_ptr, o_ptr, lse_ptr, T, H, splits,
    GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    row, kv = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows = T * GROUP
    offs_s, offs_d, offs_p = tl.arange(0, SPLITS), tl.arange(0, DP), tl.arange(0, PARTS)
    part_lse_ptr += kv * splits * rows + row
    part_ptr += (kv * splits * rows + row) * D
    lse = tl.load(part_lse_ptr + offs_s * rows, mask=offs_s < splits, other=float("-inf"))
    top = tl.max(lse, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(lse - base), 0)
    o = tl.zeros([DP], tl.float32)
    for s0 in range(0, SPLITS, PARTS):  # all at once, 256 parts of D = 256 would not fit the registers
        s = s0 + offs_p
        weight = tl.exp2(tl.load(part_lse_ptr + s * rows, mask=s < splits, other=float("-inf")) - base)
        mask = (weight != 0)[:, None] & (offs_d < D)[None, :]
        part = tl.load(part_ptr + (s * rows)[:, None] * D + offs_d[None, :], mask=mask, other=0.0)
        o += tl.sum(part * weight[:, None], 0)
    safe = tl.where(total == 0, 1.0, total)
    o = o / safe
    heads = H // GROUP
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


def block_for(D: int, rows: int, size: int) -> int:
    """Return how many keys a step takes; products in float32 run on the ordinary units, from registers."""
    if size == 4:
        return 32 if D <= 64 and rows <= 16 else 16
    return 32 if D > 128 else 64 if D > 64 else 128


def stages_for(rows: int, block: int, D: int, size: int, capability: tuple[int, int]) -> int:
    """Return how many blocks of keys, values and gates fit the shared memory at a time; elements of `size` bytes.

    99 KB on Ada and small Blackwell, 163 on Ampere, 227 on Hopper; three blocks are as fast as four.
    """
    small = table_for(torch.bfloat16, capability) is SMALL_SHARED
    room = 99 << 10 if small else (227 if capability[0] == 9 else 163) << 10
    room -= block * D * size + rows * (5 * block + D * size)
    return max(1, min(3, 1 + room // (2 * block * D * size + 8 * block * rows)))


def search_steps(S: int) -> int:
    """Return in how many steps a search in 64 ways goes through the blocks of S keys."""
    steps = 1
    while 64 ** (steps + 1) < S:
        steps += 1
    return steps


def skip_before(q, k, c_hi, c_lo, scale, softcap, log_eps) -> torch.Tensor:
    """Return first (B, Hkv) int32: keys before it hold at most exp(log_eps) of the weight of every query of the group.

    A gate never opens again (log f <= 0), so for norms that stay bounded they may leave the cache for good.
    """
    B, Hkv = k.shape[0], k.shape[2]
    first = pruning.loop_bounds(q, k, c_hi, c_lo, scale, softcap, log_eps)
    return first.view(B, Hkv, -1).amin(-1)


def key_bound(k: torch.Tensor) -> torch.Tensor:
    """Return (B, Hkv) float32, the greatest |k_j| of a cache (B, S, Hkv, D); new keys can but raise it."""
    return torch.linalg.vector_norm(k, dim=-1, dtype=torch.float32).amax(1)


def first_kept_torch(q, k, c_hi, c_lo, k_bound, *, scale, softcap=None, prune=-10.0) -> torch.Tensor:
    """The eager twin of the search in `split_kernel`: (B, Hkv), the first key that decoding with k_bound reads."""
    (_, T, H, _), (S, Hkv) = q.shape, k.shape[1:3]
    q, own = q.double().unflatten(2, (Hkv, H // Hkv)), k[:, S - T :, :, None].double()
    own = (q * own).sum(-1) * scale
    bound = abs(scale) * q.norm(dim=-1) * k_bound[:, None, :, None] * 1.0001
    if softcap is not None:
        own, bound = softcap * torch.tanh(own / softcap), bound.clamp_max(softcap)
    c = (c_hi.double() + c_lo.double()).transpose(1, 2).unflatten(2, (Hkv, H // Hkv)) / LOG2_E
    fall = c[:, S - T :, None] - c[:, None, 63 : S - T : 64]
    skip = fall + (bound - own)[:, :, None] < prune - math.log(S)
    return 64 * skip.all(1).all(-1).sum(1)


def launch_decode(
    q, k, v, c_hi, c_lo, *, scale, seq_start=None, window=None, sink=0, softcap=None, prune=None, first=None,
    k_bound=None, splits=None,
):  # fmt: skip
    """Return o (B, T, H, D) and lse2 (B, H, T) of the last T positions of a cache of S; T * H / Hkv <= MAX_ROWS.

    q (B, T, H, D); k, v (B, S, Hkv, D), any strides with unit last; c_hi, c_lo (B, H, S) float32, any strides with unit
    last, so that a longer buffer can be sliced. With prune, keys before first (B, Hkv), sinks aside, are left out; if
    None, those that hold at most exp(prune) of every query's weight given k_bound (B, Hkv) float32 >= |k_j|, or without
    that what `skip_before` gives, which reads all keys. Raises ValueError when the group's rows do not fit a tile.
    """
    (B, T, H, D), (S, Hkv) = q.shape, k.shape[1:3]
    group = H // Hkv
    if T * group > MAX_ROWS:
        raise ValueError(
            f"decode packs T * H / Hkv <= {MAX_ROWS} rows into a tile, got {T} * {group}: use launch_forward"
        )
    q, k, v = unit_last(q), unit_last(k), unit_last(v)
    if seq_start is not None:
        seq_start = seq_start.to(torch.int32).contiguous()
    searched = prune is not None and first is None and k_bound is not None
    if prune is not None and first is None and not searched:
        first = skip_before(q, k, c_hi.contiguous(), c_lo.contiguous(), scale, softcap, prune)
    D0, D1 = split_head_dim(D)
    tile_rows = max(16, power_of_2(T * group))
    block = block_for(D, tile_rows, q.element_size())
    if splits is None:
        splits = min(cdiv(S, 4 * block), splits_for(B * Hkv, processors(q.device)))
    span = cdiv(cdiv(S, splits), block) * block
    splits = cdiv(S, span)
    on = capability(q.device) if q.is_cuda else (0, 0)
    rows = B * Hkv * splits * T * group
    parts = torch.empty(rows * (D + 1), dtype=torch.float32, device=q.device)  # o of every part, then its lse
    o = torch.empty(B, T, H, D, dtype=q.dtype, device=q.device)
    lse2 = torch.empty(B, H, T, dtype=torch.float32, device=q.device)
    part_lse = parts[rows * D :]
    launch(
        split_kernel,
        (splits, B * Hkv),
        (
            q, k, v, c_hi, c_lo, seq_start, first, k_bound if searched else None, parts, part_lse,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *c_hi.stride()[:2],
            T, S, H, span, window or 0, sink, scale * LOG2_E, 0.0 if softcap is None else softcap * LOG2_E,
            0.0 if softcap is None else 2.0 / softcap,
            0.0 if prune is None else prune * LOG2_E - math.log2(S),
        ),
        (
            group, D0, D1, tile_rows, block, seq_start is not None,
            window is not None, sink > 0, softcap is not None, first is not None or searched,
            search_steps(S) if searched else 0, "ieee" if q.dtype == torch.float32 else "tf32",
        ),
        stages=stages_for(tile_rows, block, D, q.element_size(), on),
    )  # fmt: skip
    launch(
        merge_kernel,
        (T * group, B * Hkv),
        (parts, part_lse, o, lse2, T, H, splits),
        (group, D, power_of_2(D), power_of_2(splits), min(power_of_2(splits), max(1, 16384 // power_of_2(D)))),
    )
    return o, lse2
