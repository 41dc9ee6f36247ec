"""The Triton implementations as one torch operator, with a fake and a gradient: torch.compile sees no graph break.

    fox_kernels::attention            q, k, v, log_f -> o, lse2, c_hi, c_lo, residual   (backend "triton" or "gluon")
    fox_kernels::attention_backward   -> dq, dk, dv, dlog_f

The residual is what rounding o to 16 bits lost, kept for the backward by the Triton kernels: with saturated gates the
gradients are differences of do.v and do.o that agree in more digits than o has. It is empty where nothing needs it.

No value is read back to the host, so both can be captured in a CUDA graph.
"""

import math
from typing import Any

import torch
from torch import Tensor

from . import cumsum, decode, determinism
from .backward import launch_backward
from .forward import launch_forward

LN_2 = math.log(2)


def _residual(q: Tensor, backend: str, for_backward: bool) -> Tensor:
    """Return room for what rounding o loses, or an empty tensor."""
    wanted = for_backward and backend == "triton" and q.element_size() == 2
    return q.new_empty(q.shape if wanted else (0,))


def _launchers(backend: str):
    if backend == "gluon":
        from . import hopper_backward, hopper_forward

        return hopper_forward.launch_forward, hopper_backward.launch_backward
    return launch_forward, launch_backward


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    with torch.cuda.device_of(q):  # Triton launches on the current device, which need not be the tensors'
        c_hi, c_lo = cumsum.cumulative(log_f)
        options: dict[str, Any] = {
            "scale": scale,
            "seq_start": seq_start,
            "window": window,
            "sink": sink,
            "softcap": softcap,
            "prune": prune,
        }
        residual = _residual(q, backend, for_backward)
        if cu_seqlens is None and not for_backward and decode.pays(q, k):
            return *decode.launch_decode(q, k, v, c_hi, c_lo, **options), c_hi, c_lo, residual
        if residual.numel():
            options["residual"] = residual
        launch, _ = _launchers(backend)
        return *launch(q, k, v, c_hi, c_lo, cu_seqlens=cu_seqlens, **options), c_hi, c_lo, residual


@attention.register_fake
def _(q, k, v, log_f, scale, cu_seqlens, seq_start, window, sink, softcap, prune, backend, for_backward, *_):
    (B, T, H, D), S = q.shape, k.shape[1]
    o = q.new_empty(B, T, H, D)
    lse2, c_hi, c_lo = (q.new_empty(B, H, n, dtype=torch.float32) for n in (T, S, S))
    return o, lse2, c_hi, c_lo, _residual(q, backend, for_backward)


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
    prune: float | None,
    backend: str,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with torch.cuda.device_of(q):
        _, launch = _launchers(backend)
        extra: dict[str, Any] = {"residual": residual} if residual.numel() else {}
        if backend == "gluon":  # the Triton backward is deterministic, whatever is asked for
            extra["deterministic"] = deterministic
        dq, dk, dv, dc = launch(
            do, dlse2, q, k, v, o, lse2, c_hi, c_lo, scale=scale, cu_seqlens=cu_seqlens, seq_start=seq_start,
            window=window, sink=sink, softcap=softcap, prune=prune, **extra,
        )  # fmt: skip
        return dq, dk, dv, cumsum.gate_gradient(dc, log_f)


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


def _backward(ctx, do, dlse2, *_):
    q, k, v, log_f, o, lse2, c_hi, c_lo, residual, cu_seqlens, seq_start = ctx.saved_tensors
    do = torch.zeros_like(o) if do is None else do
    grads = attention_backward(
        do, dlse2, q, k, v, log_f, o, lse2, c_hi, c_lo, residual, ctx.scale, cu_seqlens, seq_start, *ctx.options
    )
    return *grads, *[None] * 10


attention.register_autograd(_backward, setup_context=_setup_context)


def forgetting_attention(
    q, k, v, log_f, *, scale, cu_seqlens, seq_start, window, sink, softcap, prune, return_lse, backend
) -> Tensor | tuple[Tensor, Tensor]:
    """`fox_kernels.forgetting_attention`, which has checked the arguments, by the Triton or the Gluon kernels."""
    for_backward = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, log_f))
    o, lse2, *_ = attention(
        q, k, v, log_f, scale, cu_seqlens, seq_start, window, sink, None if softcap is None else float(softcap),
        None if prune is None else float(prune), backend, for_backward, determinism.is_deterministic(),
    )  # fmt: skip
    return (o, lse2.transpose(1, 2) * LN_2) if return_lse else o
