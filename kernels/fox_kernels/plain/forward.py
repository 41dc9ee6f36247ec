"""The forward in plain Triton: one program per tile of queries and head, keys walked from the diagonal outwards.

Every kernel here works in base 2: scores, c and lse are natural units times log2(e). Two forms of the decay are used:

    masked blocks    (diagonal, document and window edges, sinks)  the exact difference c_i - c_j of two-float values
    interior blocks  a row vector c_last - c_j <= 0, c_last being the block's last key: one multiply-add per score;
                     the scalar c_ref - c_last <= 0, c_ref being the tile's first query, goes into the running max

The running max moves from the first form to the second by c_i - c_ref, its rounding error being carried into the sums,
so that saturated gates (c falling by thousands within a tile) cost no accuracy.
"""

import torch
import triton
import triton.language as tl

from ..common.blocks import (
    LOG2_E,
    block_scalars,
    cap_factors,
    cap_kind,
    gates_of_keys,
    key_range,
    load_rows,
    lowest,
    masked_block,
    partial_sums,
    place,
    query_facts,
    scores,
)
from ..common.cumsum import block_relative
from ..common.horizon import found_edges
from ..host.launch import cdiv, launch
from ..host.strides import aligned, describable, row_source, source, strides_of
from ..options import ONE_DOCUMENT, Documents, Options
from .tiles import Copies, Tile, split_head_dim, tile_for

L2_BYTES = 24 << 20  # of Hopper's 50 MB, for the heads walked together


@triton.jit
def _attend(
    b, h, n0, q0, q1, k_ptr, v_ptr, stride_k, stride_v, offs_n, offs_d0, offs_d1, c_i_hi, c_i_lo, lift, c_hi_ptr,
    c_lo_ptr, c_rel_ptr, c_rel_row, pos, start, lower, S, sink, scale2, softcap2, inverse_cap,
    top, m, l, weight, acc0, acc1,
    MASKED: tl.constexpr, STARTS: tl.constexpr, LOWER: tl.constexpr, SINK: tl.constexpr,
    CAP: tl.constexpr, D1: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One key block of the online softmax: sums and products relative to m, top is the largest score so far.

    lift: c_ref - c_last (interior), or 0 (masked: c_i counts). m is the block's own largest score, whose weight is then
    1: of all weights its rounding to 16 bits would cost most. Sums grow by no more than 2^16 for it. o will be divided
    by weight, which in masked blocks sums the weights as rounded: part of their rounding cancels. Elsewhere they are
    many, and it cancels by itself.
    """
    j, c_first, c_second = gates_of_keys(n0, offs_n, c_hi_ptr, c_lo_ptr, c_rel_ptr, c_rel_row, S, MASKED, ROWS)
    k0 = load_rows(k_ptr, b, h, n0, stride_k, offs_n, offs_d0, S, MASKED, TMA > 0)
    s = tl.dot(q0, tl.trans(k0), input_precision=PRECISION)
    if D1 > 0:
        k1 = load_rows(k_ptr, b, h, n0, stride_k, offs_n, offs_d1, S, MASKED, TMA > 0)
        s = tl.dot(q1, tl.trans(k1), s, input_precision=PRECISION)
    s, _tanh = scores(
        s, c_first, c_second, c_i_hi, c_i_lo, j, pos, start, lower, S, sink, scale2, softcap2,
        inverse_cap, MASKED, STARTS, LOWER, SINK, CAP)  # fmt: skip
    if MASKED:
        largest = tl.max(s, 1)
    else:  # two chains of maxima, and of sums below: a long chain takes time, not the number of operations
        largest = tl.max(tl.max(tl.reshape(s, [s.shape[0], s.shape[1] // 8, 8]), 1), 1) + lift
    top = tl.maximum(top, largest)
    now = tl.maximum(largest, top - 16.0)
    base = tl.where(top == float("-inf"), 0.0, now) if MASKED else now
    alpha = tl.exp2(m - base)
    acc0 = acc0 * alpha[:, None]
    if D1 > 0:
        acc1 = acc1 * alpha[:, None]
    p = tl.exp2(s - (base - lift)[:, None])
    total = tl.sum(p, 1) if MASKED else tl.sum(partial_sums(p), 1)
    l = l * alpha + total
    p_rounded = p.to(q0.dtype)
    # Not earlier: the compiler moves nothing between the exponentials across the wait for v.
    v0 = load_rows(v_ptr, b, h, n0, stride_v, offs_n, offs_d0, S, MASKED, TMA > 0)
    if MASKED and v0.dtype != tl.float32:
        ones = tl.full([p.shape[1], 8], 1.0, v0.dtype)  # cheaper than widening 16 bits to 32
        total = tl.sum(tl.dot(p_rounded, ones), 1) * 0.125
    weight = weight * alpha + total
    acc0 = tl.dot(p_rounded, v0, acc0, input_precision=PRECISION)
    if D1 > 0:
        v1 = load_rows(v_ptr, b, h, n0, stride_v, offs_n, offs_d1, S, MASKED, TMA > 0)
        acc1 = tl.dot(p_rounded, v1, acc1, input_precision=PRECISION)
    return top, now, l, weight, acc0, acc1


@triton.jit
def store_rounded(ptr, residual_ptr, at, x, mask, RESIDUAL: tl.constexpr):
    """Store x in the pointer's dtype and, with RESIDUAL, its rounding error."""
    rounded = x.to(ptr.dtype.element_ty)
    tl.store(ptr + at, rounded, mask=mask)
    if RESIDUAL:
        tl.store(residual_ptr + at, (x - rounded.to(tl.float32)).to(residual_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "S", "together", "q_offset", "window", "sink"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, residual_ptr, lse_ptr, c_hi_ptr, c_lo_ptr, c_rel_ptr, start_ptr, lower_ptr,
    sq_b, sq_t, sq_h, sk_b, sk_t, sk_h, sv_b, sv_t, sv_h,
    T, S, SP, H, together, q_offset, window, sink, scale2, softcap2, inverse_cap,
    GROUP: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    STARTS: tl.constexpr, LOWER: tl.constexpr, SINK: tl.constexpr, CAP: tl.constexpr,
    RESIDUAL: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    # The longest rows first; the query heads of a kv head are side by side.
    tiles = tl.cdiv(T, BM)
    tile, bh = place(tiles, tl.num_programs(0) // tiles, together)
    m0 = (tiles - 1 - tile) * BM
    b, h = bh // H, bh % H
    if TMA < 2:
        q_ptr += b * sq_b + h * sq_h
    if TMA == 0:
        k_ptr += b * sk_b + (h // GROUP) * sk_h
        v_ptr += b * sv_b + (h // GROUP) * sv_h
    row_b, row_h = b.to(tl.int32), h.to(tl.int32)
    row_kv = row_h // GROUP
    c_hi_ptr += bh * S
    c_lo_ptr += bh * S
    c_rel_row = (bh * SP).to(tl.int32) if ROWS else bh * SP
    if STARTS:
        start_ptr += b * S
    if LOWER == 2:
        lower_ptr += bh * T

    offs_m, offs_n = tl.arange(0, BM), tl.arange(0, BN)
    offs_d0 = tl.arange(0, D0)
    offs_d1 = D0 + tl.arange(0, D1 if D1 > 0 else D0)
    pos, start, least, greatest = query_facts(start_ptr, m0, offs_m, T, S, q_offset, STARTS)
    lower = lowest(lower_ptr, m0 + offs_m, T, S, q_offset, window, LOWER)
    last_pos = q_offset + tl.minimum(m0 + BM, T) - 1
    low, mid_low, mid_high, high, sink_low, sink_high = key_range(
        m0, last_pos, S, q_offset, least, greatest, lower, sink, BM, BN, LOWER)  # fmt: skip

    q0 = load_rows(q_ptr, row_b, row_h, m0, sq_t, offs_m, offs_d0, T, True, TMA > 1)
    q1 = q0
    acc0 = tl.zeros([BM, D0], tl.float32)
    acc1 = acc0
    if D1 > 0:
        q1 = load_rows(q_ptr, row_b, row_h, m0, sq_t, offs_m, offs_d1, T, True, TMA > 1)
        acc1 = tl.zeros([BM, D1], tl.float32)
    top = tl.full([BM], float("-inf"), tl.float32)
    m = top
    l = tl.zeros([BM], tl.float32)
    weight = l
    c_i_hi = tl.load(c_hi_ptr + tl.minimum(pos, S - 1))
    c_i_lo = tl.load(c_lo_ptr + tl.minimum(pos, S - 1))
    ref_hi, ref_lo = block_scalars(c_hi_ptr, c_lo_ptr, q_offset + m0, S)

    for it in range(high - mid_high + mid_low - low + sink_high - sink_low):
        n0 = masked_block(it, low, mid_low, mid_high, high, sink_low) * BN
        top, m, l, weight, acc0, acc1 = _attend(
            row_b, row_kv, n0, q0, q1, k_ptr, v_ptr, sk_t, sv_t, offs_n, offs_d0, offs_d1, c_i_hi, c_i_lo, 0.0,
            c_hi_ptr, c_lo_ptr, c_rel_ptr, c_rel_row, pos, start, lower, S, sink, scale2, softcap2,
            inverse_cap, top, m, l, weight, acc0, acc1,
            True, STARTS, LOWER, SINK, CAP, D1, PRECISION, TMA, ROWS)  # fmt: skip

    # From exact units to units relative to c_ref; the rounding of the sum goes into l and acc.
    shift = (c_i_hi - ref_hi) + (c_i_lo - ref_lo)
    finite = tl.where(m == float("-inf"), 0.0, m)
    relative = finite - shift
    repair = tl.exp2(finite - (relative + shift))
    l *= repair
    weight *= repair
    acc0 *= repair[:, None]
    if D1 > 0:
        acc1 *= repair[:, None]
    m = tl.where(m == float("-inf"), m, relative)
    top = tl.where(top == float("-inf"), top, top - shift)

    last_hi, last_lo = block_scalars(c_hi_ptr, c_lo_ptr, tl.maximum(mid_high * BN - 1, 0), S)
    for it in range(mid_high - mid_low):
        n0 = (mid_high - 1 - it) * BN
        if not ROWS:
            last_hi, last_lo = block_scalars(c_hi_ptr, c_lo_ptr, n0 + BN - 1, S)
        lift = (ref_hi - last_hi) + (ref_lo - last_lo)
        if ROWS:
            last_hi, last_lo = block_scalars(c_hi_ptr, c_lo_ptr, tl.maximum(n0 - 1, 0), S)
        top, m, l, weight, acc0, acc1 = _attend(
            row_b, row_kv, n0, q0, q1, k_ptr, v_ptr, sk_t, sv_t, offs_n, offs_d0, offs_d1, c_i_hi, c_i_lo, lift,
            c_hi_ptr, c_lo_ptr, c_rel_ptr, c_rel_row, pos, start, lower, S, sink, scale2, softcap2,
            inverse_cap, top, m, l, weight, acc0, acc1,
            False, STARTS, LOWER, SINK, CAP, D1, PRECISION, TMA, ROWS)  # fmt: skip

    empty = l == 0  # NaN isn't
    l = tl.where(empty, 1.0, l)
    lse = tl.where(empty, float("-inf"), (m + shift) + tl.log2(l))
    rows = m0 + offs_m < T
    tl.store(lse_ptr + bh * T + m0 + offs_m, lse, mask=rows)
    weight = tl.where(empty, 1.0, weight)
    at = ((b * T + m0) * H + h) * (D0 + D1) + offs_m[:, None] * (H * (D0 + D1))
    store_rounded(o_ptr, residual_ptr, at + offs_d0[None, :], acc0 / weight[:, None], rows[:, None], RESIDUAL)
    if D1 > 0:
        store_rounded(o_ptr, residual_ptr, at + offs_d1[None, :], acc1 / weight[:, None], rows[:, None], RESIDUAL)


def shared_arguments(q, k, options: Options, documents: Documents) -> dict:
    """Return by name what all three kernels take of a problem, but for its tensors; documents with their edges."""
    scale, window, sink, softcap, _ = options
    softcap2, inverse_cap = cap_factors(softcap)
    D0, D1 = split_head_dim(q.shape[-1])
    return {
        "T": q.shape[1], "S": k.shape[1], "H": q.shape[2], "GROUP": q.shape[2] // k.shape[2], "D0": D0, "D1": D1,
        "q_offset": k.shape[1] - q.shape[1], "window": window or 0, "sink": sink,
        "SINK": sink > 0, "scale2": scale * LOG2_E, "softcap2": softcap2, "inverse_cap": inverse_cap,
        "CAP": cap_kind(softcap, q.dtype), "start_ptr": None if documents.edges is None else documents.edges[0],
        "STARTS": documents.edges is not None, "lower_ptr": documents.first_seen,
        "LOWER": 2 if documents.first_seen is not None else int(window is not None),  # 2: as searched, 1: by the window
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
    }  # fmt: skip


def walked_together(bytes_per_head: int, pairs: int, heads: int = 1) -> int:
    """Return how many (batch, head) pairs to walk at a time; `heads` of them share the same bytes in the L2 cache."""
    return min(pairs, heads * max(1, L2_BYTES // bytes_per_head))


def launch_forward(
    q, k, v, c_hi, c_lo, options: Options, documents: Documents = ONE_DOCUMENT, *,
    residual: torch.Tensor | None = None, tile: Tile | None = None, out: torch.Tensor | None = None,
):  # fmt: skip
    """Return o (B, T, H, D) and lse2 (B, H, T), the base-2 log-sum-exp with c_i - c_j inside (-inf if nothing is seen).

    q (B, T, H, D), k, v (B, S, Hkv, D); c_hi + c_lo (B, H, S) is c * log2(e) in two floats. residual, a tensor like
    o, is filled with the rounding error of o; out, contiguous, becomes o.
    """
    (B, T, H, D), (S, Hkv) = q.shape, k.shape[1:3]
    q, k, v, c_hi, c_lo = aligned(q), aligned(k), aligned(v), c_hi.contiguous(), c_lo.contiguous()
    o = torch.empty(B, T, H, D, dtype=q.dtype, device=q.device) if out is None else out
    lse2 = torch.empty(B, H, T, dtype=torch.float32, device=q.device)
    if o.numel() == 0:
        return o, lse2
    documents = found_edges(c_hi, c_lo, T, options, documents, per_head=False)
    tile = tile or tile_for("forward", D, q.dtype, q.device)
    m, n = tile.block_m, tile.block_n
    relative = block_relative(c_hi, c_lo, n)
    tma = int(tile.tma) * (split_head_dim(D)[1] == 0 and q.element_size() == 2 and describable(q, k, v))
    by_row = int(tile.gates_by_tma and tma > 0 and relative.numel() < 1 << 31)
    launch(
        forward_kernel, (cdiv(T, m) * B * H,), warps=tile.warps, stages=tile.stages,
        q_ptr=source(q, m, tma >= Copies.OWN), k_ptr=source(k, n, tma), v_ptr=source(v, n, tma), o_ptr=o,
        residual_ptr=residual, lse_ptr=lse2, c_hi_ptr=c_hi, c_lo_ptr=c_lo, c_rel_ptr=row_source(relative, n, by_row),
        **strides_of(q=q, k=k, v=v), SP=relative.shape[-1],
        together=walked_together(2 * S * D * q.element_size(), B * H, H // Hkv), BM=m, BN=n,
        RESIDUAL=residual is not None, TMA=tma, ROWS=by_row,
        **shared_arguments(q, k, options, documents),
    )  # fmt: skip
    return o, lse2
