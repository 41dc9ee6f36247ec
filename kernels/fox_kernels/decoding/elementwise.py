"""Small kernels between the products of a model that generates: residual sum and RMS norm, SiLU and product, gates.

    s = x + r,   y = w * round(s / sqrt(mean s^2 + eps))           h = round(silu(gate)) * up
    log f = log sigmoid(W x + b), in float32: a program per row and head, where `layer.gate` fills tiles of 64 rows

Each rounds to the dtype of x where transformers' expressions do, so that results differ from theirs by the order of
one sum at most. Torch takes eight launches for a norm, two for a SiLU and product; each launch costs a step of a few
tokens as much as a small product, and the host needs longer for them than a GPU for a prompt of some thousand. For
inference only: nothing has a gradient.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..host.device import available
from ..host.launch import cdiv, launch, power_of_2
from ..layer.gate import log_sigmoid

MOST_COLUMNS, MOST_ROWS = 16384, 256  # one program takes a row; `layer.gate` takes the gates of more
BLOCK = 1024


@triton.jit
def add_norm_kernel(x_ptr, r_ptr, w_ptr, s_ptr, y_ptr, K, eps, COLUMNS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * K + tl.arange(0, COLUMNS)
    k = tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + at, mask=k < K, other=0.0).to(tl.float32)
    if r_ptr is not None:
        x = (x + tl.load(r_ptr + at, mask=k < K, other=0.0).to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(s_ptr + at, x, mask=k < K)
        x = x.to(tl.float32)
    y = (x * tl.rsqrt(tl.sum(x * x, 0) / K + eps)).to(x_ptr.dtype.element_ty).to(tl.float32)
    y *= tl.load(w_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=k < K)


@triton.jit
def silu_mul_kernel(gate_ptr, up_ptr, out_ptr, N, BLOCK: tl.constexpr):
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(gate_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    x = (x / (1.0 + tl.exp(-x))).to(gate_ptr.dtype.element_ty).to(tl.float32)
    out = x * tl.load(up_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + n, out.to(out_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def logit(x_ptr, w_ptr, K, BLOCK: tl.constexpr):
    """A gate's W x."""
    k = tl.arange(0, BLOCK)
    z = tl.zeros([BLOCK], tl.float32)
    for k0 in range(0, K, BLOCK):
        x = tl.load(x_ptr + k0 + k, mask=k0 + k < K, other=0.0).to(tl.float32)
        z += x * tl.load(w_ptr + k0 + k, mask=k0 + k < K, other=0.0)
    return tl.sum(z, 0)


@triton.jit
def gate_rows_kernel(x_ptr, w_ptr, b_ptr, log_f_ptr, K, H, BLOCK: tl.constexpr):
    row, h = tl.program_id(0) // H, tl.program_id(0) % H
    z = logit(x_ptr + row.to(tl.int64) * K, w_ptr + h.to(tl.int64) * K, K, BLOCK) + tl.load(b_ptr + h)
    tl.store(log_f_ptr + tl.program_id(0), log_sigmoid(z))


def logit_block(K: int) -> int:
    """Return the BLOCK of `logit`."""
    return min(1024, power_of_2(K))


def takes(x: Tensor, weight: Tensor | None = None) -> bool:
    """Return whether the kernels take x (..., K): contiguous, of weight's dtype, no gradient recorded."""
    if type(x) is not torch.Tensor or torch.is_grad_enabled() or torch.compiler.is_compiling() or not available(x):
        return False
    fits = x.numel() > 0 and x.shape[-1] <= MOST_COLUMNS and x.is_contiguous()
    return fits and not torch.is_autocast_enabled(x.device.type) and (weight is None or weight.dtype == x.dtype)


def takes_few(x: Tensor) -> bool:
    """Return whether `gate_rows` takes x (..., K): as `takes`, and few rows."""
    return takes(x) and x.numel() <= MOST_ROWS * x.shape[-1]


def add_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (x + residual, its RMS norm times weight), both like x (..., K); x itself where there is no residual.

    weight (K,) of x's dtype. Only where `takes` returns True.
    """
    y = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    residual = None if residual is None else residual.contiguous()
    K = x.shape[-1]
    columns = power_of_2(K)
    with torch.cuda.device_of(x):
        arguments = (x, residual, weight.contiguous(), total, y, K, eps)
        launch(add_norm_kernel, (x.numel() // K,), arguments, (columns,), warps=max(1, min(16, columns // 256)))
    return total, y


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up for contiguous tensors of one shape and dtype, where `takes` returns True."""
    out, N = torch.empty_like(gate), gate.numel()
    with torch.cuda.device_of(gate):
        launch(silu_mul_kernel, (cdiv(N, BLOCK),), (gate, up, out, N), (BLOCK,))
    return out


def gate_rows(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return log f (..., H) float32 for a few rows x (..., K); weight (H, K), bias (H,) float32. As `layer.gate.gate`.

    Only where `takes_few` returns True.
    """
    H, K = weight.shape
    log_f = torch.empty(*x.shape[:-1], H, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        arguments = (x, weight.contiguous(), bias.contiguous(), log_f, K, H)
        launch(gate_rows_kernel, (log_f.numel(),), arguments, (logit_block(K),))
    return log_f
