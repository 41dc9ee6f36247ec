"""The Triton and Gluon implementations under autograd: straight to the kernels in eager mode, and as one torch operator
with a fake and a gradient wherever something watches or rewrites operators, so that torch.compile sees no graph break.

    fox_kernels::attention            q, k, v, log_f -> o, lse2, c_hi, c_lo, residual, bounds
    fox_kernels::attention_backward   -> dq, dk, dv, dlog_f

Torch's machinery for operators written in Python costs the host more than 0.1 ms a call, as much as a short problem
takes: hence the two ways in. In eager mode, calls after the first of a kind take a third (`calls`).
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from . import determinism
from .calls import remember
from .chunked import check_backward, within
from .host.launch import watched
from .host.replay import calls
from .passes import attend, differentiate, room_for_bounds, room_for_residual

LN_2 = math.log(2)


def _tensors(q: Tensor, residual: Tensor | None, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return what is kept as an operator's outputs, which must be tensors: empty for None."""
    return (
        q.new_empty(0) if residual is None else residual,
        q.new_empty(0, dtype=torch.int32) if bounds is None else bounds,
    )


@torch.library.custom_op("fox_kernels::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_f: Tensor,
    scale: float,
    cu_seqlens: Tensor | None,
    seq_start: Tensor | None,
    window: int | None,
    sink: int,
    softcap: float | None,
    prune: float | None,
    backend: str,
    for_backward: bool,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    *output, residual, bounds, _ = attend(
        q, k, v, log_f, scale, cu_seqlens, seq_start, window, sink, softcap, prune, backend, for_backward, deterministic
    )
    o, lse2, c_hi, c_lo = output
    if bounds is None:  # none were worth a search: zeros in their place, as shapes can't depend on that
        bounds = room_for_bounds(q, for_backward, prune)
        bounds = None if bounds is None else bounds.zero_()
    return o, lse2, c_hi, c_lo, *_tensors(q, residual, bounds)


@attention.register_fake
def _(q, k, v, log_f, scale, cu_seqlens, seq_start, window, sink, softcap, prune, backend, for_backward, *_):
    (B, T, H, D), S = q.shape, k.shape[1]
    o = q.new_empty(B, T, H, D)
    lse2, c_hi, c_lo = (q.new_empty(B, H, n, dtype=torch.float32) for n in (T, S, S))
    residual, bounds = room_for_residual(q, for_backward), room_for_bounds(q, for_backward, prune)
    return o, lse2, c_hi, c_lo, *_tensors(q, residual, bounds)


@torch.library.custom_op("fox_kernels::attention_backward", mutates_args=())
def attention_backward(
    do: Tensor,
    dlse2: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_f: Tensor,
    o: Tensor,
    lse2: Tensor,
    c_hi: Tensor,
    c_lo: Tensor,
    residual: Tensor,
    bounds: Tensor,
    scale: float,
    cu_seqlens: Tensor | None,
    seq_start: Tensor | None,
    window: int | None,
    sink: int,
    softcap: float | None,
    prune: float | None,
    backend: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return differentiate(
        do, dlse2, q, k, v, log_f, o, lse2, c_hi, c_lo, residual if residual.numel() else None,
        bounds if bounds.numel() else None, None, scale, cu_seqlens, seq_start, window, sink, softcap, prune, backend,
        deterministic,
    )  # fmt: skip


@attention_backward.register_fake
def _(do, dlse2, q, k, v, log_f, *_):
    def like(x):
        return x.new_empty(x.shape)  # contiguous whatever x's strides are, as the kernels write it

    return like(q), like(k), like(v), like(log_f)


def _setup_context(ctx, inputs, output):
    q, k, v, log_f, scale, cu_seqlens, seq_start, window, sink, softcap, prune, backend, _, deterministic = inputs
    ctx.save_for_backward(q, k, v, log_f, *output, cu_seqlens, seq_start)
    ctx.options = (window, sink, softcap, prune, backend, deterministic)
    ctx.scale = scale
    ctx.set_materialize_grads(False)


def _gradients(ctx, do, dlse2, differentiate):
    q, k, v, log_f, o, *kept, cu_seqlens, seq_start = ctx.saved_tensors
    do = torch.zeros_like(o) if do is None else do
    grads = differentiate(do, dlse2, q, k, v, log_f, o, *kept, ctx.scale, cu_seqlens, seq_start, *ctx.options)
    return *grads, *[None] * 10


def _backward(ctx, do, dlse2, *_):
    return _gradients(ctx, do, dlse2, attention_backward)


attention.register_autograd(_backward, setup_context=_setup_context)


class _Attention(torch.autograd.Function):
    """The same as the operator, without its machinery."""

    @staticmethod
    def forward(ctx, attend, *inputs):
        output = attend(*inputs)
        _setup_context(ctx, inputs, output)
        return output[:2]

    @staticmethod
    def backward(ctx, do, dlse2):
        check_backward(do, dlse2)
        return None, *_gradients(ctx, do, dlse2, differentiate)


def run(*inputs, attend=attend) -> tuple[Tensor, Tensor]:
    """Return o and lse2, differentiable if for_backward among the inputs says so."""
    return _Attention.apply(attend, *inputs) if inputs[-2] else attend(*inputs)[:2]


def traced(*tensors: Tensor) -> bool:
    """Return whether compilers, tensor subclasses or dispatch modes must see an operator."""
    return (
        torch.compiler.is_compiling()
        or any(type(x) not in (Tensor, torch.nn.Parameter) for x in tensors)
        or is_in_torch_dispatch_mode()
    )


def forgetting_attention(
    q, k, v, log_f, *, scale, cu_seqlens, seq_start, window, sink, softcap, prune, return_lse, backend, kind: Any = None
) -> Tensor | tuple[Tensor, Tensor]:
    """`fox_kernels.forgetting_attention`, which has checked the arguments, by the Triton or the Gluon kernels.

    kind is that of the call, without lse, or None: what runs the next one of it is left in `replay.calls`.
    """
    window, sink = within(window, sink, k.shape[1])
    for_backward = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, log_f))
    inputs = (
        q, k, v, log_f, scale, cu_seqlens, seq_start, window, sink, None if softcap is None else float(softcap),
        None if prune is None else float(prune), backend, for_backward, determinism.is_deterministic(),
    )  # fmt: skip
    if traced(q, k, v, log_f):
        o, lse2, *_ = attention(*inputs)
    elif kind is None or kind in calls or watched():
        o, lse2 = run(*inputs)
    else:
        return remember(kind, run, *inputs)
    return (o, lse2.transpose(1, 2) * LN_2) if return_lse else o
