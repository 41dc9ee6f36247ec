"""Where the keys that a position sees begin, and where the queries that see it end, from documents, padding, windows.

    start_i = the first position that the query at i sees       end_j = the first position whose query no longer sees j

Both are int32 and never fall along a row. One launch finds them, where torch takes ten, longer than a short problem
runs.
"""

import torch
import triton
import triton.language as tl

from ..host.launch import cdiv, launch

BLOCK = 1024


@triton.jit(do_not_specialize=["N", "S", "total", "window", "steps"])
def edges_kernel(cu_ptr, seq_start_ptr, out_ptr, N, S, total, window, steps, BLOCK: tl.constexpr):
    b = (tl.program_id(0) // tl.cdiv(S, BLOCK)).to(tl.int64)
    j = tl.program_id(0) % tl.cdiv(S, BLOCK) * BLOCK + tl.arange(0, BLOCK)
    start, end = j * 0, j * 0 + S
    if cu_ptr is not None:
        low, high = j * 0, j * 0 + N  # how many of the N documents end at or before j
        for _ in range(steps):
            middle = (low + high) // 2
            ended = tl.load(cu_ptr + 1 + middle, mask=low < high, other=S).to(tl.int32) <= j
            open_ = low < high
            low, high = tl.where(open_ & ended, middle + 1, low), tl.where(open_ & (ended == 0), middle, high)
        start = tl.load(cu_ptr + low).to(tl.int32)
        end = tl.load(cu_ptr + 1 + low, mask=low < N, other=S).to(tl.int32)
    if window is not None:
        start, end = tl.maximum(start, j + 1 - window), tl.minimum(end, j + window)
    if seq_start_ptr is not None:
        first = tl.load(seq_start_ptr + b).to(tl.int32)
        start, end = tl.maximum(start, first), tl.where(j < first, 0, end)
    tl.store(out_ptr + b * S + j, start, mask=j < S)
    tl.store(out_ptr + total + b * S + j, end, mask=j < S)


def edges(B: int, S: int, cu_seqlens, seq_start, window: int | None, device) -> torch.Tensor | None:
    """Return start and end as one tensor (2, B * S or up to 3 more) int32; None where a position sees all before it.

    cu_seqlens (N + 1,), seq_start (B,) int32 or int64, or None, as in `forgetting_attention`; window is at most S.
    """
    if cu_seqlens is None and seq_start is None and window is None:
        return None
    total = cdiv(B * S, 4) * 4  # so that both are aligned
    out = torch.empty(2, total, dtype=torch.int32, device=device)
    if total:
        N = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
        steps = None if N is None else N.bit_length()
        given = (x if x is None else x.contiguous() for x in (cu_seqlens, seq_start))
        launch(edges_kernel, (B * cdiv(S, BLOCK),), (*given, out, N, S, total, window, steps), (BLOCK,))
    return out
