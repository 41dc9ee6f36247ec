"""Which keys a horizon leaves: the first key that each query sees, and the first query that no longer sees each key.

    first_seen_i  = min {j : c_j < c_i + horizon, j > i - window} <= i      unseen_from_j = #{i : first_seen_i <= j}

c falls, so both never fall along a row, and binary searches find them; a query whose c is NaN is left its own key. The
Triton kernels take these, and see to sinks, which are visible beyond a horizon. The Hopper kernels take the edges of
documents and windows narrowed by the horizon, per head. The forward saves either for its backward: both hide the same
keys.
"""

import torch
import triton
import triton.language as tl

from ..host.launch import cdiv, launch
from ..options import Documents, Options
from .edges import edges

BLOCK = 256
NATS = tl.constexpr(0.6931471805599453 * (1 + 1e-9))  # of base 2, rounded up: a decay of just a horizon hides a key


@triton.jit(do_not_specialize=["T", "S", "window", "steps"])
def first_seen_kernel(hi_ptr, lo_ptr, out_ptr, T, S, window, horizon, steps, BLOCK: tl.constexpr):
    bh = (tl.program_id(0) // tl.cdiv(T, BLOCK)).to(tl.int64)
    t = tl.program_id(0) % tl.cdiv(T, BLOCK) * BLOCK + tl.arange(0, BLOCK)
    at = bh * S + S - T + tl.minimum(t, T - 1)
    own = tl.load(hi_ptr + at).to(tl.float64) + tl.load(lo_ptr + at).to(tl.float64)
    low = t * 0
    high = tl.minimum(S - T + t, S)
    for _ in range(steps):
        middle = (low + high) // 2
        going = low < high
        c = tl.load(hi_ptr + bh * S + middle, mask=going, other=0.0).to(tl.float64)
        c += tl.load(lo_ptr + bh * S + middle, mask=going, other=0.0).to(tl.float64)
        hidden = ((c - own) * NATS < horizon) == 0
        low, high = tl.where(going & hidden, middle + 1, low), tl.where(going & (hidden == 0), middle, high)
    if window is not None:
        low = tl.maximum(low, S - T + t - window + 1)
    tl.store(out_ptr + bh * T + t, low, mask=t < T)


@triton.jit(do_not_specialize=["T", "S", "steps"])
def unseen_from_kernel(first_ptr, out_ptr, T, S, steps, BLOCK: tl.constexpr):
    bh = (tl.program_id(0) // tl.cdiv(S, BLOCK)).to(tl.int64)
    j = tl.program_id(0) % tl.cdiv(S, BLOCK) * BLOCK + tl.arange(0, BLOCK)
    low, high = j * 0, j * 0 + T
    for _ in range(steps):
        middle = (low + high) // 2
        going = low < high
        seen = tl.load(first_ptr + bh * T + middle, mask=going, other=0) <= j
        low, high = tl.where(going & seen, middle + 1, low), tl.where(going & (seen == 0), middle, high)
    tl.store(out_ptr + bh * S + j, low, mask=j < S)


def first_seen(c_hi: torch.Tensor, c_lo: torch.Tensor, T: int, options: Options) -> torch.Tensor | None:
    """Return (B, H, T) int32, the first key that each of the last T tokens sees, sinks aside; None without a horizon.

    c_hi, c_lo (B, H, S) float32 are c in base 2.
    """
    if options.horizon is None:
        return None
    B, H, S = c_hi.shape
    out = torch.empty(B, H, T, dtype=torch.int32, device=c_hi.device)
    if out.numel():
        numbers = (T, S, options.window, options.horizon, S.bit_length())
        arguments = (c_hi.contiguous(), c_lo.contiguous(), out, *numbers)
        launch(first_seen_kernel, (B * H * cdiv(T, BLOCK),), arguments, (BLOCK,))
    return out


@triton.jit(do_not_specialize=["S", "total", "steps"])
def edges_within_kernel(hi_ptr, lo_ptr, edges_ptr, out_ptr, S, H, total, horizon, steps, BLOCK: tl.constexpr):
    bh = (tl.program_id(0) // tl.cdiv(S, BLOCK)).to(tl.int64)
    j = tl.program_id(0) % tl.cdiv(S, BLOCK) * BLOCK + tl.arange(0, BLOCK)
    hi_ptr += bh * S
    lo_ptr += bh * S
    own = tl.load(hi_ptr + j, mask=j < S, other=0.0).to(tl.float64)
    own += tl.load(lo_ptr + j, mask=j < S, other=0.0).to(tl.float64)
    start, start_end = j * 0, tl.minimum(j, S)  # where the first key that the query at j sees may lie
    end, end_end = tl.minimum(j + 1, S), j * 0 + S  # the first query behind it that no longer sees key j
    for _ in range(steps):
        key, query = (start + start_end) // 2, (end + end_end) // 2
        c_key = tl.load(hi_ptr + key, mask=start < start_end, other=0.0).to(tl.float64)
        c_key += tl.load(lo_ptr + key, mask=start < start_end, other=0.0).to(tl.float64)
        c_query = tl.load(hi_ptr + query, mask=end < end_end, other=0.0).to(tl.float64)
        c_query += tl.load(lo_ptr + query, mask=end < end_end, other=0.0).to(tl.float64)
        near_key, near_query = (c_key - own) * NATS < horizon, (own - c_query) * NATS < horizon
        searched, seeking = start < start_end, end < end_end
        start = tl.where(searched & (near_key == 0), key + 1, start)
        start_end = tl.where(searched & near_key, key, start_end)
        end = tl.where(seeking & near_query, query + 1, end)
        end_end = tl.where(seeking & (near_query == 0), query, end_end)
    if edges_ptr is not None:
        row = edges_ptr + bh // H * S + j
        start = tl.maximum(start, tl.load(row, mask=j < S, other=0))
        end = tl.minimum(end, tl.load(row + total, mask=j < S, other=0))
    tl.store(out_ptr + bh * S + j, start, mask=j < S)
    tl.store(out_ptr + tl.num_programs(0).to(tl.int64) // tl.cdiv(S, BLOCK) * S + bh * S + j, end, mask=j < S)


def edges_within(c_hi: torch.Tensor, c_lo: torch.Tensor, edges: torch.Tensor | None, horizon: float) -> torch.Tensor:
    """Return start and end (2, B, H, S) int32 of each head: those of `common.edges.edges`, narrowed by a horizon.

    c_hi, c_lo (B, H, S) float32, contiguous, are c in base 2; it must not rise along a row.
    """
    B, H, S = c_hi.shape
    out = torch.empty(2, B, H, S, dtype=torch.int32, device=c_hi.device)
    if out.numel():
        total = None if edges is None else edges.shape[-1]
        arguments = (c_hi, c_lo, edges, out, S, H, total, horizon, S.bit_length())
        launch(edges_within_kernel, (B * H * cdiv(S, BLOCK),), arguments, (BLOCK,))
    return out


def unseen_from(first: torch.Tensor, S: int) -> torch.Tensor:
    """Return (B, H, S) int32: for each key how many queries come before the first that no longer sees it."""
    B, H, T = first.shape
    out = torch.empty(B, H, S, dtype=torch.int32, device=first.device)
    if out.numel():
        launch(unseen_from_kernel, (B * H * cdiv(S, BLOCK),), (first, out, T, S, T.bit_length()), (BLOCK,))
    return out


def found_edges(
    c_hi: torch.Tensor, c_lo: torch.Tensor, T: int, options: Options, documents: Documents, *, per_head: bool
) -> Documents:
    """Return documents with edges and first_seen as kernels take them, but for what they have.

    per_head=True, for the Hopper kernels: the edges are narrowed by the window and the horizon. Else edges are those of
    documents and padding, and first_seen is narrowed by the window.
    """
    if documents.first_seen is not None or (documents.edges is not None and (per_head or options.horizon is None)):
        return documents
    B, _, S = c_hi.shape
    window, found = options.window if per_head else None, documents.edges
    if found is None:
        found = edges(B, S, documents.cu_seqlens, documents.seq_start, window, c_hi.device)
    if not per_head:
        return documents._replace(edges=found, first_seen=first_seen(c_hi, c_lo, T, options))
    if options.horizon is not None:
        found = edges_within(c_hi, c_lo, found, options.horizon)
    return documents._replace(edges=found)
