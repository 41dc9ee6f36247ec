"""Where decoding starts with a horizon: a search through the cached sums of the gates.

c falls, so what the first query of a step doesn't see is unseen by all that follow.
"""

import triton
import triton.language as tl

from ..common.groups import Gates

SEARCH_BLOCK, WAYS = tl.constexpr(64), tl.constexpr(64)  # keys, ways of a step


@triton.jit
def rows_of(kv, H, c, strides, offset, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """The rows of c of a kv head's query heads; the last of ROWS may repeat."""
    heads, query = H // GROUP, tl.minimum(tl.arange(0, ROWS), GROUP - 1)
    at = kv // heads * strides.batch + kv % heads * strides.head + query * strides.token
    if offset is not None:
        at += tl.load(offset + kv // heads)
    return Gates(c.hi + at, c.lo + at)


@triton.jit
def unseen(skipped, width, i, c_i, rows, horizon2):
    """How many of 64 lots of `width` blocks beyond those skipped no query head sees from position i on."""
    ends = (skipped + (1 + tl.arange(0, WAYS)) * width) * SEARCH_BLOCK
    known = ends <= i
    at = tl.where(known, ends - 1, 0)[None, :]
    fall = c_i.hi[:, None] - tl.load(rows.hi[:, None] + at, mask=known[None, :], other=0.0)
    fall += c_i.lo[:, None] - tl.load(rows.lo[:, None] + at, mask=known[None, :], other=0.0)
    least = tl.min((fall <= 0.0 - horizon2).to(tl.int32), 0)
    return tl.sum(tl.where(known, least, 0), 0)


@triton.jit(do_not_specialize=["S"])
def search_kernel(
    c, first, length, strides, T, S, H, horizon2, GROUP: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """The first key of each (sequence, kv head) that some query of the group sees, down to a block's first."""
    kv = tl.program_id(0).to(tl.int64)
    if length is not None:
        S = tl.load(length) + T
    rows = rows_of(kv, H, c, strides, None, GROUP, ROWS)
    c_i = Gates(tl.load(rows.hi + S - T), tl.load(rows.lo + S - T))
    skipped, width = S * 0, 1
    for _ in tl.static_range(STEPS - 1):
        width *= WAYS
    for _ in tl.static_range(STEPS):
        skipped += unseen(skipped, width, S - T, c_i, rows, horizon2) * width
        width = width // WAYS
    tl.store(first + kv, skipped * SEARCH_BLOCK)


@triton.jit
def advance(first, kv, i, H, c, strides, offset, horizon2, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Moves a kv head's first key, as an earlier query saw it, on to what the query at i sees: mostly one look."""
    rows = rows_of(kv, H, c, strides, offset, GROUP, ROWS)
    c_i = Gates(tl.load(rows.hi + i), tl.load(rows.lo + i))
    skipped, more = tl.load(first + kv) // SEARCH_BLOCK, tl.full([], WAYS, tl.int32)
    while more == WAYS:
        more = unseen(skipped, 1, i, c_i, rows, horizon2)
        skipped += more
    tl.store(first + kv, skipped * SEARCH_BLOCK)


def search_steps(S: int) -> int:
    """Return in how many steps a search in 64 ways goes through the blocks of S keys."""
    steps = 1
    while 64 ** (steps + 1) < S:
        steps += 1
    return steps
