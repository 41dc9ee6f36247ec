"""Where decoding starts with a horizon: a search through the cached sums of the gates.

c falls, so what the first query of a step doesn't see is unseen by all that follow.
"""

import triton
import triton.language as tl

SEARCH_BLOCK, WAYS = tl.constexpr(64), tl.constexpr(64)  # keys, ways of a step


@triton.jit
def gate_rows(kv, H, sc_b, sc_h, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Where the rows of c of a kv head's query heads begin; the last of ROWS may repeat."""
    heads = H // GROUP
    return kv // heads * sc_b + (kv % heads * GROUP + tl.minimum(tl.arange(0, ROWS), GROUP - 1)) * sc_h


@triton.jit
def unseen(skipped, width, i, c_i_hi, c_i_lo, c_hi_ptr, c_lo_ptr, c_rows, horizon2):
    """How many of 64 lots of `width` blocks beyond those skipped no query head sees from position i on."""
    ends = (skipped + (1 + tl.arange(0, WAYS)) * width) * SEARCH_BLOCK
    known = ends <= i
    at = c_rows[:, None] + tl.where(known, ends - 1, 0)[None, :]
    fall = c_i_hi[:, None] - tl.load(c_hi_ptr + at, mask=known[None, :], other=0.0)
    fall += c_i_lo[:, None] - tl.load(c_lo_ptr + at, mask=known[None, :], other=0.0)
    least = tl.min((fall <= 0.0 - horizon2).to(tl.int32), 0)
    return tl.sum(tl.where(known, least, 0), 0)


@triton.jit(do_not_specialize=["S"])
def search_kernel(
    c_hi_ptr, c_lo_ptr, first_ptr, length_ptr, sc_b, sc_h, T, S, H, horizon2,
    GROUP: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """The first key of each (sequence, kv head) that some query of the group sees, down to a block's first."""
    kv = tl.program_id(0).to(tl.int64)
    if length_ptr is not None:
        S = tl.load(length_ptr) + T
    c_rows = gate_rows(kv, H, sc_b, sc_h, GROUP, ROWS)
    c_i_hi, c_i_lo = tl.load(c_hi_ptr + c_rows + S - T), tl.load(c_lo_ptr + c_rows + S - T)
    skipped, width = S * 0, 1
    for _ in tl.static_range(STEPS - 1):
        width *= WAYS
    for _ in tl.static_range(STEPS):
        skipped += unseen(skipped, width, S - T, c_i_hi, c_i_lo, c_hi_ptr, c_lo_ptr, c_rows, horizon2) * width
        width = width // WAYS
    tl.store(first_ptr + kv, skipped * SEARCH_BLOCK)


@triton.jit
def advance(first_ptr, kv, i, H, c_hi_ptr, c_lo_ptr, sc_b, sc_h, horizon2, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Moves a kv head's first key, as an earlier query saw it, on to what the query at i sees: mostly one look."""
    c_rows = gate_rows(kv, H, sc_b, sc_h, GROUP, ROWS)
    c_i_hi, c_i_lo = tl.load(c_hi_ptr + c_rows + i), tl.load(c_lo_ptr + c_rows + i)
    skipped, more = tl.load(first_ptr + kv) // SEARCH_BLOCK, tl.full([], WAYS, tl.int32)
    while more == WAYS:
        more = unseen(skipped, 1, i, c_i_hi, c_i_lo, c_hi_ptr, c_lo_ptr, c_rows, horizon2)
        skipped += more
    tl.store(first_ptr + kv, skipped * SEARCH_BLOCK)


def search_steps(S: int) -> int:
    """Return in how many steps a search in 64 ways goes through the blocks of S keys."""
    steps = 1
    while 64 ** (steps + 1) < S:
        steps += 1
    return steps
