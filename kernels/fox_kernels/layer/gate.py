"""The forget gate in one launch each way: log f = log sigmoid(W x + b), and dx, dW, db from dlog f.

    z = W x + b,   log f = min(z, 0) - log1p(exp(-|z|))        dz = dlog_f / (1 + exp(z))
    dx = dz W,     dW = sum_t dz_t x_t^T,     db = sum_t dz_t

Torch's way widens x (a whole hidden state) to float32, multiplies by a matrix of a few rows, and widens again in the
backward; here x is read once in its own dtype each way. Products are three tf32 passes, float32's accuracy within a few
ulp. dW and db are summed in a fixed order: the same bit for bit in every run.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..host.device import require
from ..host.launch import cdiv, launch, power_of_2
from .differentiable import Pass, differentiable

SPLITS = 64  # parts of the tokens whose sums for dW are formed side by side


@triton.jit
def log_sigmoid(z):
    """min(z, 0) - log1p(exp(-|z|))"""
    e = tl.exp(-tl.abs(z))
    u = 1.0 + e
    # log1p without a library: log(u) has the rounding error of 1 + e, which the quotient corrects
    log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
    return tl.minimum(z, 0.0) - log1p


@triton.jit(do_not_specialize=["N"])
def gate_kernel(
    x_ptr, w_ptr, b_ptr, log_f_ptr, z_ptr, sx_n, N, K, H, HEADS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr
):
    n = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    h = tl.arange(0, HEADS)
    k = tl.arange(0, BK)
    z = tl.zeros([BM, HEADS], tl.float32)
    for k0 in range(0, K, BK):
        inside = k0 + k < K
        x = tl.load(x_ptr + n[:, None] * sx_n + (k0 + k)[None, :], mask=(n < N)[:, None] & inside[None, :], other=0.0)
        w = tl.load(w_ptr + h[None, :] * K + (k0 + k)[:, None], mask=(h < H)[None, :] & inside[:, None], other=0.0)
        z = tl.dot(x.to(tl.float32), w, z, input_precision="tf32x3")
    z += tl.load(b_ptr + h, mask=h < H, other=0.0)[None, :]
    at = n[:, None] * H + h[None, :]
    here = (n < N)[:, None] & (h < H)[None, :]
    tl.store(log_f_ptr + at, log_sigmoid(z), mask=here)
    if z_ptr is not None:
        tl.store(z_ptr + at, z, mask=here)


@triton.jit(do_not_specialize=["N"])
def gate_backward_kernel(
    dlog_f_ptr, z_ptr, x_ptr, w_ptr, dx_ptr, dw_ptr, db_ptr, sd_n, sd_h, sx_n, N, K, H, steps,
    HEADS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0) // tl.cdiv(K, BK)
    block = tl.program_id(0) % tl.cdiv(K, BK)
    h = tl.arange(0, HEADS)
    k = block * BK + tl.arange(0, BK)
    w = tl.load(w_ptr + h[:, None] * K + k[None, :], mask=(h < H)[:, None] & (k < K)[None, :], other=0.0)
    dw = tl.zeros([HEADS, BK], tl.float32)
    db = tl.zeros([HEADS], tl.float32)
    for step in range(steps):
        n = (split * steps + step).to(tl.int64) * BM + tl.arange(0, BM)
        here = (h < H)[:, None] & (n < N)[None, :]
        z = tl.load(z_ptr + n[None, :] * H + h[:, None], mask=here, other=0.0)
        dlog_f = tl.load(dlog_f_ptr + n[None, :] * sd_n + h[:, None] * sd_h, mask=here, other=0.0)
        dz = dlog_f / (1.0 + tl.exp(z))
        db += tl.sum(dz, 1)
        inside = (n < N)[:, None] & (k < K)[None, :]
        x = tl.load(x_ptr + n[:, None] * sx_n + k[None, :], mask=inside, other=0.0)
        dw = tl.dot(dz, x.to(tl.float32), dw, input_precision="tf32x3")
        dx = tl.dot(tl.trans(dz), w, input_precision="tf32x3")
        tl.store(dx_ptr + n[:, None] * K + k[None, :], dx.to(dx_ptr.dtype.element_ty), mask=inside)
    dw_at = dw_ptr + (split.to(tl.int64) * H + h)[:, None] * K + k[None, :]
    tl.store(dw_at, dw, mask=(h < H)[:, None] & (k < K)[None, :])
    if block == 0:
        tl.store(db_ptr + split * H + h, db, mask=h < H)


def gate_and_logit(x: Tensor, weight: Tensor, bias: Tensor, keeps_logit: bool = True) -> tuple[Tensor, Any]:
    """Return log f and z, each (N, H) float32, for x (N, K) of unit last stride; z is None if not kept."""
    (N, K), H = x.shape, weight.shape[0]
    log_f = torch.empty(N, H, dtype=torch.float32, device=x.device)
    z = torch.empty_like(log_f) if keeps_logit else None
    if N:
        heads = max(16, power_of_2(H))
        rows, warps, stages = (64, 4, 3) if heads == 16 else (32, 8, 2)  # more spill on Ampere, Ada or Hopper
        arguments = (x, weight.contiguous(), bias.contiguous(), log_f, z, x.stride(0), N, K, H)
        launch(gate_kernel, (cdiv(N, rows),), arguments, (heads, rows, 32), warps=warps, stages=stages)
    return log_f, z


def _backward(dlog_f: Tensor, z: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx (N, K) in x's dtype, dW (H, K) and db (H,) in float32."""
    (N, K), H = x.shape, weight.shape[0]
    dx = torch.empty(N, K, dtype=x.dtype, device=x.device)
    if not N:
        return dx, torch.zeros_like(weight), weight.new_zeros(H)
    heads = max(16, power_of_2(H))
    rows, columns = (32, 64) if heads == 16 else (32, 32) if heads <= 64 else (16, 32)
    steps = cdiv(N, rows * SPLITS)
    splits = cdiv(N, rows * steps)
    dw = torch.empty(splits, H, K, dtype=torch.float32, device=x.device)
    db = torch.empty(splits, H, dtype=torch.float32, device=x.device)
    arguments = (dlog_f, z, x, weight.contiguous(), dx, dw, db, *dlog_f.stride(), x.stride(0), N, K, H, steps)
    launch(gate_backward_kernel, (splits * cdiv(K, columns),), arguments, (heads, rows, columns), stages=2)
    return dx, dw.sum(0), db.sum(0)


_gate = differentiable(
    "gate",
    Pass(
        gate_and_logit, "(Tensor x, Tensor weight, Tensor bias) -> (Tensor, Tensor)",
        lambda x, weight, bias: tuple(x.new_empty(x.shape[0], len(weight), dtype=torch.float32) for _ in range(2)),
    ),
    Pass(
        _backward, "(Tensor dlog_f, Tensor z, Tensor x, Tensor weight) -> (Tensor, Tensor, Tensor)",
        lambda dlog_f, z, x, weight: (
            x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(len(weight))
        ),
    ),
    lambda inputs, output: ((output[1], *inputs[:2]), ()),
)  # fmt: skip


def gate(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return log sigmoid(x W^T + b), the log of the forget gates, in float32 whatever x is and autocast says.

    x (..., K) bf16, fp16 or fp32; weight (H, K), bias (H,) float32 -> (..., H) float32, natural log, <= 0. Gradients to
    all three. Raises ValueError for weights that are not float32 or don't fit x, and where the kernels can't run
    (`device.available`).
    Source: Lin et al., "Forgetting Transformer" (ICLR 2025), eq. 1.
    """
    H, K = weight.shape
    if x.shape[-1:] != (K,) or bias.shape != (H,) or weight.dtype != torch.float32 or bias.dtype != torch.float32:
        raise ValueError(
            f"x (..., K), weight (H, K) and bias (H,) float32 don't fit: {tuple(x.shape)}, {tuple(weight.shape)} "
            f"{weight.dtype}, {tuple(bias.shape)} {bias.dtype}"
        )
    require(x)
    flat = x.reshape(-1, K)
    if flat.stride(-1) != 1:
        flat = flat.contiguous()
    return _gate(flat, weight, bias)[0].view(*x.shape[:-1], H)
