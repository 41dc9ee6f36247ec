"""The Triton and Gluon kernels under autograd.

In eager mode the kernels are called directly. Where something watches or rewrites operators, they are one torch
operator with a fake and a gradient, so that torch.compile sees no graph break:

    fox_kernels::attention            q, k, v, log_f -> o, lse2, c_hi, c_lo, residual
    fox_kernels::attention_backward   -> dq, dk, dv, dlog_f

Torch's machinery for operators written in Python costs the host more than 0.1 ms a call, as much as a short problem
takes: hence the two ways in.
"""

import math

import torch
from torch import Tensor

from . import determinism
from .chunked import check_backward, within
from .forward_backward import attend, differentiate, room_for_residual
from .host.tracing import traced
from .options import Backend, Documents, Options, Saved

LN_2 = math.log(2)


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
    horizon: float | None,
    backend: str,
    for_backward: bool,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    options, documents = Options(scale, window, sink, softcap, horizon), Documents(cu_seqlens, seq_start)
    (o, lse2, c_hi, c_lo, residual), _ = attend(
        q, k, v, log_f, options, documents, Backend(backend, for_backward, deterministic)
    )
    return o, lse2, c_hi, c_lo, q.new_empty(0) if residual is None else residual  # an output must be a tensor


@attention.register_fake
def _(q, k, v, log_f, scale, cu_seqlens, seq_start, window, sink, softcap, horizon, backend, for_backward, *_):
    (B, T, H, D), S = q.shape, k.shape[1]
    o = q.new_empty(B, T, H, D)
    lse2, c_hi, c_lo = (q.new_empty(B, H, n, dtype=torch.float32) for n in (T, S, S))
    residual = room_for_residual(q, for_backward)
    return o, lse2, c_hi, c_lo, q.new_empty(0) if residual is None else residual


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
    scale: float,
    cu_seqlens: Tensor | None,
    seq_start: Tensor | None,
    window: int | None,
    sink: int,
    softcap: float | None,
    horizon: float | None,
    backend: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    saved = Saved(o, lse2, c_hi, c_lo, residual if residual.numel() else None)
    options, documents = Options(scale, window, sink, softcap, horizon), Documents(cu_seqlens, seq_start)
    return differentiate(
        do, dlse2, q, k, v, log_f, saved, options, documents, Backend(backend, True, deterministic)
    )  # fmt: skip


@attention_backward.register_fake
def _(do, dlse2, q, k, v, log_f, *_):
    def like(x):
        return x.new_empty(x.shape)  # contiguous whatever x's strides are, as the kernels write it

    return like(q), like(k), like(v), like(log_f)


def _keep(ctx, inputs, saved, options: Options, documents: Documents, way: Backend) -> None:
    """Save for the backward; inputs are q, k, v, log_f."""
    ctx.save_for_backward(*inputs, *saved, *documents)
    ctx.options, ctx.way = options, way
    ctx.set_materialize_grads(False)


def _kept(ctx) -> tuple[tuple[Tensor, ...], Saved, Documents]:
    """Return q, k, v, log_f and the rest of what `_keep` saved."""
    tensors = ctx.saved_tensors
    return tensors[:4], Saved(*tensors[4:9]), Documents(*tensors[9:])


def _setup_context(ctx, inputs, output):
    q, k, v, log_f, scale, cu_seqlens, seq_start, *options, backend, for_backward, deterministic = inputs
    documents, way = Documents(cu_seqlens, seq_start), Backend(backend, for_backward, deterministic)
    _keep(ctx, (q, k, v, log_f), output, Options(scale, *options), documents, way)


def _backward(ctx, do, dlse2, *_):
    inputs, saved, (cu_seqlens, seq_start, *_) = _kept(ctx)
    do = torch.zeros_like(saved.o) if do is None else do
    scale, *options = ctx.options
    backend, _, deterministic = ctx.way
    grads = attention_backward(
        do, dlse2, *inputs, *saved, scale, cu_seqlens, seq_start, *options, backend, deterministic
    )  # fmt: skip
    return *grads, *[None] * 10


attention.register_autograd(_backward, setup_context=_setup_context)


class _Attention(torch.autograd.Function):
    """The operator `attention` as an autograd function, without torch.library."""

    @staticmethod
    def forward(ctx, q, k, v, log_f, options, documents, way):
        saved, documents = attend(q, k, v, log_f, options, documents, way)
        _keep(ctx, (q, k, v, log_f), saved, options, documents, way)
        return saved[:2]

    @staticmethod
    def backward(ctx, do, dlse2):
        check_backward(do, dlse2)
        inputs, saved, documents = _kept(ctx)
        do = torch.zeros_like(saved.o) if do is None else do
        given: tuple = (*inputs, saved, ctx.options, documents, ctx.way)
        return *differentiate(do, dlse2, *given), None, None, None


def forgetting_attention(
    q, k, v, log_f, options: Options, documents: Documents, backend: str, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """`fox_kernels.forgetting_attention`, which has checked the arguments, by the Triton or the Gluon kernels."""
    window, sink = within(options.window, options.sink, k.shape[1])
    softcap, horizon = (None if x is None else float(x) for x in options[3:])
    options = Options(options.scale, window, sink, softcap, horizon)
    for_backward = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, log_f))
    way = Backend(backend, for_backward, determinism.is_deterministic())
    if traced(q, k, v, log_f):
        cu_seqlens, seq_start, *_ = documents
        flat: tuple = (q, k, v, log_f, options.scale, cu_seqlens, seq_start, *options[1:], *way)
        o, lse2, *_ = attention(*flat)
    elif for_backward:
        o, lse2 = _Attention.apply(q, k, v, log_f, options, documents, way)  # pyright: ignore[reportGeneralTypeIssues]
    else:
        (o, lse2, *_), _ = attend(q, k, v, log_f, options, documents, way)
    return (o, lse2.transpose(1, 2) * LN_2) if return_lse else o
