"""The kernels, and plain torch by chunks, under autograd.

In eager mode their two passes are called directly. Where something watches or rewrites operators, they are one torch
operator with a fake and a gradient, so that torch.compile sees no graph break, nor a loop over chunks to unroll:

    fox_kernels::attention            q, k, v, log_f -> o, lse2, c_hi, c_lo, residual (`options.Saved`)
    fox_kernels::attention_backward   -> dq, dk, dv, dlog_f

Torch's machinery for operators written in Python costs the host more than 0.1 ms a call, as much as a short problem
takes: hence the two ways in.
"""

import math

import torch
from torch import Tensor

from . import chunked, determinism
from .arguments import check_backward, for_backward, traced
from .options import SCHEMA, Backend, Documents, Options, Saved

LN_2 = math.log(2)
INPUTS = "Tensor q, Tensor k, Tensor v, Tensor log_f"
FURTHER = f"{SCHEMA}, str backend, bool for_backward, bool deterministic"
FOUR = "(Tensor, Tensor, Tensor, Tensor)"


def _split(cu_seqlens, seq_start, *further) -> tuple[Options, Documents, Backend]:
    """Return the operators' arguments behind the tensors, FURTHER, as the functions below take them."""
    return Options(*further[:-3]), Documents(cu_seqlens, seq_start), Backend(*further[-3:])


def _passes(way: Backend):
    """Return the module with both passes."""
    if way.backend == "chunked":
        return chunked
    from . import forward_backward  # needs Triton

    return forward_backward


def _outputs(saved: Saved) -> tuple[Tensor, ...]:
    return *saved[:4], saved.o.new_empty(0) if saved.residual is None else saved.residual  # an output must be a tensor


@torch.library.custom_op(
    "fox_kernels::attention", mutates_args=(), schema=f"({INPUTS}, {FURTHER}) -> {FOUR[:-1]}, Tensor)"
)
def attention(q, k, v, log_f, *further):
    options, documents, way = _split(*further)
    return _outputs(_passes(way).attend(q, k, v, log_f, options, documents, way)[0])


@attention.register_fake
def _(q, k, v, log_f, *further):
    way = _split(*further)[2]
    return _outputs(_passes(way).unwritten(q, k, v, way))


@torch.library.custom_op(
    "fox_kernels::attention_backward", mutates_args=(),
    schema=f"(Tensor do, Tensor? dlse2, {INPUTS}, Tensor o, Tensor lse2, Tensor c_hi, Tensor c_lo, Tensor residual, "
    f"{FURTHER}) -> {FOUR}",
)  # fmt: skip
def attention_backward(do, dlse2, q, k, v, log_f, o, lse2, c_hi, c_lo, residual, *further):
    saved = Saved(o, lse2, c_hi, c_lo, residual if residual.numel() else None)
    options, documents, way = _split(*further)
    return _passes(way).differentiate(do, dlse2, q, k, v, log_f, saved, options, documents, way)


@attention_backward.register_fake
def _(do, dlse2, q, k, v, log_f, *_):
    return tuple(x.new_empty(x.shape) for x in (q, k, v, log_f))  # contiguous, as the kernels write it


def _setup_context(ctx, inputs, output):
    q, k, v, log_f, cu_seqlens, seq_start, *ctx.further = inputs
    ctx.save_for_backward(q, k, v, log_f, *output, cu_seqlens, seq_start)
    ctx.set_materialize_grads(False)


def _backward(ctx, do, dlse2, *_):
    do = torch.zeros_like(ctx.saved_tensors[4]) if do is None else do
    grads = attention_backward(do, dlse2, *ctx.saved_tensors, *ctx.further)
    return *grads, *[None] * (2 + len(ctx.further))


attention.register_autograd(_backward, setup_context=_setup_context)


class _Attention(torch.autograd.Function):
    """The operator `attention` as an autograd function, without torch.library."""

    @staticmethod
    def forward(ctx, q, k, v, log_f, options, documents, way):
        saved, documents = _passes(way).attend(q, k, v, log_f, options, documents, way)
        ctx.save_for_backward(q, k, v, log_f, *saved, *documents)
        ctx.options, ctx.way = options, way
        ctx.set_materialize_grads(False)
        return saved[:2]

    @staticmethod
    def backward(ctx, do, dlse2):
        check_backward()
        q, k, v, log_f, *kept = ctx.saved_tensors
        do = torch.zeros_like(kept[0]) if do is None else do
        saved, documents = Saved(*kept[:5]), Documents(*kept[5:])
        given = (do, dlse2, q, k, v, log_f, saved, ctx.options, documents, ctx.way)
        return *_passes(ctx.way).differentiate(*given), None, None, None


def forgetting_attention(
    q, k, v, log_f, options: Options, documents: Documents, backend: str, return_lse: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """`fox_kernels.forgetting_attention`, which has checked the arguments, by a backend other than the reference."""
    way = Backend(backend, for_backward(q, k, v, log_f), determinism.is_deterministic())
    if traced(q, k, v, log_f):
        o, lse2, *_ = attention(q, k, v, log_f, *documents[:2], *options, *way)
    elif way.for_backward:
        o, lse2 = _Attention.apply(q, k, v, log_f, options, documents, way)  # pyright: ignore[reportGeneralTypeIssues]
    else:
        (o, lse2, *_), _ = _passes(way).attend(q, k, v, log_f, options, documents, way)
    o = o.to(q.dtype)  # by chunks it is wider
    if not return_lse:
        return o
    lse = lse2.transpose(1, 2)
    return o, lse if backend == "chunked" else lse * LN_2
