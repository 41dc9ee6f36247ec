"""Blocks of queries and keys, for the forward and the backward: place, range, mask, rows, gates, scores.

Formulas: `triton.forward`.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .groups import Gates

LOG2_E = 1.4426950408889634  # scores, c and lse are natural units times this
LOG2E = tl.constexpr(LOG2_E)  # the same for kernels, which can read no plain global
COARSE_CAP = 256.0  # above, tanh by exp2 costs scores more than 1e-5
UNREACHED_CAP = 1e30  # no score is near: it caps nothing


class Queries(NamedTuple):
    """Queries of a tile: positions, starts of their documents, first keys of windows or horizons, their gates."""

    pos: Any
    start: Any
    lower: Any
    c: Gates


class Keys(NamedTuple):
    """A block of keys: positions, and c as `gates_of_keys` returns it."""

    pos: Any
    c: Gates


class KeyBlocks(NamedTuple):
    """Key blocks of a query tile: [low, mid_low) masked, [mid_low, mid_high) interior, [mid_high, high) masked, and
    the sinks' own masked blocks [sink_low, sink_high) below low."""

    low: Any
    mid_low: Any
    mid_high: Any
    high: Any
    sink_low: Any
    sink_high: Any


class Columns(NamedTuple):
    """Offsets of the head dim's two blocks of columns."""

    first: Any
    second: Any


@triton.jit
def visible(i, j, start, lower, S, sink, STARTS: tl.constexpr, LOWER: tl.constexpr):
    """Which keys j queries i see; i, j, start and lower broadcast to the block in either orientation."""
    seen = (j < S) & (j <= i)
    if STARTS:
        seen = seen & (j >= start)
    if LOWER:
        seen = seen & ((j >= lower) | (j < start + sink))
    return seen


@triton.jit
def c_at(c, position, S):
    """c, in two floats, at a position clamped to the last."""
    at = tl.minimum(position, S - 1)
    return Gates(tl.load(c.hi + at), tl.load(c.lo + at))


@triton.jit
def decayed(s, ci_hi, ci_lo, cj_hi, cj_lo, is_sink, sink_bias, SINK: tl.constexpr):
    """s + (c_i - c_j), exactly, or s + sink_bias at sinks."""
    if SINK:
        return s + tl.where(is_sink, sink_bias, (ci_hi - cj_hi) + (ci_lo - cj_lo))
    return (s + (ci_lo - cj_lo)) + (ci_hi - cj_hi)


def cap_kind(softcap: float | None, dtype: torch.dtype) -> int:
    """Return the kernels' CAP: 0 for no softcap, 1 for tanh by exp2, 2 for tanh with all its digits (`soft_capped`)."""
    if softcap is None or softcap > UNREACHED_CAP:
        return 0
    return 2 if dtype == torch.float32 or softcap > COARSE_CAP else 1


def cap_factors(softcap: float | None) -> tuple[float, float]:
    """Return softcap2 and inverse_cap of `soft_capped`; zeros for no softcap."""
    return (0.0, 0.0) if softcap is None else (softcap * LOG2_E, 2.0 / softcap)


@triton.jit
def scaled(s, scale, CAP: tl.constexpr):
    """Products of queries and keys as base-2 scores, capped; and tanh of the cap."""
    tanh = s
    if CAP:
        s, tanh = soft_capped(s * scale.base2, scale.softcap2, scale.inverse_cap, CAP == 2)
    else:
        s = s * scale.base2
    return s, tanh


@triton.jit
def soft_capped(s, softcap2, inverse_cap, EXACT: tl.constexpr):
    """softcap2 * tanh(s / softcap2), by exp2; returns the value and tanh.

    Near 0 that is a difference of two numbers near 1, with an error of 6e-8 of softcap2. EXACT: 6e-8 of the value.
    """
    t = 1.0 - 2.0 / (tl.exp2(s * inverse_cap) + 1.0)
    if EXACT:
        x = s * inverse_cap * 0.34657359027997264  # ln(2) / 2
        y = x * x  # Taylor's series of tanh to x^9: its error below 0.3 is 5e-8
        near = x + x * y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835))))
        t = tl.where(y < 0.09, near, t)
    return softcap2 * t, t


@triton.jit
def load_rows(ptr, b, h, row, stride, offs_r, offs_d, limit, MASKED: tl.constexpr, TMA: tl.constexpr):
    """Rows row + offs_r of a (rows, D) matrix with unit last stride; the block's base is 64 bit.

    With TMA, ptr describes the whole (B, rows, H, D) tensor, and rows beyond the last are zero.
    """
    if TMA:
        x = ptr.load([b, row, h, 0]).reshape(offs_r.shape[0], offs_d.shape[0])
    elif MASKED:
        ptrs = ptr + row.to(tl.int64) * stride + offs_r[:, None] * stride + offs_d[None, :]
        x = tl.load(ptrs, mask=(row + offs_r < limit)[:, None], other=0.0)
    else:
        x = tl.load(ptr + row.to(tl.int64) * stride + offs_r[:, None] * stride + offs_d[None, :])
    return x


@triton.jit
def place(tiles, pairs, together):
    """This program's tile, counted from the heaviest, and its (batch, head) pair.

    `together` pairs are walked at a time, so that the keys which their tiles share stay in the L2 cache. The remaining
    pairs go first: last, they would be too few to keep the GPU busy beside the heaviest tile.
    """
    left = pairs % together
    beyond = tl.program_id(0) - left * tiles
    width = tl.where(beyond < 0, left, together)
    first = tl.where(beyond < 0, 0, left + beyond // (together * tiles) * together)
    rest = tl.where(beyond < 0, tl.program_id(0), beyond % (together * tiles))
    return rest // width, (first + rest % width).to(tl.int64)


@triton.jit
def lowest(first_seen, t, T, S, q_offset, window, LOWER: tl.constexpr):
    """The first key that queries t see, documents and sinks aside: by the window (LOWER 1), or as searched (2)."""
    if LOWER == 2:
        return tl.load(first_seen + t, mask=t < T, other=S)
    if LOWER == 1:
        return q_offset + t + 1 - window
    return t * 0


@triton.jit
def query_facts(start_ptr, m0, offs_m, T, S, q_offset, STARTS: tl.constexpr):
    """Positions of a tile's queries, their document starts, and the least and greatest of these."""
    pos = q_offset + m0 + offs_m
    start = tl.zeros_like(pos)
    if STARTS:
        row = m0 + offs_m < T
        start = tl.load(start_ptr + tl.minimum(pos, S - 1), mask=row, other=0)
        least = tl.min(tl.where(row, start, S), 0)
        greatest = tl.max(start, 0)
    else:
        least = m0 * 0
        greatest = m0 * 0
    return pos, start, least, greatest


@triton.jit
def key_range(
    m0, last_pos, S, q_offset, least, greatest, lower, sink, BM: tl.constexpr, BN: tl.constexpr, LOWER: tl.constexpr
):
    """The `KeyBlocks` of a query tile."""
    first_pos = q_offset + m0
    high = tl.minimum(S, last_pos + 1)
    full = tl.minimum(S, first_pos)  # a query's own key is masked, here as in dk/dv: their sums of dS leave it out
    low = least
    ragged = tl.maximum(greatest, 0)
    if LOWER:
        rows = first_pos + tl.arange(0, BM) <= last_pos
        low = tl.maximum(low, tl.min(tl.where(rows, lower, S), 0))
        ragged = tl.maximum(ragged, tl.max(tl.where(rows, lower, 0), 0))
    ragged = tl.where(sink > 0, tl.maximum(ragged, tl.minimum(greatest + sink, S)), ragged)
    high = tl.cdiv(tl.maximum(high, 0), BN)
    low = tl.minimum(low // BN, high)
    mid_high = tl.maximum(tl.minimum(full // BN, high), low)
    mid_low = tl.minimum(tl.maximum(tl.cdiv(ragged, BN), low), mid_high)
    sink_low = tl.minimum(least // BN, low)
    sink_high = tl.where(sink > 0, tl.maximum(tl.minimum(tl.cdiv(least + sink, BN), low), sink_low), sink_low)
    return KeyBlocks(low, mid_low, mid_high, high, sink_low, sink_high)


@triton.jit
def masked_blocks(blocks):
    """How many of the key blocks are masked."""
    return blocks.high - blocks.mid_high + blocks.mid_low - blocks.low + blocks.sink_high - blocks.sink_low


@triton.jit
def masked_block(it, blocks):
    """The it-th masked key block: from the diagonal down, then the low edge, then the sinks."""
    diagonal = blocks.high - blocks.mid_high
    edge = diagonal + blocks.mid_low - blocks.low
    return tl.where(
        it < diagonal,
        blocks.high - 1 - it,
        tl.where(it < edge, blocks.mid_low - 1 - (it - diagonal), blocks.sink_low + it - edge),
    )


@triton.jit
def gates_of_keys(n0, offs_n, c, relative, row, S, MASKED: tl.constexpr, ROWS: tl.constexpr):
    """A key block's positions and gates: c in two floats (masked), or c relative to its last, twice.

    With ROWS, relative describes the rows of all heads as one for TMA; this head's begins at row.
    """
    j = n0 + offs_n
    if MASKED:
        first = tl.load(c.hi + j, mask=j < S, other=0.0)
        second = tl.load(c.lo + j, mask=j < S, other=0.0)
    else:
        if ROWS:
            first = relative.load([row + n0])
        else:
            first = tl.load(relative + row + j)
        second = first
    return Keys(j, Gates(first, second))


@triton.jit
def partial_sums(x):
    """Eight sums of every row, each over every eighth column: in a product's layout no thread needs another's."""
    return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 8, 8]), 1)


@triton.jit
def scores(s, keys, rows, S, sink, scale, MASKED: tl.constexpr, PROBLEM: tl.constexpr):
    """Products of queries and keys as base-2 scores: scaled, capped, with their decay, -inf where hidden; and tanh."""
    s, tanh = scaled(s, scale, PROBLEM.cap)
    if MASKED:
        s = decayed(s, rows.c.hi[:, None], rows.c.lo[:, None], keys.c.hi[None, :], keys.c.lo[None, :],
                    keys.pos[None, :] < rows.start[:, None] + sink, 0.0, PROBLEM.sink)  # fmt: skip
        i, j = rows.pos[:, None], keys.pos[None, :]
        seen = visible(i, j, rows.start[:, None], rows.lower[:, None], S, sink, PROBLEM.starts, PROBLEM.lower)
        s = tl.where(seen, s, float("-inf"))
    else:
        s += keys.c.hi[None, :]
    return s, tanh
