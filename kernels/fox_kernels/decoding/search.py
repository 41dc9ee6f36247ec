"""Where decoding starts with a horizon: a search through the cached sums of the gates."""

import triton
import triton.language as tl

SEARCH_BLOCK, WAYS = tl.constexpr(64), tl.constexpr(64)  # keys, ways of a step


@triton.jit
def falls(skipped, width, c_i_hi, c_i_lo, c_rows, real, c_hi_ptr, c_lo_ptr, T, S, BLOCK: tl.constexpr):
    """c_i - c_j at the ends of 64 lots of `width` blocks beyond those skipped, and which of these come before all i."""
    blocks = skipped[:, None] + (1 + tl.arange(0, WAYS))[None, :] * width
    inside = (blocks * BLOCK <= S - T) & real[:, None]
    ends = c_rows[:, None] + tl.where(inside, blocks * BLOCK - 1, 0)
    fall = c_i_hi[:, None] - tl.load(c_hi_ptr + ends, mask=inside, other=0.0)
    fall += c_i_lo[:, None] - tl.load(c_lo_ptr + ends, mask=inside, other=0.0)
    return fall, inside


@triton.jit(do_not_specialize=["S"])
def search_kernel(
    c_hi_ptr, c_lo_ptr, first_ptr, length_ptr, sc_b, sc_h, T, S, H, horizon2,
    GROUP: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """The first key of each (sequence, kv head) that some query of the group sees, down to a block's first."""
    kv = tl.program_id(0).to(tl.int64)
    heads = H // GROUP
    if length_ptr is not None:
        S = tl.load(length_ptr) + T
    b, h_kv = kv // heads, kv % heads
    rows = tl.arange(0, ROWS)
    real = rows < T * GROUP
    t, h = tl.minimum(rows // GROUP, T - 1), h_kv * GROUP + rows % GROUP
    pos = S - T + t
    c_rows = b * sc_b + h * sc_h
    c_i_hi, c_i_lo = tl.load(c_hi_ptr + c_rows + pos), tl.load(c_lo_ptr + c_rows + pos)
    skipped = (c_rows * 0).to(tl.int32)  # blocks, per row: a prefix, searched 64-ways
    width = 1
    for _ in tl.static_range(STEPS - 1):
        width *= WAYS
    for _ in tl.static_range(STEPS):
        fall, inside = falls(skipped, width, c_i_hi, c_i_lo, c_rows, real, c_hi_ptr, c_lo_ptr, T, S, SEARCH_BLOCK)
        skipped += tl.sum(((fall <= 0.0 - horizon2) & inside).to(tl.int32), 1) * width
        width = width // WAYS
    first = tl.min(tl.where(real, skipped, S), 0) * SEARCH_BLOCK
    tl.store(first_ptr + kv, first)


def search_steps(S: int) -> int:
    """Return in how many steps a search in 64 ways goes through the blocks of S keys."""
    steps = 1
    while 64 ** (steps + 1) < S:
        steps += 1
    return steps
