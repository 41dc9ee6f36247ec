"""In the registers of a consumer of the Hopper backward: float32 sums of dS over queries and over keys; dq's order."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


def _halves(lanes: int) -> gl.constexpr:
    """Keep the upper of two halves where this bit of the lane is set, else the lower, and add the other lane's."""
    return gl.constexpr(
        f"{{ .reg .pred p; .reg .b32 l, s, k; mov.u32 l, %laneid; and.b32 l, l, {lanes}; shr.u32 k, $3, 31;"
        f" or.b32 l, l, k; setp.ne.u32 p, l, 0;"
        f" selp.b32 s, $1, $2, p; selp.b32 k, $2, $1, p; shfl.sync.bfly.b32 s, s, {lanes}, 31, 0xffffffff;"
        f" add.f32 $0, k, s; }}"
    )


COLUMNS = gl.constexpr(  # layout of a column for each of 8 heads
    gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 8, 16])
)
HALVES_16, HALVES_8, HALVES_4 = _halves(16), _halves(8), _halves(4)


@gluon.jit
def _fold(x, late, TEXT: gl.constexpr):
    """(4, 8, N) to (4, 8, N / 2): threads 16, 8 or 4 apart add each other's half of the columns to their own."""
    low, high = x.reshape([4, 8, 2, x.shape[2] // 2]).permute((0, 1, 3, 2)).split()
    late = gl.full(low.shape, late, gl.int32, layout=low.type.layout)
    return gl.inline_asm_elementwise(TEXT, "=f,f,f,r", [low, high, late], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def pairs_of_keys(x, BM: gl.constexpr):
    """(64, BM) to (4, 8, BM): the sums of keys r and r + 8, which a thread has both."""
    a, b = x.reshape([4, 2, 8, BM]).permute((0, 2, 3, 1)).split()
    return a + b


@gluon.jit
def sums_over_queries(x, head, BM: gl.constexpr, HEADS: gl.constexpr):
    """(64, BM) to (64, 4): each thread's sums over the queries that it has, still to be added over 4 threads.

    Of several heads to (64, 8): whole sums, in the head's column.
    """
    if HEADS == 1:
        return gl.sum(gl.sum(x.reshape([64, BM // 8, 4, 2]), 3), 1)
    else:
        sums = gl.convert_layout(gl.sum(x, 1), gl.SliceLayout(1, COLUMNS))
        own = gl.arange(0, 8, layout=gl.SliceLayout(0, COLUMNS))[None, :] == head
        return gl.where(own, sums[:, None], 0.0)


@gluon.jit
def sums_over_keys(pairs, late, BM: gl.constexpr):
    """(4, 8, BM) to (4 * BM,): each warp's sums over its 16 keys, one behind the other.

    A thread has rows r and r + 8 of every column it has, so 8 threads share a column: halving what each goes on with
    takes 28 shuffles for 128 columns, where a sum of each column over 8 threads takes 96.
    """
    return _fold(_fold(_fold(pairs, late, HALVES_16), late, HALVES_8), late, HALVES_4).reshape([4 * BM])


@gluon.jit
def by_thread(dq):
    """(64, 64) in an order of its own, which `finish_kernel` undoes: four floats of each thread, thread after thread.

    A thread has pairs of columns of rows r and r + 8, 8 columns apart. Stored as rows, swizzled for TMA, two threads of
    four rows always share their banks; in this order none do, and a store has 16 bytes, not 8.
    """
    return dq.reshape([4, 2, 8, 8, 4, 2]).permute((0, 3, 2, 4, 1, 5)).reshape([64, 64])
