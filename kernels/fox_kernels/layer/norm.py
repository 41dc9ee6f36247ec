"""RMS norm of each head and the output gate in one launch, forward and backward.

    n = x / sqrt(mean_d x^2 + eps),   y = gain_h n * 2 sigmoid(logit)         each factor optional

Serves QK-norm (no logit), output norm, output gate (no gain) and both together. Torch's expressions widen x to float32
five times over; here x is read once and y written once, each way. The gradient of the gain is summed in a fixed order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..host.device import require
from ..host.launch import launch, power_of_2
from .differentiable import Pass, differentiable

SPLITS = 128  # parts of the tokens whose sums for the gain's gradient are formed side by side


@triton.jit
def inverse_rms(x, known, eps, D: tl.constexpr):
    """1 / sqrt(mean x^2 + eps) of every row; finite beyond the last token, where x is 0, also with eps = 0."""
    return tl.rsqrt(tl.where(known, (tl.sum(x * x, 1) / D + eps)[:, None], 1.0))


@triton.jit(do_not_specialize=["N"])
def head_norm_kernel(
    x_ptr, gain_ptr, logit_ptr, y_ptr, sx_n, sx_h, sl_n, N, H, eps,
    D: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    h = (tl.program_id(0) % H).to(tl.int64)
    n = (tl.program_id(0) // H * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    d = tl.arange(0, COLUMNS)[None, :]
    here = (n < N) & (d < D)
    x = tl.load(x_ptr + n * sx_n + h * sx_h + d, mask=here, other=0.0).to(tl.float32)
    if gain_ptr is not None:
        x = x * inverse_rms(x, n < N, eps, D) * tl.load(gain_ptr + h * D + d, mask=d < D, other=0.0)
    if logit_ptr is not None:
        x = x * 2.0 * tl.sigmoid(tl.load(logit_ptr + n * sl_n + h * D + d, mask=here, other=0.0).to(tl.float32))
    tl.store(y_ptr + (n * H + h) * D + d, x.to(y_ptr.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["N", "steps"])
def head_norm_backward_kernel(
    dy_ptr, x_ptr, gain_ptr, logit_ptr, dx_ptr, dgain_ptr, dlogit_ptr,
    sd_n, sd_h, sx_n, sx_h, sl_n, N, H, steps, eps,
    D: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    h = (tl.program_id(0) % H).to(tl.int64)
    split = tl.program_id(0) // H
    d = tl.arange(0, COLUMNS)[None, :]
    if gain_ptr is not None:
        gain = tl.load(gain_ptr + h * D + d, mask=d < D, other=0.0)
    dgain = tl.zeros([COLUMNS], tl.float32)
    for step in range(steps):
        n = ((split * steps + step) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
        here = (n < N) & (d < D)
        x = tl.load(x_ptr + n * sx_n + h * sx_h + d, mask=here, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + n * sd_n + h * sd_h + d, mask=here, other=0.0).to(tl.float32)
        if gain_ptr is not None:
            r = inverse_rms(x, n < N, eps, D)
            x = x * r
        if logit_ptr is not None:
            s = tl.sigmoid(tl.load(logit_ptr + n * sl_n + h * D + d, mask=here, other=0.0).to(tl.float32))
            if gain_ptr is not None:
                dlogit = dy * x * gain * 2.0 * s * (1.0 - s)
            else:
                dlogit = dy * x * 2.0 * s * (1.0 - s)
            tl.store(dlogit_ptr + (n * H + h) * D + d, dlogit.to(dlogit_ptr.dtype.element_ty), mask=here)
            dy = dy * 2.0 * s
        if gain_ptr is not None:
            dgain += tl.sum(dy * x, 0)
            dy = dy * gain
            dy = r * (dy - x * (tl.sum(dy * x, 1) / D)[:, None])
        tl.store(dx_ptr + (n * H + h) * D + d, dy.to(dx_ptr.dtype.element_ty), mask=here)
    if gain_ptr is not None:
        column = tl.arange(0, COLUMNS)
        tl.store(dgain_ptr + (split * H + h) * D + column, dgain, mask=column < D)


def _flat(x: Tensor, D: int) -> Tensor:
    """Return x (..., H, D) as (N, H, D) with unit last stride, copied only where it must be."""
    x = x.reshape(-1, x.shape[-2], D)
    return x if x.stride(-1) == 1 else x.contiguous()


def rows_per_program(D: int) -> int:
    return max(4, 2048 // power_of_2(D))


def _forward(x: Tensor, gain: Tensor | None, logit: Tensor | None, eps: float) -> Tensor:
    N, H, D = x.shape
    y = torch.empty(N, H, D, dtype=x.dtype, device=x.device)
    if y.numel():
        logit_stride = None if logit is None else logit.stride(0)
        arguments = (x, gain, logit, y, *x.stride()[:2], logit_stride, N, H, eps)
        constants = (D, power_of_2(D), rows_per_program(D))
        launch(head_norm_kernel, (-(-N // rows_per_program(D)) * H,), arguments, constants)
    return y


def _backward(dy: Tensor, x: Tensor, gain: Tensor | None, logit: Tensor | None, eps: float):
    """Return dx (N, H, D), dgain (H, D) or None, dlogit (N, H D) or None."""
    N, H, D = x.shape
    dy = _flat(dy, D)
    dx = torch.empty(N, H, D, dtype=x.dtype, device=x.device)
    dlogit = None if logit is None else torch.empty(N, H * D, dtype=logit.dtype, device=x.device)
    if not dx.numel():
        return dx, None if gain is None else torch.zeros_like(gain), dlogit
    steps = -(-N // (rows_per_program(D) * SPLITS))
    splits = -(-N // (rows_per_program(D) * steps))
    dgain = None if gain is None else torch.empty(splits, H, D, dtype=torch.float32, device=x.device)
    logit_stride = None if logit is None else logit.stride(0)
    strides = (*dy.stride()[:2], *x.stride()[:2], logit_stride)
    arguments = (dy, x, gain, logit, dx, dgain, dlogit, *strides, N, H, steps, eps)
    constants = (D, power_of_2(D), rows_per_program(D))
    launch(head_norm_backward_kernel, (splits * H,), arguments, constants)
    return dx, None if dgain is None else dgain.sum(0), dlogit


INPUTS = "Tensor x, Tensor? gain, Tensor? logit, float eps"


def _like(dy: Tensor, x: Tensor, gain: Tensor | None, logit: Tensor | None, eps: float) -> tuple[Tensor, ...]:
    """Return what `_backward` returns, unwritten, as operators do: empty where there is nothing."""
    return x.new_empty(x.shape), *(x.new_empty(0) if y is None else y.new_empty(y.shape) for y in (gain, logit))


_head_norm = differentiable(
    "head_norm",
    Pass(_forward, f"({INPUTS}) -> Tensor", lambda x, *_: x.new_empty(x.shape)),
    Pass(_backward, f"(Tensor dy, {INPUTS}) -> (Tensor, Tensor, Tensor)", _like),
    lambda inputs, output: (inputs[:3], inputs[3:]),
)


def head_norm(x: Tensor, gain: Tensor | None, logit: Tensor | None, eps: float = 1e-6) -> Tensor:
    """Return gain_h x / sqrt(mean x^2 + eps) * 2 sigmoid(logit), without the factors whose argument is None.

    x (..., H, D) bf16, fp16 or fp32; gain (H, D) float32; logit (..., H D), any float dtype. Returns x's shape and
    dtype, contiguous. Gradients to all three. Raises ValueError for shapes and dtypes that don't fit, and where the
    kernels can't run (`device.available`).
    Source: Lin et al., "Forgetting Transformer" (ICLR 2025), section 3.3, gains per head.
    """
    H, D = x.shape[-2:]
    if gain is not None and (gain.shape != (H, D) or gain.dtype != torch.float32):
        raise ValueError(f"gain must be ({H}, {D}) float32, got {tuple(gain.shape)} {gain.dtype}")
    if logit is not None and (logit.shape != (*x.shape[:-2], H * D) or not logit.is_floating_point()):
        raise ValueError(f"logit must be (..., {H * D}) of a float dtype, got {tuple(logit.shape)} {logit.dtype}")
    require(x)
    flat = _flat(x, D)
    logit = None if logit is None else logit.reshape(-1, H * D)
    logit = logit if logit is None or logit.stride(-1) == 1 else logit.contiguous()
    gain = None if gain is None else gain.contiguous()
    return _head_norm(flat, gain, logit, eps).view(x.shape)
