"""Adaptive computation pruning as loop bounds: which keys a tile of queries may skip, found by one vectorised search.

For queries i of a tile and a block of keys ending at j (base-2 units, c_ref = c at the tile's first query),

    skip if  (c_ref - c_j) + max_i (c_i - c_ref - s_ii) + U + log2 S - log2 eps < 0
    U = |scale| max_i |q_i| max_{j' <= j} |k_j'|

The denominator holds exp(s_ii), the query's own key (decay 0), and each of at most S skipped keys adds less than
exp(U + c_i - c_j), so at most eps of the weight is lost. U and s_ii are soft-capped when the scores are. c falls, so
both terms grow with j and what may be skipped is a prefix: its length is the number of blocks that pass the test. Where
c alone forbids pruning, neither q nor k is read: then it costs two launches of a few microseconds.

Source: Lin et al. 2025, arXiv 2504.06949, with |q_i| |k_j| per tile and the query's own score in place of its bound.
"""

import math

import torch
import triton
import triton.language as tl

from ..host.launch import cdiv, launch, power_of_2
from ..options import ALL_KEYS, Options, Shard
from .blocks import LOG2_E, LOG2E, cap_kind, soft_capped

BLOCK_M = 64  # queries per bound; the tiles of the forward and of dq take the least of theirs
BLOCK_N = 64  # keys per step of the bound
WORTH = 10**11
"""Floating point operations of a causal forward from which on a search pays. 8 x 2048 tokens of 16 heads, D = 64, have
0.7e11: pruned they take a GPU 0.74 ms, forward and backward, whole 0.80; but as launched 1.03 (kernels/LOG.md)."""
NEVER = tl.constexpr(1e30)  # a norm or a score that forbids pruning


def worth(q: torch.Tensor, k: torch.Tensor, prune: float | None) -> float | None:
    """Return prune, or None for a problem so small that launching a search takes longer than pruning saves."""
    B, T, H, D = q.shape
    return None if prune is None or 2 * B * T * k.shape[1] * H * D < WORTH else prune


@triton.jit
def capped(s, softcap2, CAP: tl.constexpr):
    if CAP:
        s, _t = soft_capped(s, softcap2, 2.0 * LOG2E / softcap2, CAP == 2)
    return s


@triton.jit
def parts(found_ptr, queries):
    """Pointers to the norms of query tiles, to their worst own scores, and to the norms of key blocks."""
    return found_ptr, found_ptr + queries, found_ptr + 2 * queries


@triton.jit(do_not_specialize=["T", "S", "q_offset", "query_programs", "key_programs"])
def norms_kernel(
    q_ptr, k_ptr, c_hi_ptr, c_lo_ptr, found_ptr,
    sq_b, sq_t, sq_h, sk_b, sk_s, sk_h, T, S, H, q_offset, query_programs, key_programs,
    scale2, softcap2, never,
    GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAP: tl.constexpr,
    PER: tl.constexpr,
):  # fmt: skip
    q_norm_ptr, ahead_ptr, k_norm_ptr = parts(found_ptr, query_programs)
    units = tl.program_id(0) * PER + tl.arange(0, PER)
    is_query = units < query_programs
    is_key = (units >= query_programs) & (units < query_programs + key_programs)
    # First by c alone, for all units at once: where that forbids pruning everywhere, the kernel ends here.
    tiles, blocks = tl.cdiv(T, BM), tl.cdiv(S, BN)
    row = (units // tiles).to(tl.int64) * S
    last = q_offset + tl.minimum((units % tiles) * BM + BM, T) - 1
    fall = tl.load(c_hi_ptr + row + last, mask=is_query, other=NEVER)
    fall -= tl.load(c_hi_ptr + row + tl.minimum(BN, S) - 1, mask=is_query, other=0.0)
    keys = units - query_programs
    end = tl.minimum((keys % blocks) * BN + BN, S) - 1
    for g in range(GROUP):
        row = ((keys // blocks).to(tl.int64) * GROUP + g) * S
        fall_to_key = tl.load(c_hi_ptr + row + q_offset + T - 1, mask=is_key, other=NEVER)
        fall_to_key -= tl.load(c_hi_ptr + row + end, mask=is_key, other=0.0)
        fall = tl.minimum(fall, fall_to_key)
    tl.store(q_norm_ptr + units, tl.zeros_like(fall), mask=is_query & (fall >= never))
    tl.store(ahead_ptr + units, tl.full([PER], NEVER, tl.float32), mask=is_query & (fall >= never))
    tl.store(k_norm_ptr + keys, tl.full([PER], NEVER, tl.float32), mask=is_key & (fall >= never))
    if tl.min(fall, 0) < never:
        offs_d = tl.arange(0, DP)
        for step in range(PER):
            index = tl.program_id(0) * PER + step
            possible = tl.min(tl.where(units == index, fall, NEVER), 0) < never
            if possible & (index < query_programs):
                # Per query tile: max |q_i| and max_i (c_i - c_ref - s_ii).
                bh = (index // tiles).to(tl.int64)
                b, h = bh // H, bh % H
                m0 = (index % tiles) * BM
                offs_m = tl.arange(0, BM)
                c_hi, c_lo = c_hi_ptr + bh * S, c_lo_ptr + bh * S
                ref_hi, ref_lo = tl.load(c_hi + q_offset + m0), tl.load(c_lo + q_offset + m0)
                rows = m0 + offs_m < T
                mask = rows[:, None] & (offs_d < D)[None, :]
                q_rows = q_ptr + b * sq_b + h * sq_h + m0.to(tl.int64) * sq_t
                k_rows = k_ptr + b * sk_b + (h // GROUP) * sk_h + (q_offset + m0).to(tl.int64) * sk_s
                q = tl.load(q_rows + offs_m[:, None] * sq_t + offs_d[None, :], mask=mask, other=0.0).to(tl.float32)
                k = tl.load(k_rows + offs_m[:, None] * sk_s + offs_d[None, :], mask=mask, other=0.0).to(tl.float32)
                own = capped(tl.sum(q * k, 1) * scale2, softcap2, CAP)
                pos = tl.minimum(q_offset + m0 + offs_m, S - 1)
                ahead = (tl.load(c_hi + pos) - ref_hi) + (tl.load(c_lo + pos) - ref_lo) - own
                tl.store(q_norm_ptr + index, tl.sqrt(tl.max(tl.sum(q * q, 1), 0)))
                tl.store(ahead_ptr + index, tl.max(tl.where(rows, ahead, float("-inf")), 0))
            elif possible:
                # Per key block: max |k_j|.
                key = index - query_programs
                pair = (key // blocks).to(tl.int64)
                heads = H // GROUP
                n0 = (key % blocks) * BN
                offs_n = tl.arange(0, BN)
                mask = (n0 + offs_n < S)[:, None] & (offs_d < D)[None, :]
                k_rows = k_ptr + (pair // heads) * sk_b + (pair % heads) * sk_h + n0.to(tl.int64) * sk_s
                k = tl.load(k_rows + offs_n[:, None] * sk_s + offs_d[None, :], mask=mask, other=0.0).to(tl.float32)
                tl.store(k_norm_ptr + key, tl.sqrt(tl.max(tl.sum(k * k, 1), 0)))


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["T", "S", "q_offset"])
def bounds_kernel(
    c_hi_ptr, c_lo_ptr, found_ptr, first_ptr, T, S, H, q_offset, scale2, softcap2, never,
    GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr, BLOCKS: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    tiles, blocks = tl.cdiv(T, BM), tl.cdiv(S, BN)
    q_norm_ptr, ahead_ptr, k_norm_ptr = parts(found_ptr, tl.num_programs(0) * tiles)
    bh = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
    real = tile < tiles
    ref = tl.minimum(q_offset + tile * BM, S - 1)
    ref_hi = tl.load(c_hi_ptr + bh * S + ref)
    ref_lo = tl.load(c_lo_ptr + bh * S + ref)
    q_norm = tl.load(q_norm_ptr + bh * tiles + tile, mask=real, other=0.0)
    ahead = tl.load(ahead_ptr + bh * tiles + tile, mask=real, other=NEVER)
    kv = (bh // H) * (H // GROUP) + (bh % H) // GROUP
    skipped = tl.zeros([TILES], tl.int32)
    k_norm = 0.0
    last_tile = tl.minimum(tl.program_id(1) * TILES + TILES, tiles)
    reach = tl.minimum(tl.cdiv(q_offset + last_tile * BM, BN), blocks)
    reach = tl.where(tl.min(ahead, 0) == NEVER, 0, reach)
    for n in range(0, reach, BLOCKS):
        block = n + tl.arange(0, BLOCKS)
        norms = tl.load(k_norm_ptr + kv * blocks + block, mask=block < blocks, other=NEVER)
        norms = tl.maximum(tl.associative_scan(norms, 0, larger), k_norm)
        k_norm = tl.max(norms, 0)
        end = tl.minimum((block + 1) * BN, S) - 1
        end_hi = tl.load(c_hi_ptr + bh * S + end)
        end_lo = tl.load(c_lo_ptr + bh * S + end)
        bound = tl.abs(scale2) * q_norm[:, None] * norms[None, :] * 1.0001
        if CAP:
            bound = tl.minimum(bound, softcap2)
        bound = tl.where(norms[None, :] == NEVER, NEVER, bound)
        fall = (ref_hi[:, None] - end_hi[None, :]) + (ref_lo[:, None] - end_lo[None, :])
        before = ((block + 1) * BN)[None, :] <= (q_offset + tile * BM)[:, None]
        skip = before & (fall + ahead[:, None] + bound < never)
        skipped += tl.sum(skip.to(tl.int32), 1)
    tl.store(first_ptr + bh * tiles + tile, skipped * BN, mask=real)


def loop_bounds(
    q, k, c_hi, c_lo, options: Options, shard: Shard = ALL_KEYS, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return first (B, H, ceil(T / BLOCK_M)) int32: for each tile of queries the first key that may not be skipped.

    At most exp(options.prune) of any query's attention weight lies before it. Written to out, if given. Raises
    ValueError where a query may not see its own key: the bound uses its score.
    """
    (B, T, H, D), (S, Hkv) = q.shape, k.shape[1:3]
    scale, _, _, softcap, prune, _ = options
    assert prune is not None
    q_offset = S - T if shard.q_offset is None else shard.q_offset
    if not shard.causal or q_offset + T > S:
        raise ValueError("prune needs causal=True and q_offset + T <= S: the bound rests on each query's own key")
    tiles, blocks = cdiv(T, BLOCK_M), cdiv(S, BLOCK_N)
    queries, keys = B * H * tiles, B * Hkv * blocks
    found = torch.empty(2 * queries + keys, dtype=torch.float32, device=q.device)
    first = torch.empty(B, H, tiles, dtype=torch.int32, device=q.device) if out is None else out
    never = prune * LOG2_E - math.log2(S)  # a fall of c not below this keeps every key
    cap2 = 0.0 if softcap is None else softcap * LOG2_E
    group, width, cap = H // Hkv, power_of_2(D), cap_kind(softcap, q.dtype)
    launch(
        norms_kernel,
        (cdiv(queries + keys, 8),),
        (
            q, k, c_hi, c_lo, found, *q.stride()[:3], *k.stride()[:3],
            T, S, H, q_offset, queries, keys, scale * LOG2_E, cap2, never,
        ),
        (group, D, width, BLOCK_M, BLOCK_N, cap, 8),
    )  # fmt: skip
    rows = min(32, power_of_2(tiles))
    launch(
        bounds_kernel,
        (B * H, cdiv(tiles, rows)),
        (c_hi, c_lo, found, first, T, S, H, q_offset, scale * LOG2_E, cap2, never),
        (group, BLOCK_M, BLOCK_N, rows, 2048 // rows, cap),
    )
    return first
