"""The chunked path under autograd, as one operator: torch.compile does not trace its loop over chunks of queries.

    fox_kernels::chunked             q, k, v, log_f -> o, lse as `chunked` saves them for its backward
    fox_kernels::chunked_backward    -> dq, dk, dv, dlog_f

Traced, the loop is unrolled: a graph for every length, which grows with it.
"""

import torch
from torch import Tensor

from . import chunked
from .arguments import check_backward
from .options import SCHEMA, Documents, Options

INPUTS = "Tensor q, Tensor k, Tensor v, Tensor log_f"


@torch.library.custom_op("fox_kernels::chunked", mutates_args=(), schema=f"({INPUTS}, {SCHEMA}) -> (Tensor, Tensor)")
def attention(q, k, v, log_f, cu_seqlens, seq_start, *options):
    if q.numel() == 0:
        return _like_outputs(q, k, v)
    with torch.autocast(q.device.type, enabled=False):  # it would take products from float32
        return chunked.forward(q, k, v, log_f, Options(*options), Documents(cu_seqlens, seq_start))


def _like_outputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return o (B, Hkv, G, T, DV) and lse (B, H, T) in the computing dtype, unwritten."""
    (B, T, H, _), Hkv = q.shape, k.shape[2]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(B, Hkv, H // Hkv, T, v.shape[3], dtype=dtype), q.new_empty(B, H, T, dtype=dtype)


@attention.register_fake
def _(q, k, v, *_):
    return _like_outputs(q, k, v)


@torch.library.custom_op(
    "fox_kernels::chunked_backward", mutates_args=(),
    schema=f"(Tensor do, Tensor? dlse, {INPUTS}, Tensor o, Tensor lse, {SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
)  # fmt: skip
def attention_backward(do, dlse, q, k, v, log_f, o, lse, cu_seqlens, seq_start, *options):
    if q.numel() == 0:
        return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape), log_f.new_zeros(log_f.shape)
    given = Options(*options), Documents(cu_seqlens, seq_start)
    with torch.autocast(q.device.type, enabled=False):
        dq, dk, dv, d_log_f = chunked.backward(do, dlse, q, k, v, log_f, o, lse, *given)
    return dq, dk.contiguous(), dv.contiguous(), d_log_f.contiguous()


@attention_backward.register_fake
def _(do, dlse, q, k, v, log_f, *_):
    return tuple(x.new_empty(x.shape) for x in (q, k, v, log_f))


def _setup_context(ctx, inputs, output):
    q, k, v, log_f, cu_seqlens, seq_start, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, log_f, *output, cu_seqlens, seq_start)
    ctx.set_materialize_grads(False)


def _backward(ctx, do, dlse):
    check_backward(do, dlse)
    do = torch.zeros_like(ctx.saved_tensors[4]) if do is None else do
    grads = attention_backward(do, dlse, *ctx.saved_tensors, *ctx.options)
    return *grads, *[None] * (2 + len(ctx.options))


attention.register_autograd(_backward, setup_context=_setup_context)


def attend(q, k, v, log_f, options: Options, documents: Documents, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    """`fox_kernels.forgetting_attention` with memory linear in the tokens, of arguments that have been checked."""
    o, lse = attention(q, k, v, log_f, *documents[:2], *options)
    o = chunked.outward(o, q)
    return (o, lse.transpose(1, 2).contiguous()) if return_lse else o
