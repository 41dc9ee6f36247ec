"""The Triton and Gluon implementations under autograd: straight to the kernels in eager mode, and as one torch operator
with a fake and a gradient wherever something watches or rewrites operators, so that torch.compile sees no graph break.

    fox_kernels::attention            q, k, v, log_f -> o, lse2, c_hi, c_lo, residual, bounds
    fox_kernels::attention_backward   -> dq, dk, dv, dlog_f
    fox_kernels::decode               q, k, v, c_hi, c_lo -> o

The residual is what rounding o to 16 bits lost, kept for the backward by the Triton kernels: with saturated gates the
gradients are differences of do.v and do.o that agree in more digits than o has. The bounds are what pruning leaves out,
searched once for both passes. Each is empty, or None in eager mode, where nothing needs it. Torch's machinery for
operators written in Python costs the host more than 0.1 ms a call, as much as a short problem takes: hence the two ways
in.

No value is read back to the host, so both can be captured in a CUDA graph.
"""

import contextlib
import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from . import cumsum, decode, determinism, prune
from .backward import launch_backward
from .chunked import check_backward
from .forward import aligned, launch_forward
from .kinds import gradient_kind
from .launch import watched
from .replay import Replay, Tape, calls, recorded

LN_2 = math.log(2)


@functools.cache
def _launchers(backend: str):
    if backend == "gluon":
        from . import hopper_backward, hopper_forward

        return hopper_forward.launch_forward, hopper_backward.launch_backward
    return launch_forward, launch_backward


def _residual(q: Tensor, for_backward: bool) -> Tensor | None:
    """Return room for the residual, or None where the backward will want none."""
    if for_backward and q.element_size() == 2:
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return None


def _bounds(q: Tensor, for_backward: bool, log_eps: float | None) -> Tensor | None:
    """Return room for the pruning bounds, or None where the backward will want none."""
    B, T, H, _ = q.shape
    if for_backward and log_eps is not None:
        return torch.empty(B, H, -(-T // prune.BLOCK_M), dtype=torch.int32, device=q.device)
    return None


def _on_device(q: Tensor):
    """Return a context in which q's device is the current one: Triton launches there."""
    if q.device.type != "cuda" or q.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(q.device)


def _attend(
    q, k, v, log_f, scale, cu_seqlens, seq_start, window, sink, softcap, log_eps, backend, for_backward, deterministic
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    with _on_device(q):
        options: dict[str, Any] = {
            "scale": scale,
            "seq_start": seq_start,
            "window": window,
            "sink": sink,
            "softcap": softcap,
            "prune": log_eps,
        }
        if cu_seqlens is None and not for_backward and decode.pays(q, k):
            c_hi, c_lo = cumsum.cumulative(log_f)
            return *decode.launch_decode(q, k, v, c_hi, c_lo, **options), c_hi, c_lo, None, None
        options["prune"] = prune.worth(q, k, log_eps)
        residual, bounds = _residual(q, for_backward), _bounds(q, for_backward, options["prune"])
        if backend == "gluon":
            options["counter"] = torch.empty(1, dtype=torch.int32, device=q.device)
        c_hi, c_lo = cumsum.cumulative(log_f, options.get("counter"))
        if residual is not None:
            options["residual"] = residual
        if bounds is not None:
            q, k = aligned(q), aligned(k)
            options["bounds"] = prune.loop_bounds(q, k, c_hi, c_lo, scale, softcap, log_eps, out=bounds)
        launch, _ = _launchers(backend)
        return *launch(q, k, v, c_hi, c_lo, cu_seqlens=cu_seqlens, **options), c_hi, c_lo, residual, bounds


def _differentiate(
    do, dlse2, q, k, v, log_f, o, lse2, c_hi, c_lo, residual, bounds, scale, cu_seqlens, seq_start, window, sink,
    softcap, log_eps, backend, deterministic,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    with _on_device(q):
        _, launch = _launchers(backend)
        extra: dict[str, Any] = {}
        if backend == "gluon":  # the Triton backward is deterministic, whatever is asked for
            extra["deterministic"] = deterministic
            if dlse2 is not None and seq_start is not None:  # of rows that see nothing it may be NaN: no part of a loss
                dlse2 = dlse2.masked_fill(lse2 == -math.inf, 0.0)
        log_eps = prune.worth(q, k, log_eps)
        dq, dk, dv, dc = launch(
            do, dlse2, q, k, v, o, lse2, c_hi, c_lo, scale=scale, cu_seqlens=cu_seqlens, seq_start=seq_start,
            window=window, sink=sink, softcap=softcap, prune=log_eps, residual=residual,
            bounds=None if log_eps is None else bounds, **extra,
        )  # fmt: skip
        return dq, dk, dv, cumsum.gate_gradient(dc, log_f)


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
    *output, residual, bounds = _attend(
        q, k, v, log_f, scale, cu_seqlens, seq_start, window, sink, softcap, prune, backend, for_backward, deterministic
    )
    o, lse2, c_hi, c_lo = output
    if bounds is None:  # none were worth a search: zeros in their place, as shapes can't depend on that
        bounds = _bounds(q, for_backward, prune)
        bounds = None if bounds is None else bounds.zero_()
    return o, lse2, c_hi, c_lo, *_tensors(q, residual, bounds)


@attention.register_fake
def _(q, k, v, log_f, scale, cu_seqlens, seq_start, window, sink, softcap, prune, backend, for_backward, *_):
    (B, T, H, D), S = q.shape, k.shape[1]
    o = q.new_empty(B, T, H, D)
    lse2, c_hi, c_lo = (q.new_empty(B, H, n, dtype=torch.float32) for n in (T, S, S))
    return o, lse2, c_hi, c_lo, *_tensors(q, _residual(q, for_backward), _bounds(q, for_backward, prune))


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
    return _differentiate(
        do, dlse2, q, k, v, log_f, o, lse2, c_hi, c_lo, residual if residual.numel() else None,
        bounds if bounds.numel() else None, scale, cu_seqlens, seq_start, window, sink, softcap, prune, backend,
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
    q, k, v, log_f, o, lse2, c_hi, c_lo, residual, bounds, cu_seqlens, seq_start = ctx.saved_tensors
    do = torch.zeros_like(o) if do is None else do
    grads = differentiate(
        do, dlse2, q, k, v, log_f, o, lse2, c_hi, c_lo, residual, bounds, ctx.scale, cu_seqlens, seq_start, *ctx.options
    )
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
        return None, *_gradients(ctx, do, dlse2, _differentiate)


class _Replayed(torch.autograd.Function):
    """The same from the second call of a kind on."""

    @staticmethod
    def forward(ctx, q, k, v, log_f, call):
        o, kept = call.forward(q, k, v, log_f)
        ctx.save_for_backward(q, k, v, log_f, o, kept)
        ctx.call = call
        return o

    @staticmethod
    def backward(ctx, do):
        check_backward(do)
        return *ctx.call.differentiate(do, *ctx.saved_tensors), None


MAX_KINDS, MAX_GRADIENT_KINDS = 1024, 16  # more are forgotten all at once


class Call:
    """A kind of call, run from a tape of the first; so are its backwards, by the kind of gradient they get."""

    def __init__(self, forward: Replay, options: tuple):
        self.forward, self.options = forward, options
        *self.scalars, self.differentiable, deterministic = options
        self.scalars.append(deterministic)
        self.backwards: dict[tuple | None, Replay | None] = {}  # None: of a kind that can't be replayed

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, log_f: Tensor) -> Tensor:
        """Return o."""
        if watched():
            return _run(_attend, q, k, v, log_f, *self.options)[0]
        return _Replayed.apply(q, k, v, log_f, self) if self.differentiable else self.forward(q, k, v, log_f)[0]

    def differentiate(self, do: Tensor, *saved: Tensor):
        """Return dq, dk, dv and dlog_f; saved are q, k, v, log_f, o and what the forward kept beside them."""
        *inputs, kept = saved
        kind = gradient_kind(do, *inputs)
        backward = self.backwards.get(kind)
        if backward is not None and not watched():
            return backward(do, *saved)
        q, k, v, log_f, o = inputs
        arguments = (do, None, q, k, v, log_f, o, *self.forward.parts(kept), *self.scalars)
        if kind is None or kind in self.backwards:
            return _differentiate(*arguments)
        with Tape() as tape:
            gradients = _differentiate(*arguments)
        if len(self.backwards) >= MAX_GRADIENT_KINDS:
            self.backwards.clear()
        self.backwards[kind] = recorded(tape, (do, *saved), gradients, len(gradients))
        return gradients


def _remember(kind: tuple):
    """Return what does as `_attend` and keeps how it was done for the next call of a kind."""

    def attend(*inputs):
        with Tape() as tape:
            output = _attend(*inputs)
        q, k, v, log_f, *options = inputs
        forward = recorded(tape, (q, k, v, log_f), output, 1)
        if len(calls) >= MAX_KINDS:
            calls.clear()
        calls[kind] = None if forward is None else Call(forward, tuple(options))
        return output

    return attend


def _run(attend, *inputs):
    """Return o and lse2, differentiable if for_backward among the inputs says so."""
    return _Attention.apply(attend, *inputs) if inputs[-2] else attend(*inputs)[:2]


def _watched(*tensors: Tensor) -> bool:
    """Return whether compilers, tensor subclasses or dispatch modes must see an operator."""
    return (
        torch.compiler.is_compiling()
        or any(type(x) not in (Tensor, torch.nn.Parameter) for x in tensors)
        or is_in_torch_dispatch_mode()
    )


def forgetting_attention(
    q, k, v, log_f, *, scale, cu_seqlens, seq_start, window, sink, softcap, prune, return_lse, backend, kind=None
) -> Tensor | tuple[Tensor, Tensor]:
    """`fox_kernels.forgetting_attention`, which has checked the arguments, by the Triton or the Gluon kernels.

    kind is that of the call, or None: what runs the next one of it is left in `replay.calls`.
    """
    window, sink = None if window is None else min(window, k.shape[1]), min(sink, k.shape[1])  # ints of 32 bits
    for_backward = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, log_f))
    inputs = (
        q, k, v, log_f, scale, cu_seqlens, seq_start, window, sink, None if softcap is None else float(softcap),
        None if prune is None else float(prune), backend, for_backward, determinism.is_deterministic(),
    )  # fmt: skip
    if _watched(q, k, v, log_f):
        o, lse2, *_ = attention(*inputs)
    else:
        o, lse2 = _run(_attend if kind is None or kind in calls else _remember(kind), *inputs)
    return (o, lse2.transpose(1, 2) * LN_2) if return_lse else o


@torch.library.custom_op("fox_kernels::decode", mutates_args=())
def decode_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    c_hi: Tensor,
    c_lo: Tensor,
    k_bound: Tensor | None,
    seq_start: Tensor | None,
    scale: float,
    window: int | None,
    sink: int,
    softcap: float | None,
    prune: float | None,
) -> Tensor:
    return _decode(q, k, v, c_hi, c_lo, k_bound, seq_start, scale, window, sink, softcap, prune)


@decode_operator.register_fake
def _(q, *_):
    return q.new_empty(q.shape)


def _decode(q, k, v, c_hi, c_lo, k_bound, seq_start, scale, window, sink, softcap, prune) -> Tensor:
    with _on_device(q):
        return decode.launch_decode(
            q, k, v, c_hi, c_lo, scale=scale, seq_start=seq_start, window=window, sink=sink, softcap=softcap,
            prune=prune, k_bound=k_bound,
        )[0]  # fmt: skip


def decode_attention(q, k, v, c_hi, c_lo, *, scale, seq_start, window, sink, softcap, prune, k_bound) -> Tensor:
    """`fox_kernels.decode_attention`, which has checked the arguments."""
    window, sink = None if window is None else min(window, k.shape[1]), min(sink, k.shape[1])
    softcap, prune = (None if x is None else float(x) for x in (softcap, prune))
    run = decode_operator if _watched(q, k, v, c_hi, c_lo) else _decode
    return run(q, k, v, c_hi, c_lo, k_bound, seq_start, scale, window, sink, softcap, prune)


def decoder(q, k, *, scale, seq_start, window, sink, softcap, prune, k_bound) -> decode.Decoder | None:
    """Return what runs the kind of call that this is; None where keys are searched by torch, or parted."""
    if q.shape[0] * k.shape[2] > decode.MAX_PAIRS or (prune is not None and k_bound is None):
        return None
    return decode.decoder_for(
        q.shape, k.shape[2], q.dtype, q.device, scale=scale, padded=seq_start is not None, window=window, sink=sink,
        softcap=softcap, prune=prune, pruned=prune is not None, searches=prune is not None,
    )  # fmt: skip
