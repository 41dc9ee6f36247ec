"""The chunked path as one operator, for torch.compile: its loop over chunks of queries is not traced.

    fox_kernels::chunked             q, k, v, log_f -> o, lse as `chunked` saves them for its backward
    fox_kernels::chunked_backward    -> dq, dk, dv, dlog_f

Traced, the loop is unrolled: a graph for every length, which grows with it.
"""

import torch
from torch import Tensor

from . import chunked
from .options import Documents, Options


@torch.library.custom_op("fox_kernels::chunked", mutates_args=())
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
) -> tuple[Tensor, Tensor]:
    if q.numel() == 0:
        return _like_outputs(q, k)
    return chunked._attend(q, k, v, log_f, (scale, cu_seqlens, seq_start, window, sink, softcap, horizon))


def _like_outputs(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return o (B, Hkv, G, T, D) and lse (B, H, T) in the computing dtype, unwritten."""
    (B, T, H, D), Hkv = q.shape, k.shape[2]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(B, Hkv, H // Hkv, T, D, dtype=dtype), q.new_empty(B, H, T, dtype=dtype)


@attention.register_fake
def _(q, k, *_):
    return _like_outputs(q, k)


@torch.library.custom_op("fox_kernels::chunked_backward", mutates_args=())
def attention_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_f: Tensor,
    o: Tensor,
    lse: Tensor,
    scale: float,
    cu_seqlens: Tensor | None,
    seq_start: Tensor | None,
    window: int | None,
    sink: int,
    softcap: float | None,
    horizon: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if q.numel() == 0:
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape), log_f.new_zeros(log_f.shape)
    options = (scale, cu_seqlens, seq_start, window, sink, softcap, horizon)
    dq, dk, dv, d_log_f = chunked._gradients(do, dlse, q, k, v, log_f, o, lse, options)
    return dq, dk.contiguous(), dv.contiguous(), d_log_f.contiguous()


@attention_backward.register_fake
def _(do, dlse, q, k, v, log_f, *_):
    dq, dk, dv, d_log_f = (x.new_empty(x.shape) for x in (q, k, v, log_f))
    return dq, dk, dv, d_log_f


def _setup_context(ctx, inputs, output):
    q, k, v, log_f, scale, cu_seqlens, seq_start, *options = inputs
    ctx.save_for_backward(q, k, v, log_f, *output, cu_seqlens, seq_start)
    ctx.scale, ctx.options = scale, options
    ctx.set_materialize_grads(False)


def _backward(ctx, do, dlse):
    q, k, v, log_f, o, lse, cu_seqlens, seq_start = ctx.saved_tensors
    do = torch.zeros_like(o) if do is None else do
    grads = attention_backward(do, dlse, q, k, v, log_f, o, lse, ctx.scale, cu_seqlens, seq_start, *ctx.options)
    return *grads, *[None] * 7


attention.register_autograd(_backward, setup_context=_setup_context)


def forgetting_attention(
    q, k, v, log_f, options: Options, documents: Documents, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """`chunked.forgetting_attention` for arguments that have been checked, as one operator."""
    softcap, horizon = (None if x is None else float(x) for x in options[3:])
    window, sink = chunked.within(options.window, options.sink, k.shape[1])
    cu_seqlens, seq_start, *_ = documents
    o, lse = attention(q, k, v, log_f, options.scale, cu_seqlens, seq_start, window, sink, softcap, horizon)
    o = chunked._outward(o, q)
    return (o, lse.transpose(1, 2).contiguous()) if return_lse else o
