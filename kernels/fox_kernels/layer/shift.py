"""Key and value shift in one launch each way: every token's state mixed with its predecessor's.

    y_t = k_t + a_t (k_{t-1} - k_t)        dk_t = (1 - a_t) dy_t + a_{t+1} dy_{t+1},   da_t = sum_d dy_t (k_{t-1} - k_t)

a_t is an amount per token and head, 0 where a document starts. The first token of a row has no predecessor here and
stays as it is.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.groups import Strides
from ..host.device import require
from ..host.launch import launch, power_of_2
from .differentiable import Pass, differentiable
from .norm import rows_per_program


@triton.jit(do_not_specialize=["T"])
def shift_kernel(x_ptr, amount_ptr, y_ptr, strides, T, H, D: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    h = (tl.program_id(0) % H).to(tl.int64)
    row = tl.program_id(0) // H
    b = (row // tl.cdiv(T, BLOCK)).to(tl.int64)
    t = (row % tl.cdiv(T, BLOCK) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    d = tl.arange(0, COLUMNS)[None, :]
    here = (t[:, None] < T) & (d < D)
    x_at = x_ptr + b * strides.batch + t[:, None] * strides.token + h * strides.head + d
    x = tl.load(x_at, mask=here, other=0.0).to(tl.float32)
    before = tl.load(x_at - strides.token, mask=here & (t[:, None] > 0), other=0.0).to(tl.float32)
    a = tl.load(amount_ptr + (b * T + t) * H + h, mask=(t < T) & (t > 0), other=0.0)[:, None]
    tl.store(
        y_ptr + ((b * T + t[:, None]) * H + h) * D + d, (x + a * (before - x)).to(y_ptr.dtype.element_ty), mask=here
    )


@triton.jit(do_not_specialize=["T"])
def shift_backward_kernel(
    dy_ptr, x_ptr, amount_ptr, dx_ptr, damount_ptr, dy_strides, strides, T, H,
    D: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    h = (tl.program_id(0) % H).to(tl.int64)
    row = tl.program_id(0) // H
    b = (row // tl.cdiv(T, BLOCK)).to(tl.int64)
    t = (row % tl.cdiv(T, BLOCK) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    d = tl.arange(0, COLUMNS)[None, :]
    here = (t[:, None] < T) & (d < D)
    x_at = x_ptr + b * strides.batch + t[:, None] * strides.token + h * strides.head + d
    dy_at = dy_ptr + b * dy_strides.batch + t[:, None] * dy_strides.token + h * dy_strides.head + d
    a_at = amount_ptr + (b * T + t) * H + h
    x = tl.load(x_at, mask=here, other=0.0).to(tl.float32)
    before = tl.load(x_at - strides.token, mask=here & (t[:, None] > 0), other=0.0).to(tl.float32)
    dy = tl.load(dy_at, mask=here, other=0.0).to(tl.float32)
    after = tl.load(dy_at + dy_strides.token, mask=here & (t[:, None] < T - 1), other=0.0).to(tl.float32)
    a = tl.load(a_at, mask=(t < T) & (t > 0), other=0.0)
    a_after = tl.load(a_at + H, mask=t < T - 1, other=0.0)
    dx = dy - a[:, None] * dy + a_after[:, None] * after
    tl.store(dx_ptr + ((b * T + t[:, None]) * H + h) * D + d, dx.to(dx_ptr.dtype.element_ty), mask=here)
    da = tl.where(t > 0, tl.sum(dy * (before - x), 1), 0.0)
    tl.store(damount_ptr + (b * T + t) * H + h, da, mask=t < T)


def _forward(x: Tensor, amount: Tensor) -> Tensor:
    B, T, H, D = x.shape
    y = torch.empty(B, T, H, D, dtype=x.dtype, device=x.device)
    if y.numel():
        arguments = (x, amount, y, Strides(*x.stride()[:3]), T, H)
        block = rows_per_program(D)
        launch(shift_kernel, (B * -(-T // block) * H,), arguments, (D, power_of_2(D), block))
    return y


def _backward(dy: Tensor, x: Tensor, amount: Tensor) -> tuple[Tensor, Tensor]:
    B, T, H, D = x.shape
    dy = dy if dy.stride(-1) == 1 else dy.contiguous()
    dx = torch.empty(B, T, H, D, dtype=x.dtype, device=x.device)
    damount = torch.empty(B, T, H, dtype=torch.float32, device=x.device)
    if dx.numel():
        strides = Strides(*dy.stride()[:3]), Strides(*x.stride()[:3])
        arguments = (dy, x, amount, dx, damount, *strides, T, H)
        block = rows_per_program(D)
        launch(shift_backward_kernel, (B * -(-T // block) * H,), arguments, (D, power_of_2(D), block))
    return dx, damount


_shift = differentiable(
    "shift",
    Pass(_forward, "(Tensor x, Tensor amount) -> Tensor", lambda x, amount: x.new_empty(x.shape)),
    Pass(
        _backward, "(Tensor dy, Tensor x, Tensor amount) -> (Tensor, Tensor)",
        lambda dy, x, amount: (x.new_empty(x.shape), amount.new_empty(amount.shape)),
    ),
    lambda inputs, output: (inputs, ()),
)  # fmt: skip


def shift(x: Tensor, amount: Tensor) -> Tensor:
    """Return x_t + amount_t (x_{t-1} - x_t), the first token of each row unchanged.

    x (B, T, H, D) bf16, fp16 or fp32, any strides; amount (B, T, H) float32, 0 where a document starts. Returns x's
    shape and dtype, contiguous. Gradients to both. Raises ValueError for an amount that doesn't fit, and where the
    kernels can't run (`device.available`).
    Source: Lin et al., "Forgetting Transformer" (ICLR 2025), section 3.3.
    """
    if amount.shape != x.shape[:-1] or amount.dtype != torch.float32:
        raise ValueError(f"amount must be {tuple(x.shape[:-1])} float32, got {tuple(amount.shape)} {amount.dtype}")
    require(x)
    x = x if x.stride(-1) == 1 else x.contiguous()
    return _shift(x, amount.contiguous())
