"""The cumulative log-forget in two floats, and the suffix sum that turns its gradient into the gate's.

    c_t = log2(e) * sum_{l <= t} max(log f_l, -1e4) = hi_t + lo_t        dlog_f_t = sum_{s >= t} dc_s

Both are summed in float64. Rounded to one float32, c_i - c_j would be off by 2.6e-3 at 32768 tokens of mean log f = -1;
with two by 1e-5.
"""

import torch
import triton
import triton.language as tl

from ..host.launch import cdiv, launch
from ..options import LOG_F_MIN
from .blocks import LOG2E

SMALLEST, LARGEST = 1024, 4096  # positions of a block: eight blocks to a row between these


def block_for(S: int) -> tuple[int, int]:
    """Return (positions of a block, warps) for rows of S."""
    block = min(LARGEST, max(SMALLEST, 1 << (S - 1).bit_length() >> 3))
    return block, 4 * max(1, block // 1024)


@triton.jit
def clamped(x, floor):
    return tl.maximum(x.to(tl.float64), floor, propagate_nan=tl.PropagateNan.ALL)


# In both, a program first sums the blocks beyond its own, then scans the block: reading the row again costs less
# than waiting for the programs before it.
@triton.jit(do_not_specialize=["S"])
def cumulative_kernel(x_ptr, hi_ptr, lo_ptr, counter_ptr, sx_b, sx_s, sx_h, S, H, floor, BLOCK: tl.constexpr):
    bh = tl.program_id(0).to(tl.int64)
    if counter_ptr is not None:
        tl.store(counter_ptr, 0, mask=tl.program_id(0) + tl.program_id(1) == 0)
    first = tl.program_id(1) * BLOCK
    offs = tl.arange(0, BLOCK)
    x_ptr += (bh // H) * sx_b + (bh % H) * sx_h
    before = tl.zeros([BLOCK], tl.float64)
    for s0 in tl.range(0, first, BLOCK, loop_unroll_factor=4):
        before += clamped(tl.load(x_ptr + (s0 + offs).to(tl.int64) * sx_s), floor)
    s = first + offs
    x = clamped(tl.load(x_ptr + s.to(tl.int64) * sx_s, mask=s < S, other=0.0), floor)
    c = (tl.sum(before, 0) + tl.cumsum(x, 0)) * LOG2E
    hi = c.to(tl.float32)
    tl.store(hi_ptr + bh * S + s, hi, mask=s < S)
    tl.store(lo_ptr + bh * S + s, (c - hi.to(tl.float64)).to(tl.float32), mask=s < S)


@triton.jit(do_not_specialize=["S"])
def suffix_kernel(dc_ptr, x_ptr, out_ptr, sx_b, sx_s, sx_h, S, H, floor, BLOCK: tl.constexpr):
    bh = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    offs = tl.arange(0, BLOCK)
    dc_ptr += bh * S
    x_ptr += (bh // H) * sx_b + (bh % H) * sx_h
    out_ptr += (bh // H) * S * H + bh % H
    after = tl.zeros([BLOCK], tl.float64)
    for s0 in tl.range(first + BLOCK, S, BLOCK, loop_unroll_factor=4):
        after += tl.load(dc_ptr + s0 + offs, mask=s0 + offs < S, other=0.0).to(tl.float64)
    s = first + offs
    dc = tl.load(dc_ptr + s, mask=s < S, other=0.0).to(tl.float64)
    x = tl.load(x_ptr + s.to(tl.int64) * sx_s, mask=s < S, other=0.0)
    d = tl.sum(after, 0) + tl.cumsum(dc, 0, reverse=True)
    d = tl.where(x.to(tl.float64) < floor, 0.0, d)
    tl.store(out_ptr + s.to(tl.int64) * H, d.to(out_ptr.dtype.element_ty), mask=s < S)


@triton.jit(do_not_specialize=["S"])
def relative_kernel(hi_ptr, lo_ptr, out_ptr, S, SP, GROUP: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) // tl.cdiv(S, GROUP)
    row = index * S
    first = tl.program_id(0) % tl.cdiv(S, GROUP) * GROUP
    last = row + tl.minimum(first + GROUP, S) - 1
    s = first + tl.arange(0, GROUP)
    hi = tl.load(hi_ptr + row + s, mask=s < S, other=0.0)
    lo = tl.load(lo_ptr + row + s, mask=s < S, other=0.0)
    out = (tl.load(hi_ptr + last) - hi) + (tl.load(lo_ptr + last) - lo)
    tl.store(out_ptr + index * SP + s, out, mask=s < S)


def block_relative(hi: torch.Tensor, lo: torch.Tensor, block: int) -> torch.Tensor:
    """Return c_last - c_j (B, H, S to 16s) float32, c_last being the last value of j's block of `block` keys.

    One float is enough: where the difference is large, the gates between have cut j off from every later query.
    """
    B, H, S = hi.shape
    padded = cdiv(S, 16) * 16  # so that the rows are aligned
    out = torch.empty(B, H, padded, dtype=torch.float32, device=hi.device)
    launch(relative_kernel, (B * H * cdiv(S, block),), (hi, lo, out, S, padded), (block,), warps=1)
    return out


def cumulative(log_f: torch.Tensor, counter: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (hi, lo), each (B, H, S) float32, with hi + lo = log2(e) * cumsum of log_f (B, S, H) over S.

    counter (1,) int32, if given, is set to 0 for a later kernel: that saves a launch.
    """
    B, S, H = log_f.shape
    hi, lo = (torch.empty(B, H, S, dtype=torch.float32, device=log_f.device) for _ in range(2))
    if log_f.numel():
        block, warps = block_for(S)
        arguments = (log_f, hi, lo, counter, *log_f.stride(), S, H, LOG_F_MIN)
        launch(cumulative_kernel, (B * H, cdiv(S, block)), arguments, (block,), warps=warps)
    return hi, lo


def gate_gradient(dc: torch.Tensor, log_f: torch.Tensor) -> torch.Tensor:
    """Return dL/dlog_f (B, S, H): the suffix sum of dc (B, H, S), natural units, zero where log_f was clamped."""
    B, S, H = log_f.shape
    out = torch.empty(B, S, H, dtype=log_f.dtype, device=log_f.device)
    if log_f.numel():
        block, warps = block_for(S)
        arguments = (dc, log_f, out, *log_f.stride(), S, H, LOG_F_MIN)
        launch(suffix_kernel, (B * H, cdiv(S, block)), arguments, (block,), warps=warps)
    return out
