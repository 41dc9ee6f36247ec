"""The forward in plain Triton: one program per tile of queries and head, keys walked from the diagonal outwards.

Every kernel here works in base 2: scores, c and lse are natural units times log2(e). Two forms of the decay are used:

    masked blocks    (diagonal, document and window edges, sinks)  the exact difference c_i - c_j of two-float values
    interior blocks  a row vector c_last - c_j <= 0, c_last being the block's last key: one multiply-add per score;
                     the scalar c_ref - c_last <= 0, c_ref being the tile's first query, goes into the running max

The running max moves from the first form to the second by c_i - c_ref, its rounding error being carried into the sums,
so that saturated gates (c falling by thousands within a tile) cost no accuracy.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..common.blocks import (
    Columns,
    Queries,
    c_at,
    ends_of_sinks,
    exact_tanh,
    extremes,
    gates_of_keys,
    key_range,
    load_rows,
    lowest,
    masked_block,
    masked_blocks,
    partial_sums,
    place,
    scale_of,
    scores,
    starts_of,
)
from ..common.cumsum import block_relative
from ..common.groups import Bounds, Gates, InputStrides, Output, Problem, Strides
from ..common.horizon import found_edges
from ..host.launch import cdiv, launch
from ..host.strides import aligned, describable, source
from ..options import ONE_DOCUMENT, Documents, Options
from .tiles import Copies, split_head_dim, tile_for

L2_BYTES = 24 << 20  # of Hopper's 50 MB, for the heads walked together


class Softmax(NamedTuple):
    """State of the online softmax: o in two blocks of columns, the largest score so far, the one that all sums are
    relative to, sums of weights as they are and as rounded."""

    acc0: Any
    acc1: Any
    top: Any
    m: Any
    l: Any
    weight: Any


@triton.jit
def _attend(
    b, h, n0, q0, q1, k, v, strides, offs_n, columns, rows, lift, c, relative, row, S, scale, state,
    MASKED: tl.constexpr, PROBLEM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One key block of the online softmax: sums and products relative to m, top is the largest score so far.

    lift: c_ref - c_last (interior), or 0 (masked: c_i counts). m is the block's own largest score, whose weight is then
    1: of all weights its rounding to 16 bits would cost most. Sums grow by no more than 2^16 for it. o will be divided
    by weight, which in masked blocks sums the weights as rounded: part of their rounding cancels. Elsewhere they are
    many, and it cancels by itself.
    """
    TMA: tl.constexpr = TILE.tma > 0
    keys = gates_of_keys(n0, offs_n, c, relative, row, S, MASKED, TILE.gates_by_tma)
    k0 = load_rows(k, b, h, n0, strides.k.token, offs_n, columns.first, S, MASKED, TMA)
    s = tl.dot(q0, tl.trans(k0), input_precision=PROBLEM.precision)
    if PROBLEM.d1 > 0:
        k1 = load_rows(k, b, h, n0, strides.k.token, offs_n, columns.second, S, MASKED, TMA)
        s = tl.dot(q1, tl.trans(k1), s, input_precision=PROBLEM.precision)
    s, _tanh = scores(s, keys, rows, S, scale, MASKED, PROBLEM)
    if MASKED:
        largest = tl.max(s, 1)
    else:  # two chains of maxima, and of sums below: a long chain takes time, not the number of operations
        largest = tl.max(tl.max(tl.reshape(s, [s.shape[0], s.shape[1] // 8, 8]), 1), 1) + lift
    top = tl.maximum(state.top, largest)
    m = tl.maximum(largest, top - 16.0)
    base = tl.where(top == float("-inf"), 0.0, m) if MASKED else m
    alpha = tl.exp2(state.m - base)
    acc0, acc1 = state.acc0 * alpha[:, None], state.acc1
    if PROBLEM.d1 > 0:
        acc1 = acc1 * alpha[:, None]
    p = tl.exp2(s - (base - lift)[:, None])
    total = tl.sum(p, 1) if MASKED else tl.sum(partial_sums(p), 1)
    l = state.l * alpha + total
    p_rounded = p.to(q0.dtype)
    # Not earlier: the compiler moves nothing between the exponentials across the wait for v.
    v0 = load_rows(v, b, h, n0, strides.v.token, offs_n, columns.first, S, MASKED, TMA)
    if MASKED and v0.dtype != tl.float32:
        ones = tl.full([p.shape[1], 8], 1.0, v0.dtype)  # cheaper than widening 16 bits to 32
        total = tl.sum(tl.dot(p_rounded, ones), 1) * 0.125
    weight = state.weight * alpha + total
    acc0 = tl.dot(p_rounded, v0, acc0, input_precision=PROBLEM.precision)
    if PROBLEM.d1 > 0:
        v1 = load_rows(v, b, h, n0, strides.v.token, offs_n, columns.second, S, MASKED, TMA)
        acc1 = tl.dot(p_rounded, v1, acc1, input_precision=PROBLEM.precision)
    return Softmax(acc0, acc1, top, m, l, weight)


@triton.jit
def store_rounded(out, at, x, mask):
    """Store x as o in the tensor's dtype and, where it is wanted, its rounding error."""
    rounded = x.to(out.o.dtype.element_ty)
    tl.store(out.o + at, rounded, mask=mask)
    if out.residual is not None:
        tl.store(out.residual + at, (x - rounded.to(tl.float32)).to(out.residual.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["T", "S", "together", "q_offset", "window", "sink"])
def forward_kernel(
    q, k, v, out, c, relative, bounds, strides, T, S, SP, H, together, q_offset, window, sink, scale,
    PROBLEM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    BM: tl.constexpr = TILE.block_m
    BN: tl.constexpr = TILE.block_n
    TMA: tl.constexpr = TILE.tma
    D0: tl.constexpr = PROBLEM.d0
    D1: tl.constexpr = PROBLEM.d1
    # The longest rows first; the query heads of a kv head are side by side.
    tiles = tl.cdiv(T, BM)
    tile, bh = place(tiles, tl.num_programs(0) // tiles, together)
    m0 = (tiles - 1 - tile) * BM
    b, h = bh // H, bh % H
    if TMA < 2:
        q += b * strides.q.batch + h * strides.q.head
    if TMA == 0:
        k += b * strides.k.batch + (h // PROBLEM.group) * strides.k.head
        v += b * strides.v.batch + (h // PROBLEM.group) * strides.v.head
    row_b, row_h = b.to(tl.int32), h.to(tl.int32)
    row_kv = row_h // PROBLEM.group
    c = Gates(c.hi + bh * S, c.lo + bh * S)
    relative_row = (bh * SP).to(tl.int32) if TILE.gates_by_tma else bh * SP
    starts, first_seen = bounds.start, bounds.first_seen
    if starts is not None:
        starts += b * S
    if first_seen is not None:
        first_seen += bh * T

    offs_m, offs_n = tl.arange(0, BM), tl.arange(0, BN)
    columns = Columns(tl.arange(0, D0), D0 + tl.arange(0, D1 if D1 > 0 else D0))
    pos, mask = q_offset + m0 + offs_m, m0 + offs_m < T
    start = starts_of(starts, pos, mask, S)
    least, greatest = extremes(start, mask, S)
    lower = lowest(first_seen, m0 + offs_m, T, S, q_offset, window)
    last_pos = q_offset + tl.minimum(m0 + BM, T) - 1
    blocks = key_range(m0, last_pos, S, q_offset, least, greatest, lower, sink, BM, BN)

    q0 = load_rows(q, row_b, row_h, m0, strides.q.token, offs_m, columns.first, T, True, TMA > 1)
    q1 = q0
    acc0 = tl.zeros([BM, D0], tl.float32)
    acc1 = acc0
    if D1 > 0:
        q1 = load_rows(q, row_b, row_h, m0, strides.q.token, offs_m, columns.second, T, True, TMA > 1)
        acc1 = tl.zeros([BM, D1], tl.float32)
    none = tl.full([BM], float("-inf"), tl.float32)
    zero = tl.zeros([BM], tl.float32)
    state = Softmax(acc0, acc1, none, none, zero, zero)
    rows = Queries(pos, start, lower, ends_of_sinks(pos, start, sink), c_at(c, pos, S))
    ref = c_at(c, q_offset + m0, S)

    for it in range(masked_blocks(blocks)):
        n0 = masked_block(it, blocks) * BN
        state = _attend(
            row_b, row_kv, n0, q0, q1, k, v, strides, offs_n, columns, rows, 0.0, c, relative, relative_row, S, scale,
            state, True, PROBLEM, TILE)  # fmt: skip

    # From exact units to units relative to c_ref; the rounding of the sum goes into l and acc.
    acc0, acc1, top, m, l, weight = state
    shift = (rows.c.hi - ref.hi) + (rows.c.lo - ref.lo)
    finite = tl.where(m == float("-inf"), 0.0, m)
    exact = finite - shift
    repair = tl.exp2(finite - (exact + shift))
    l *= repair
    weight *= repair
    acc0 *= repair[:, None]
    if D1 > 0:
        acc1 *= repair[:, None]
    m = tl.where(m == float("-inf"), m, exact)
    top = tl.where(top == float("-inf"), top, top - shift)
    state = Softmax(acc0, acc1, top, m, l, weight)

    last = c_at(c, tl.maximum(blocks.mid_high * BN - 1, 0), S)
    for it in range(blocks.mid_high - blocks.mid_low):
        n0 = (blocks.mid_high - 1 - it) * BN
        if not TILE.gates_by_tma:
            last = c_at(c, n0 + BN - 1, S)
        lift = (ref.hi - last.hi) + (ref.lo - last.lo)
        if TILE.gates_by_tma:
            last = c_at(c, tl.maximum(n0 - 1, 0), S)
        state = _attend(
            row_b, row_kv, n0, q0, q1, k, v, strides, offs_n, columns, rows, lift, c, relative, relative_row, S, scale,
            state, False, PROBLEM, TILE)  # fmt: skip

    empty = state.l == 0  # NaN isn't
    l = tl.where(empty, 1.0, state.l)
    lse = tl.where(empty, float("-inf"), (state.m + shift) + tl.log2(l))
    tl.store(out.lse + bh * T + m0 + offs_m, lse, mask=mask)
    weight = tl.where(empty, 1.0, state.weight)
    at = ((b * T + m0) * H + h) * (D0 + D1) + offs_m[:, None] * (H * (D0 + D1))
    store_rounded(out, at + columns.first[None, :], state.acc0 / weight[:, None], mask[:, None])
    if D1 > 0:
        store_rounded(out, at + columns.second[None, :], state.acc1 / weight[:, None], mask[:, None])


def shared_arguments(q, k, options: Options, documents: Documents) -> dict:
    """Return by name what all three kernels take of a problem, but for its tensors; documents with their edges."""
    scale, window, sink, softcap, _ = options
    d0, d1 = split_head_dim(q.shape[-1])
    start = None if documents.edges is None else documents.edges[0]
    return {
        "T": q.shape[1], "S": k.shape[1], "H": q.shape[2], "q_offset": k.shape[1] - q.shape[1],
        "window": window if documents.first_seen is None else None,  # else first_seen knows it
        "sink": sink or None, "scale": scale_of(scale, softcap),
        "bounds": Bounds(start, first_seen=documents.first_seen),
        "PROBLEM": Problem(
            q.shape[2] // k.shape[2], d0, d1, exact_tanh(softcap, q.dtype),
            "ieee" if q.dtype == torch.float32 else "tf32",
        ),
    }  # fmt: skip


def walked_together(bytes_per_head: int, pairs: int, heads: int = 1) -> int:
    """Return how many (batch, head) pairs to walk at a time; `heads` of them share the same bytes in the L2 cache."""
    return min(pairs, heads * max(1, L2_BYTES // bytes_per_head))


def launch_forward(
    q, k, v, c_hi, c_lo, options: Options, documents: Documents = ONE_DOCUMENT, *,
    residual: torch.Tensor | None = None, out: torch.Tensor | None = None,
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
    tile = tile_for("forward", D, q.dtype, q.device)
    m, n = tile.block_m, tile.block_n
    relative = block_relative(c_hi, c_lo, n)
    tma = int(tile.tma) * (split_head_dim(D)[1] == 0 and q.element_size() == 2 and describable(q, k, v))
    by_row = tile.gates_by_tma and tma > 0 and relative.numel() < 1 << 31
    row = TensorDescriptor(relative, [relative.numel()], [1], [n]) if by_row else relative
    launch(
        forward_kernel, (cdiv(T, m) * B * H,), warps=tile.warps, stages=tile.stages,
        q=source(q, m, tma >= Copies.OWN), k=source(k, n, tma), v=source(v, n, tma),
        out=Output(o, residual, lse2), c=Gates(c_hi, c_lo), relative=row,
        strides=InputStrides(*[Strides(*x.stride()[:3]) for x in (q, k, v)]), SP=relative.shape[-1],
        together=walked_together(2 * S * D * q.element_size(), B * H, H // Hkv),
        TILE=tile._replace(tma=tma, gates_by_tma=by_row), **shared_arguments(q, k, options, documents),
    )  # fmt: skip
    return o, lse2
