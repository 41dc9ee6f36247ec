"""Rotary embedding of queries and keys in one launch, forward and backward; pairs that don't turn are copied.

    out_p     = x_p cos_p - x_{p + D/2} sin_p          p < P
    out_{p'}  = x_{p'} cos_p + x_p sin_p               p' = p + D/2
    out       = x                                      for the pairs P..D/2

The P pairs that turn come first: the fastest, which a partial RoPE keeps. Products are summed in float32 and rounded
once, where torch's expression rounds three times.
"""

from functools import partial

import triton
import triton.language as tl
from torch import Tensor

from ..host.device import require
from ..host.launch import launch, power_of_2
from .differentiable import Pass, differentiable


def tokens_per_program(half: int) -> int:
    """Return how many tokens of one head a program turns: 1024 pairs, so that nothing spills at any head dim."""
    return max(8, 1024 // power_of_2(half))


@triton.jit
def turn(x_at, o_at, cos, sin, pairs, here):
    """Turns the pairs `here`, of which x_at are the first channels, into o_at."""
    a = tl.load(x_at, mask=here, other=0.0).to(tl.float32)
    b = tl.load(x_at + pairs, mask=here, other=0.0).to(tl.float32)
    tl.store(o_at, (a * cos - b * sin).to(o_at.dtype.element_ty), mask=here)
    tl.store(o_at + pairs, (b * cos + a * sin).to(o_at.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["T"])
def rotary_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, oq_ptr, ok_ptr, q_strides, k_strides, angle_strides,
    T, H, Hkv, pairs, turning, INVERSE: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    heads = H + Hkv
    h = tl.program_id(0) % heads
    row = tl.program_id(0) // heads
    b = (row // tl.cdiv(T, BLOCK)).to(tl.int64)
    t = row % tl.cdiv(T, BLOCK) * BLOCK + tl.arange(0, BLOCK)
    p = tl.arange(0, HALF)
    turns = (t[:, None] < T) & (p[None, :] < turning)
    at = b * angle_strides[0] + t[:, None].to(tl.int64) * angle_strides[1] + p[None, :]
    cos = tl.load(cos_ptr + at, mask=turns, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + at, mask=turns, other=0.0).to(tl.float32)
    if INVERSE:
        sin = -sin
    here = (t[:, None] < T) & (p[None, :] < pairs)
    t = t[:, None].to(tl.int64)
    if h < H:
        q_ptr += b * q_strides[0] + h.to(tl.int64) * q_strides[1]
        oq_ptr += (b * T * H + h) * pairs * 2
        turn(q_ptr + t * q_strides[2] + p[None, :], oq_ptr + t * (H * pairs * 2) + p[None, :], cos, sin, pairs, here)
    else:
        h -= H
        k_ptr += b * k_strides[0] + h.to(tl.int64) * k_strides[1]
        ok_ptr += (b * T * Hkv + h) * pairs * 2
        turn(k_ptr + t * k_strides[2] + p[None, :], ok_ptr + t * (Hkv * pairs * 2) + p[None, :], cos, sin, pairs, here)


def _like(q: Tensor, k: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
    """Return q and k (B, H, T, D) unwritten, laid out as (B, T, H, D)."""
    (B, H, T, D), Hkv = q.shape, k.shape[1]
    return tuple(x.new_empty(B, T, heads, D).transpose(1, 2) for x, heads in ((q, H), (k, Hkv)))


def _launch(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    (B, H, T, D), Hkv = q.shape, k.shape[1]
    q, k, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, cos, sin))
    if sin.stride() != cos.stride():
        cos, sin = cos.contiguous(), sin.contiguous()
    oq, ok = _like(q, k)
    if q.numel() and k.numel():
        block = tokens_per_program(D // 2)
        grid = (B * -(-T // block) * (H + Hkv),)
        angle_strides = (cos.stride(0) if cos.shape[0] > 1 else 0), cos.stride(1)
        strides = q.stride()[:3], k.stride()[:3], angle_strides
        arguments = (q, k, cos, sin, oq, ok, *strides, T, H, Hkv, D // 2, cos.shape[-1])
        launch(rotary_kernel, grid, arguments, (inverse, power_of_2(D // 2), block))
    return oq, ok


_rotary = differentiable(
    "rotary",
    Pass(partial(_launch, inverse=False), "(Tensor q, Tensor k, Tensor cos, Tensor sin) -> (Tensor, Tensor)", _like),
    Pass(partial(_launch, inverse=True), "(Tensor dq, Tensor dk, Tensor cos, Tensor sin) -> (Tensor, Tensor)", _like),
    lambda inputs, output: (inputs[2:], ()),
    outputs=2,
)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Turn the first P of D/2 pairs (channel p with channel p + D/2) of queries and keys; leave the others alone.

    q (B, H, T, D), k (B, Hkv, T, D), one dtype, any strides; cos, sin (B or 1, T, P), P <= D/2, any float dtype.
    Returns both in their dtype, laid out in memory as (B, T, heads, D), as attention reads them. cos and sin get no
    gradient. Raises ValueError for shapes that don't fit, and where the kernels can't run (`device.available`).
    Source: Su et al., "RoFormer" (2021), section 3.4.2, halves stacked.
    """
    (B, _, T, D), P = q.shape, cos.shape[-1]
    fits = k.shape == (B, k.shape[1], T, D) and k.dtype == q.dtype and D % 2 == 0
    if not fits or cos.shape != sin.shape or cos.shape not in ((1, T, P), (B, T, P)) or P > D // 2:
        raise ValueError(
            f"q and k must be (B, heads, T, D) of one dtype, D even, cos and sin (B or 1, T, P <= D / 2); got "
            f"{tuple(q.shape)} {q.dtype}, {tuple(k.shape)} {k.dtype}, {tuple(cos.shape)}, {tuple(sin.shape)}"
        )
    require(q)
    return _rotary(q, k, cos, sin)
