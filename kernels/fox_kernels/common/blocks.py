"""Blocks of queries and keys, for the forward and the backward: place, range, mask, rows, gates, scores.

Formulas: `triton.forward`.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .groups import Gates, Scale

LOG2_E = 1.4426950408889634  # scores, c and lse are natural units times this
LOG2E = tl.constexpr(LOG2_E)  # the same for kernels, which can read no plain global
COARSE_CAP = 256.0  # above, tanh by exp2 costs scores more than 1e-5
UNREACHED_CAP = 1e30  # no score is near: it caps nothing


class Queries(NamedTuple):
    """Queries of a tile: positions and gates; the starts of their documents, the first keys that windows or horizons
    leave and the ends of their sinks, or None."""

    pos: Any
    start: Any
    lower: Any
    sinks_end: Any
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
def expanded(x, AXIS: tl.constexpr):
    """x with one more dimension, or None."""
    if x is not None:
        return tl.expand_dims(x, AXIS)


@triton.jit
def visible(i, j, start, lower, is_sink, S):
    """Which keys j queries i see; all broadcast to the block in either orientation, start, lower and is_sink if any."""
    seen = (j < S) & (j <= i)
    if start is not None:
        seen = seen & (j >= start)
    if lower is not None:
        near = j >= lower
        if is_sink is not None:
            near = near | is_sink
        seen = seen & near
    return seen


@triton.jit
def c_at(c, position, S):
    """c, in two floats, at a position clamped to the last."""
    at = tl.minimum(position, S - 1)
    return Gates(tl.load(c.hi + at), tl.load(c.lo + at))


@triton.jit
def decayed(s, ci_hi, ci_lo, cj_hi, cj_lo, is_sink, sink_bias):
    """s + (c_i - c_j), exactly, or s + sink_bias at sinks, if any."""
    if is_sink is not None:
        return s + tl.where(is_sink, sink_bias, (ci_hi - cj_hi) + (ci_lo - cj_lo))
    return (s + (ci_lo - cj_lo)) + (ci_hi - cj_hi)


def scale_of(scale: float, softcap: float | None) -> Scale:
    """Return what kernels take of a scale and a softcap, but for gradients."""
    if softcap is None or softcap > UNREACHED_CAP:
        return Scale(None, scale * LOG2_E, None, None)
    return Scale(None, scale * LOG2_E, softcap * LOG2_E, 2.0 / softcap)


def exact_tanh(softcap: float | None, dtype: torch.dtype) -> bool:
    """Return whether `scaled` must give tanh with all its digits."""
    return softcap is not None and (dtype == torch.float32 or softcap > COARSE_CAP)


@triton.jit
def scaled(s, scale, EXACT_TANH: tl.constexpr):
    """Products of queries and keys as base-2 scores, capped if there is a softcap; and tanh of the cap.

    Near 0, tanh by exp2 is a difference of two numbers near 1, with an error of 6e-8 of softcap2. EXACT_TANH: 6e-8 of
    the value.
    """
    s = s * scale.base2
    tanh = s
    if scale.softcap2 is not None:
        tanh = 1.0 - 2.0 / (tl.exp2(s * scale.inverse_cap) + 1.0)
        if EXACT_TANH:
            x = s * scale.inverse_cap * 0.34657359027997264  # ln(2) / 2
            y = x * x  # Taylor's series of tanh to x^9: its error below 0.3 is 5e-8
            near = x + x * y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835))))
            tanh = tl.where(y < 0.09, near, tanh)
        s = scale.softcap2 * tanh
    return s, tanh


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
def lowest(first_seen, t, T, S, q_offset, window):
    """The first key that queries t see, documents and sinks aside: as searched, by the window, or None."""
    if first_seen is not None:
        return tl.load(first_seen + t, mask=t < T, other=S)
    elif window is not None:
        return q_offset + t + 1 - window


@triton.jit
def starts_of(start_ptr, pos, row, S):
    """The starts of queries' documents, or None; row: which positions are queries."""
    if start_ptr is not None:
        return tl.load(start_ptr + tl.minimum(pos, S - 1), mask=row, other=0)


@triton.jit
def extremes(start, row, S):
    """The least and the greatest of a tile's starts."""
    least, greatest = S * 0, S * 0
    if start is not None:
        least, greatest = tl.min(tl.where(row, start, S), 0), tl.max(start, 0)
    return least, greatest


@triton.jit
def ends_of_sinks(pos, start, sink):
    """Where the sinks of queries end, or None."""
    if sink is not None:
        return (tl.zeros_like(pos) if start is None else start) + sink


@triton.jit
def key_range(m0, last_pos, S, q_offset, least, greatest, lower, sink, BM: tl.constexpr, BN: tl.constexpr):
    """The `KeyBlocks` of a query tile."""
    first_pos = q_offset + m0
    high = tl.minimum(S, last_pos + 1)
    full = tl.minimum(S, first_pos)  # a query's own key is masked, here as in dk/dv: their sums of dS leave it out
    low = least
    ragged = tl.maximum(greatest, 0)
    if lower is not None:
        rows = first_pos + tl.arange(0, BM) <= last_pos
        low = tl.maximum(low, tl.min(tl.where(rows, lower, S), 0))
        ragged = tl.maximum(ragged, tl.max(tl.where(rows, lower, 0), 0))
    if sink is not None:
        ragged = tl.maximum(ragged, tl.minimum(greatest + sink, S))
    high = tl.cdiv(tl.maximum(high, 0), BN)
    low = tl.minimum(low // BN, high)
    mid_high = tl.maximum(tl.minimum(full // BN, high), low)
    mid_low = tl.minimum(tl.maximum(tl.cdiv(ragged, BN), low), mid_high)
    sink_low = tl.minimum(least // BN, low)
    sink_high = sink_low
    if sink is not None:
        sink_high = tl.maximum(tl.minimum(tl.cdiv(least + sink, BN), low), sink_low)
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
def sinks_among(keys, rows):
    """Which keys are sinks of which queries, or None."""
    if rows.sinks_end is not None:
        return keys.pos[None, :] < rows.sinks_end[:, None]


@triton.jit
def scores(s, keys, rows, S, scale, MASKED: tl.constexpr, PROBLEM: tl.constexpr):
    """Products of queries and keys as base-2 scores: scaled, capped, with their decay, -inf where hidden; and tanh."""
    s, tanh = scaled(s, scale, PROBLEM.exact_tanh)
    if MASKED:
        is_sink = sinks_among(keys, rows)
        s = decayed(
            s, rows.c.hi[:, None], rows.c.lo[:, None], keys.c.hi[None, :], keys.c.lo[None, :], is_sink, 0.0
        )  # fmt: skip
        i, j = rows.pos[:, None], keys.pos[None, :]
        seen = visible(i, j, expanded(rows.start, 1), expanded(rows.lower, 1), is_sink, S)
        s = tl.where(seen, s, float("-inf"))
    else:
        s += keys.c.hi[None, :]
    return s, tanh
