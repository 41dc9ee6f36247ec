"""Shared by the partitions of the Hopper backward: barriers, the producer's messages, the order of the key tiles."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# barriers; those of two come one per slot, those from Q_FULL on full ones and empty ones of each stage
DQ_FULL, DQ_EMPTY, HEAD_FULL, HEAD_EMPTY = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2), gl.constexpr(4)
KV_FULL, KV_EMPTY, HEAD_DONE, Q_FULL = (gl.constexpr(x) for x in (6, 8, 10, 12))
# the producer's message about a chunk of heads: key tile (-1: no more), range of query tiles, each head's last one
INFO, I_INDEX, I_LO, I_HI, I_STEPS, I_HEADS = (gl.constexpr(x) for x in (16, 0, 1, 2, 3, 4))


@gluon.jit
def acquire(pointer):
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [pointer], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def key_tile(index, num_n, num_bh, group):
    """The index-th key tile: groups of heads, in each group ascending keys (the longest walks first)."""
    per_group = group * num_n
    g = index // per_group
    r = index - g * per_group
    width = gl.minimum(group, num_bh - g * group)
    return r // width, g * group + r % width


@gluon.jit
def scalar(info):
    return gl.max(info.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)
