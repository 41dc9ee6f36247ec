"""Queries, keys and values of a plain attention layer, their rotation and the gates, as one function.

    (q, k, v) = x (W_q, W_k, W_v)^T + b,   q, k turned by (cos, sin),   log f = log sigmoid(W_f x + b_f)

One product forward and two backward where the separate layers take four and eight, and no additions of four gradients
of x: dx and all dW come from one matrix G = [dq, dk, dv, dz] of gradients, turned back as it is packed. The gate's dz
goes into G as two 16-bit numbers (its rounding and the rest), so that dW_f keeps float32's digits to 2^-16; log f
itself is computed in float32 by `gate`. For training in eager mode; `rotary` and `gate` serve torch.compile.
"""

import contextlib
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..host.device import require
from ..host.launch import launch, power_of_2
from . import gate, rotary


@triton.jit
def _cos_sin(cos_ptr, sin_ptr, sc_b, sc_t, n, N, T, turning, HALF: tl.constexpr):
    p = tl.arange(0, HALF)
    turns = (n[:, None] < N) & (p[None, :] < turning)
    at = (n // T)[:, None].to(tl.int64) * sc_b + (n % T)[:, None].to(tl.int64) * sc_t + p[None, :]
    cos = tl.load(cos_ptr + at, mask=turns, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + at, mask=turns, other=0.0).to(tl.float32)
    return cos, sin


@triton.jit(do_not_specialize=["N", "T"])
def turn_kernel(
    qkv_ptr, cos_ptr, sin_ptr, sc_b, sc_t, N, T, heads, row, pairs, turning, HALF: tl.constexpr, BLOCK: tl.constexpr
):
    h = tl.program_id(0) % heads
    n = tl.program_id(0) // heads * BLOCK + tl.arange(0, BLOCK)
    p = tl.arange(0, HALF)
    cos, sin = _cos_sin(cos_ptr, sin_ptr, sc_b, sc_t, n, N, T, turning, HALF)
    turns = (n[:, None] < N) & (p[None, :] < turning)
    at = qkv_ptr + n[:, None].to(tl.int64) * row + h * pairs * 2 + p[None, :]
    rotary.turn(at, at, cos, sin, pairs, turns)


@triton.jit
def _pack_head(x_ptr, sx_n, g_ptr, E, cos, sin, n, N, pairs, HALF: tl.constexpr):
    p = tl.arange(0, HALF)
    here = (n[:, None] < N) & (p[None, :] < pairs)
    x_at = x_ptr + n[:, None].to(tl.int64) * sx_n + p[None, :]
    a = tl.load(x_at, mask=here, other=0.0).to(tl.float32)
    b = tl.load(x_at + pairs, mask=here, other=0.0).to(tl.float32)
    g_at = g_ptr + n[:, None].to(tl.int64) * E + p[None, :]
    tl.store(g_at, (a * cos + b * sin).to(g_ptr.dtype.element_ty), mask=here)
    tl.store(g_at + pairs, (b * cos - a * sin).to(g_ptr.dtype.element_ty), mask=here)


class PackedStrides(NamedTuple):
    """Strides of gradients (N, channels) from token to token, of log f's and of cos and sin."""

    q: int
    k: int
    v: int
    f_token: int
    f_head: int
    cos_batch: int
    cos_token: int


@triton.jit(do_not_specialize=["N", "T"])
def pack_kernel(
    dq_ptr, dk_ptr, dv_ptr, dlog_f_ptr, z_ptr, cos_ptr, sin_ptr, g_ptr, db_ptr, strides,
    N, T, H, Hkv, pairs, turning, E, padded, HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    programs = H + 2 * Hkv + 1
    h = tl.program_id(0) % programs
    block = tl.program_id(0) // programs
    n = block * BLOCK + tl.arange(0, BLOCK)
    D = pairs * 2
    if h < H + Hkv:
        cos, sin = _cos_sin(cos_ptr, sin_ptr, strides.cos_batch, strides.cos_token, n, N, T, turning, HALF)
        if h < H:
            _pack_head(dq_ptr + h * D, strides.q, g_ptr + h * D, E, cos, sin, n, N, pairs, HALF)
        else:
            _pack_head(dk_ptr + (h - H) * D, strides.k, g_ptr + h * D, E, cos, sin, n, N, pairs, HALF)
    elif h < H + 2 * Hkv:
        still = tl.full([BLOCK, HALF], 1.0, tl.float32)
        _pack_head(dv_ptr + (h - H - Hkv) * D, strides.v, g_ptr + h * D, E, still, still * 0.0, n, N, pairs, HALF)
    else:
        j = tl.arange(0, HEADS)
        here = (n[:, None] < N) & (j[None, :] < H)
        z = tl.load(z_ptr + n[:, None].to(tl.int64) * H + j[None, :], mask=here, other=0.0)
        dlog_f = tl.load(
            dlog_f_ptr + n[:, None].to(tl.int64) * strides.f_token + j[None, :] * strides.f_head, mask=here, other=0.0
        )
        dz = dlog_f / (1.0 + tl.exp(z))
        tl.store(db_ptr + block * H + j, tl.sum(dz, 0), mask=j < H)
        high = dz.to(g_ptr.dtype.element_ty)
        low = (dz - high.to(tl.float32)).to(g_ptr.dtype.element_ty)
        g_at = g_ptr + n[:, None].to(tl.int64) * E + (H + 2 * Hkv) * D + j[None, :]
        inside = (n[:, None] < N) & (j[None, :] < padded)
        tl.store(g_at, high, mask=inside)
        tl.store(g_at + padded, low, mask=inside)


@triton.jit
def weights_kernel(q_ptr, k_ptr, v_ptr, f_ptr, out_ptr, K, Q, KV, H, padded, BK: tl.constexpr):
    row = tl.program_id(0)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    out_at = out_ptr + row.to(tl.int64) * K + k
    if row < Q:
        w = tl.load(q_ptr + row.to(tl.int64) * K + k, mask=k < K).to(tl.float32)
    elif row < Q + KV:
        w = tl.load(k_ptr + (row - Q).to(tl.int64) * K + k, mask=k < K).to(tl.float32)
    elif row < Q + 2 * KV:
        w = tl.load(v_ptr + (row - Q - KV).to(tl.int64) * K + k, mask=k < K).to(tl.float32)
    else:
        head = (row - Q - 2 * KV) % padded
        # by where: Triton 3.9's interpreter makes integers of (k < K) & (head < H)
        w = tl.load(f_ptr + head.to(tl.int64) * K + k, mask=tl.where(head < H, k < K, False), other=0.0)
    tl.store(out_at, w.to(out_ptr.dtype.element_ty), mask=k < K)


def _stacked_weights(wq: Tensor, wk: Tensor, wv: Tensor, wf: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (E, K): the rows of W_q, W_k, W_v, then W_f twice, each time filled up to a multiple of 8 rows."""
    (Q, K), KV, H = wq.shape, wk.shape[0], wf.shape[0]
    padded = -(-H // 8) * 8
    out = torch.empty(Q + 2 * KV + 2 * padded, K, dtype=dtype, device=wq.device)
    launch(weights_kernel, (out.shape[0], -(-K // 1024)), (wq, wk, wv, wf, out, K, Q, KV, H, padded), (1024,))
    return out


def _without_autocast(x: Tensor) -> contextlib.AbstractContextManager:
    """Return a context in which products of x's dtype stay in it; entering torch's own costs the host 20 us."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) == x.dtype:
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)


class _Entry(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, wq, wk, wv, bias, wf, bf, cos, sin, head_dim):
        (B, T, K), (Q, KV, H) = x.shape, (w.shape[0] for w in (wq, wk, wf))
        flat = x.reshape(B * T, K)
        flat = flat if flat.stride(1) == 1 else flat.contiguous()
        with torch.cuda.device_of(x), _without_autocast(x):
            weights = _stacked_weights(wq, wk, wv, wf, x.dtype)
            columns = weights[: Q + 2 * KV].t()
            qkv = flat @ columns if bias is None else torch.addmm(bias.to(x.dtype), flat, columns)
            heads = (Q + KV) // head_dim
            if cos.shape[-1]:
                block = rotary.tokens_per_program(head_dim // 2)
                arguments = (
                    qkv, cos, sin, cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1), B * T, T, heads,
                    qkv.shape[1], head_dim // 2, cos.shape[-1],
                )  # fmt: skip
                launch(turn_kernel, (-(-B * T // block) * heads,), arguments, (power_of_2(head_dim // 2), block))
            log_f, z = gate.gate_and_logit(flat, wf, bf)
        # Weights of another dtype are cast anyway, and autocast keeps its casts for the backward, too.
        kept = weights if wq.dtype != x.dtype else None
        ctx.save_for_backward(flat, wq, wk, wv, wf, z, cos, sin, kept)
        ctx.head_dim, ctx.bias_dtype = head_dim, None if bias is None else bias.dtype
        q, k, v = qkv.view(B, T, Q + 2 * KV).split((Q, KV, KV), -1)
        return q, k, v, log_f.view(B, T, H)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dq, dk, dv, dlog_f):
        x, wq, wk, wv, wf, z, cos, sin, weights = ctx.saved_tensors
        (B, T, Q), (N, K), KV, H = dq.shape, x.shape, wk.shape[0], wf.shape[0]
        R, D, padded = Q + 2 * KV, ctx.head_dim, -(-H // 8) * 8
        dq, dk, dv, dlog_f = (d.flatten(0, 1) for d in (dq, dk, dv, dlog_f))
        dq, dk, dv = (d if d.stride(1) == 1 else d.contiguous() for d in (dq, dk, dv))
        needs = ctx.needs_input_grad
        with torch.cuda.device_of(x), _without_autocast(x):
            g = torch.empty(N, R + 2 * padded, dtype=x.dtype, device=x.device)
            block = rotary.tokens_per_program(D // 2)
            blocks = -(-N // block)
            db = torch.empty(blocks, H, dtype=torch.float32, device=x.device)
            strides = PackedStrides(
                dq.stride(0), dk.stride(0), dv.stride(0), *dlog_f.stride(),
                cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1),
            )  # fmt: skip
            arguments = (
                dq, dk, dv, dlog_f, z, cos, sin, g, db, strides, N, T, Q // D, KV // D, D // 2, cos.shape[-1],
                g.shape[1], padded,
            )  # fmt: skip
            constants = (power_of_2(D // 2), power_of_2(padded), block)
            launch(pack_kernel, (blocks * ((Q + 2 * KV) // D + 1),), arguments, constants)
            if weights is None:
                weights = _stacked_weights(wq, wk, wv, wf, x.dtype)
            dx = (g @ weights).view(B, T, K) if needs[0] else None
            dwq = dwk = dwv = dwf = None
            if any(needs[1:4]) or needs[5]:
                first = 0 if any(needs[1:4]) else R
                mine = g[:, first:].t()  # its product with x is summed over the tokens in float32
                widens = g.is_cuda and g.dtype != torch.float32
                dw = torch.mm(mine, x, out_dtype=torch.float32) if widens else mine.float() @ x.float()
                dwf = dw[-2 * padded :].view(2, padded, K)[:, :H].sum(0)
                if not first:
                    dwq, dwk, dwv = dw[:R].split((Q, KV, KV))
                    if wq.dtype != dw.dtype:
                        dwq, dwk, dwv = dwq.to(wq.dtype), dwk.to(wk.dtype), dwv.to(wv.dtype)
            dbias = g[:, :R].sum(0, dtype=torch.float32).to(ctx.bias_dtype) if needs[4] else None
            return dx, dwq, dwk, dwv, dbias, dwf, db.sum(0), None, None, None


def entry(
    x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, bias: Tensor | None, wf: Tensor, bf: Tensor, cos: Tensor,
    sin: Tensor, head_dim: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return q (B, T, H D), k, v (B, T, Hkv D), q and k turned, and log f (B, T, H) float32, from x (B, T, K).

    x bf16, fp16 or fp32, the dtype of all products; wq (H D, K), wk, wv (Hkv D, K) and bias (H D + 2 Hkv D) or None of
    any float dtype; wf (H, K), bf (H,) float32; cos, sin (B or 1, T, P): the first P of D / 2 pairs turn, as in
    `rotary`. Gradients to x, the weights and the biases. q, k and v are slices of one tensor. Raises ValueError for
    shapes that don't fit, and where the kernels can't run (`device.available`).
    """
    (B, T, K), (Q, KV, H), pairs = x.shape, (w.shape[0] for w in (wq, wk, wf)), cos.shape[-1]
    fits = wq.shape == (H * head_dim, K) and wk.shape == wv.shape == (KV, K) and wf.shape == (H, K) and bf.shape == (H,)
    if not fits or KV % head_dim or (bias is not None and bias.shape != (Q + 2 * KV,)) or wf.dtype != torch.float32:
        raise ValueError(
            f"weights don't fit x {tuple(x.shape)} at head dim {head_dim}: got {tuple(wq.shape)}, {tuple(wk.shape)}, "
            f"{tuple(wv.shape)}, gate {tuple(wf.shape)} and {tuple(bf.shape)}, {wf.dtype} where it must be float32"
        )
    if cos.shape != sin.shape or cos.shape not in ((1, T, pairs), (B, T, pairs)) or pairs > head_dim // 2:
        raise ValueError(
            f"cos and sin must be (B or 1, T, P <= {head_dim // 2}) for x {tuple(x.shape)}, got {tuple(cos.shape)}"
        )
    require(x)
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    wq, wk, wv, wf, bf = (w.contiguous() for w in (wq, wk, wv, wf, bf))
    return _Entry.apply(x, wq, wk, wv, bias, wf, bf, cos, sin, head_dim)  # type: ignore[return-value]
