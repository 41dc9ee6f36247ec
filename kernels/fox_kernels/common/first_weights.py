"""The rounding error of the first queries' weights, times do: the gradient of v starts from it.

    lost_j = sum_i (p_ij - round(p_ij)) do_i        over the first BLOCK queries i and keys j and the heads of a group

Products take weights of 16 bits. Most of the resulting error of dv comes from the first rows, where few keys share a
weight of 1: correcting one block of every sequence removes much of it, with open gates half.
Formulas: `triton.backward`.
"""

import torch
import triton
import triton.language as tl

from ..host.launch import launch, power_of_2
from ..options import Options
from .blocks import decayed, exact_tanh, scale_of, scaled
from .groups import Gates, InputStrides, Strides

BLOCK = 64  # also the keys of a consumer in `hopper.backward_kernel`


@triton.jit(do_not_specialize=["T", "H", "sink"])
def first_block_kernel(
    q_ptr, k_ptr, do_ptr, lse_ptr, c, lost_ptr, strides, T, H, sink, scale,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EXACT_TANH: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    b, kv = pair // (H // GROUP), pair % (H // GROUP)
    i, d = tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    inside = (i < T)[:, None] & (d < D)[None, :]
    j = i[:, None]
    at = j.to(tl.int64)
    k_rows = k_ptr + b * strides.k.batch + kv * strides.k.head + at * strides.k.token
    k = tl.load(k_rows + d[None, :], mask=inside, other=0.0)
    seen = (j <= i[None, :]) & (i < T)[None, :]
    lost = tl.zeros([BLOCK, WIDTH], tl.float32)
    for g in range(GROUP):
        h = kv * GROUP + g
        q_rows = q_ptr + b * strides.q.batch + h * strides.q.head + at * strides.q.token
        do_rows = do_ptr + b * strides.do.batch + h * strides.do.head + at * strides.do.token
        q = tl.load(q_rows + d[None, :], mask=inside, other=0.0)
        do = tl.load(do_rows + d[None, :], mask=inside, other=0.0)
        row = (b * H + h) * T + i
        c_hi, c_lo = tl.load(c.hi + row, mask=i < T, other=0.0), tl.load(c.lo + row, mask=i < T, other=0.0)
        lse = tl.load(lse_ptr + row, mask=i < T, other=0.0)
        s, _ = scaled(tl.dot(k, tl.trans(q)), scale, EXACT_TANH)
        is_sink = None if sink is None else j < sink
        s = decayed(s, c_hi[None, :], c_lo[None, :], c_hi[:, None], c_lo[:, None], is_sink, 0.0)
        p = tl.exp2(tl.where(seen, s - lse[None, :], float("-inf")))
        lost = tl.dot((p - p.to(do.dtype).to(tl.float32)).to(do.dtype), do, lost)
    tl.store(lost_ptr + (pair * BLOCK + j) * D + d[None, :], lost, mask=(d < D)[None, :])


def begins_at_the_first_key(q, k, bounded: bool) -> bool:
    """Return whether the first queries see the first keys and no others, and weights are rounded to 16 bits.

    bounded: documents, padding, a window or a horizon hide keys.
    """
    return not bounded and q.shape[1] == k.shape[1] and q.element_size() == 2


def lost_to_rounding(q, k, do, lse2, c_hi, c_lo, options: Options) -> torch.Tensor:
    """Return lost (B, Hkv, BLOCK, D) float32; q, k, do have unit last strides, lse2, c_hi and c_lo are contiguous."""
    (B, T, H, D), Hkv = q.shape, k.shape[2]
    lost = torch.empty(B, Hkv, BLOCK, D, dtype=torch.float32, device=q.device)
    scale, _, sink, softcap, _ = options
    width = power_of_2(D)
    strides = InputStrides(Strides(*q.stride()[:3]), Strides(*k.stride()[:3]), do=Strides(*do.stride()[:3]))
    launch(
        first_block_kernel,
        (B * Hkv,),
        (
            q, k, do, lse2, Gates(c_hi, c_lo), lost, strides, T, H, sink or None, scale_of(scale, softcap),
        ),
        (H // Hkv, D, width, BLOCK, exact_tanh(softcap, q.dtype)),
        warps=8 if width > 128 else 4, stages=1,  # with more, heads one after another would not fit at D = 256
    )  # fmt: skip
    return lost
