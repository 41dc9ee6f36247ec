"""The kernels before and after the Hopper backward: row products, zeros, ranges by a horizon; rounding, row sums."""

import triton
import triton.language as tl

from ..common.blocks import LOG2E


@triton.jit(do_not_specialize=["T", "H", "rows", "tickets"])
def prepare_kernel(
    o_ptr, do_ptr, residual_ptr, dlse2_ptr, delta_ptr, dq_ptr, row_sum_ptr, ticket_ptr, of_o, of_do, of_dlse2,
    T, H, rows, tickets, D: tl.constexpr, WIDTH: tl.constexpr, BM: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """delta_i = do_i . (o_i + its rounding error) - dL/dlse_i; zeros for the row sums of dS, the tickets, both
    counters behind them and, with ZERO, dq. of_o, of_do, of_dlse2: strides."""
    tiles = rows // BM
    index = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tiles written are still in the L2 cache
    bh = (index // tiles).to(tl.int64)
    b, h = bh // H, bh % H
    offs_m = (index % tiles) * BM + tl.arange(0, BM)
    offs_d = tl.arange(0, WIDTH)
    inside = offs_m < T
    row = offs_m.to(tl.int64)[:, None]
    o_rows = o_ptr + b * of_o.batch + h * of_o.head + row * of_o.token
    do_rows = do_ptr + b * of_do.batch + h * of_do.head + row * of_do.token
    real = inside[:, None]
    if D < WIDTH:
        real = real & (offs_d < D)[None, :]
    o = tl.load(o_rows + offs_d[None, :], mask=real, other=0.0)
    do = tl.load(do_rows + offs_d[None, :], mask=real, other=0.0)
    o = o.to(tl.float32)
    if residual_ptr is not None:  # contiguous, like o
        rest = residual_ptr + ((b * T + row) * H + h) * D + offs_d[None, :]
        o += tl.load(rest, mask=real, other=0.0).to(tl.float32)
    delta = tl.sum(o * do.to(tl.float32), 1)
    if dlse2_ptr is not None:
        dlse2_row = dlse2_ptr + b * of_dlse2.batch + h * of_dlse2.head
        dlse2 = tl.load(dlse2_row + offs_m.to(tl.int64) * of_dlse2.token, mask=inside, other=0.0)
        delta -= dlse2.to(tl.float32) * LOG2E
    tl.store(delta_ptr + bh * rows + offs_m, delta)
    tl.store(row_sum_ptr + bh * rows + offs_m, tl.zeros([BM], tl.float32))
    if ZERO:
        tl.store(dq_ptr + (bh * rows + row) * WIDTH + offs_d[None, :], tl.zeros([BM, WIDTH], tl.float32))
    if tl.program_id(0) < tickets:
        tl.store(ticket_ptr + tl.program_id(0), 0)
    if tl.program_id(0) == 0:
        tl.store(ticket_ptr + tickets, 0)
        tl.store(ticket_ptr + tickets + 1, 0)


@triton.jit(do_not_specialize=["T", "S", "H", "rows"])
def finish_kernel(
    sum_ptr, dq_ptr, row_sum_ptr, dc_ptr, strides, scale, T, S, H, rows, D: tl.constexpr, WIDTH: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """dq = scale * its float32 sums, rounded; dc_i += dS's row sum."""
    tiles = rows // BM
    index = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tiles written are still in the L2 cache
    bh = (index // tiles).to(tl.int64)
    b, h = bh // H, bh % H
    offs_m = (index % tiles) * BM + tl.arange(0, BM)
    offs_d = tl.arange(0, WIDTH)
    inside = offs_m < T
    row = offs_m.to(tl.int64)[:, None]
    dq = tl.load(sum_ptr + (bh * rows + row) * WIDTH + offs_d[None, :]) * scale
    # 64 x 64 as the consumers' threads had it: warps, blocks of 8 columns, rows as 2 x 4 (the halves of the columns lie
    # between), 4 pairs of columns, rows 8 apart, the pair
    dq = tl.permute(tl.reshape(dq, [4, 8, 2, WIDTH // 64, 4, 4, 2, 2]), 0, 6, 2, 4, 3, 1, 5, 7)
    dq = tl.reshape(dq, [64, WIDTH])
    dq_rows = dq_ptr + b * strides.batch + h * strides.head + row * strides.token
    real = inside[:, None]
    if D < WIDTH:
        real = real & (offs_d < D)[None, :]
    tl.store(dq_rows + offs_d[None, :], dq.to(dq_ptr.dtype.element_ty), mask=real)
    dc = dc_ptr + bh * S + (S - T) + offs_m
    tl.store(dc, tl.load(dc, mask=inside, other=0.0) + tl.load(row_sum_ptr + bh * rows + offs_m), mask=inside)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b)


@triton.jit(do_not_specialize=["T", "S", "H", "bounds", "tiles", "num_n"])
def query_ranges_kernel(
    start_ptr, lo_ptr, hi_ptr, T, S, H, bounds, tiles, num_n, SIZE: tl.constexpr, PER: tl.constexpr,
    BOUND: tl.constexpr, BN: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """From the first key that each head's queries see: each query tile's (PER times BOUND queries) first key tile,
    never falling, and each key tile's last query tile: a program for PART key tiles."""
    parts = tl.cdiv(num_n, PART)
    bh = (tl.program_id(0) // parts).to(tl.int64)
    n0 = tl.program_id(0) % parts * PART
    m = tl.arange(0, SIZE)
    real = m < bounds
    first = tl.load(start_ptr + bh * S + S - T + m * BOUND, mask=real, other=S)
    lo = tl.associative_scan(first // BN, 0, _smaller, reverse=True)
    tile = real & (m % PER == 0)
    tl.store(lo_ptr + bh * tiles + m // PER, lo, mask=tile)
    for n in range(n0, tl.minimum(n0 + PART, num_n)):
        tl.store(hi_ptr + bh * num_n + n, tl.sum((tile & (lo <= n)).to(tl.int32), 0))
