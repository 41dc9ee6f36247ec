"""Calls in eager mode after the first of a kind (`kinds`), and their backwards, run from a tape (`replay`)."""

import torch
from torch import Tensor

from .chunked import check_backward
from .kinds import gradient_kind
from .launch import watched
from .passes import attend, differentiate, find_starts
from .replay import Replay, Tape, calls, recorded

MAX_KINDS, MAX_GRADIENT_KINDS = 1024, 16  # more are forgotten all at once


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, log_f, starts, call):
        starts = () if starts is None else (starts,)
        o, kept = call.forward(q, k, v, log_f, *starts)
        ctx.save_for_backward(q, k, v, log_f, o, kept, *starts)
        ctx.call = call
        return o

    @staticmethod
    def backward(ctx, do):
        check_backward(do)
        return *ctx.call.differentiate(do, *ctx.saved_tensors), None, None


class Call:
    """A kind of call; its backwards are told apart by the kind of gradient they get.

    forward is the tape of the first; usual runs one without, of all that `attend` takes, and returns o first.
    """

    def __init__(self, forward: Replay, usual, options: list):
        self.forward, self.usual = forward, usual
        self.scale, _, _, *self.options = options  # without cu_seqlens and seq_start
        self.window, *_, self.backend, self.differentiable, _ = self.options
        self.backwards: dict[tuple | None, Replay | None] = {}  # None: of a kind that can't be replayed

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, cu_seqlens: Tensor | None, seq_start: Tensor | None
    ) -> Tensor:
        """Return o."""
        if watched():
            return self.usual(q, k, v, log_f, self.scale, cu_seqlens, seq_start, *self.options)[0]
        starts = find_starts(q, k, cu_seqlens, seq_start, self.window, self.backend)
        if self.differentiable:
            return _Replayed.apply(q, k, v, log_f, starts, self)  # pyright: ignore[reportReturnType]
        return self.forward(q, k, v, log_f, *(() if starts is None else (starts,)))[0]

    def differentiate(self, do: Tensor, *saved: Tensor):
        """Return dq, dk, dv, dlog_f; saved are q, k, v, log_f, o, what the forward kept beside them, and starts."""
        q, k, v, log_f, o, kept, *starts = saved
        kind = gradient_kind(do, q, k, v, log_f, o)
        backward = self.backwards.get(kind)
        if backward is not None and not watched():
            return backward(do, *saved)
        window, sink, softcap, log_eps, backend, _, deterministic = self.options
        lse2, c_hi, c_lo, residual, bounds = self.forward.parts(kept)
        with Tape() as tape:
            gradients = differentiate(
                do, None, q, k, v, log_f, o, lse2, c_hi, c_lo, residual, bounds, starts[0] if starts else None,
                self.scale, None, None, window, sink, softcap, log_eps, backend, deterministic,
            )  # fmt: skip
        if kind is not None and kind not in self.backwards:
            if len(self.backwards) >= MAX_GRADIENT_KINDS:
                self.backwards.clear()
            self.backwards[kind] = recorded(tape, (do, *saved), gradients, len(gradients))
        return gradients


def remember(kind: tuple | None, usual, *inputs):
    """Return what `attend` does, and keep how it was done for the next call of this kind; usual as in `Call`."""
    q, k, v, log_f, *options = inputs
    _, cu_seqlens, seq_start, window, *_, backend, _, _ = options
    starts = find_starts(q, k, cu_seqlens, seq_start, window, backend)  # not on the tape: of any number of documents
    with Tape() as tape:
        output = attend(*inputs, starts=starts)
    forward = recorded(tape, (q, k, v, log_f) if starts is None else (q, k, v, log_f, starts), output[:6], 1)
    if len(calls) >= MAX_KINDS:
        calls.clear()
    calls[kind] = None if forward is None else Call(forward, usual, options)
    return output
