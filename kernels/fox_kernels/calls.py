"""Calls in eager mode after the first of a kind (`kinds`), and their backwards, run from a tape (`replay`)."""

import torch
from torch import Tensor

from .chunked import check_backward
from .host.kinds import gradient_kind
from .host.launch import watched
from .host.replay import Replay, Tape, calls, recorded
from .passes import attend, differentiate, find_starts

MAX_KINDS, MAX_GRADIENT_KINDS = 1024, 16  # more are forgotten all at once


class _Replayed(torch.autograd.Function):
    """What it saves is the same whether o and what is kept beside it are found or not: checkpoints compare it."""

    @staticmethod
    def forward(ctx, q, k, v, log_f, starts, call, found):
        starts = () if starts is None else (starts,)
        o, kept = found or call.forward(q, k, v, log_f, *starts)
        ctx.save_for_backward(q, k, v, log_f, o, kept, *starts)
        ctx.call = call
        return o

    @staticmethod
    def backward(ctx, do):
        check_backward(do)
        return *ctx.call.differentiate(do, *ctx.saved_tensors), None, None, None


class Call:
    """A kind of call; its backwards are told apart by the kind of gradient they get.

    forward is the tape of the first, options all that `attend` takes after the tensors.
    """

    def __init__(self, forward: Replay, options: list):
        self.forward = forward
        self.scale, _, _, *self.options = options  # without cu_seqlens and seq_start
        self.window, *_, self.backend, self.differentiable, _ = self.options
        self.backwards: dict[tuple | None, Replay | None] = {}  # None: of a kind that can't be replayed

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, cu_seqlens: Tensor | None, seq_start: Tensor | None
    ) -> Tensor:
        """Return o."""
        starts = find_starts(q, k, cu_seqlens, seq_start, self.window, self.backend)
        if watched():
            with torch.no_grad():
                output = attend(q, k, v, log_f, self.scale, cu_seqlens, seq_start, *self.options, starts=starts)
            return self.found(output, q, k, v, log_f, starts)
        if self.differentiable:
            return _Replayed.apply(q, k, v, log_f, starts, self, None)  # pyright: ignore[reportReturnType]
        return self.forward(q, k, v, log_f, *(() if starts is None else (starts,)))[0]

    def found(self, output: tuple, q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, starts: Tensor | None) -> Tensor:
        """Return o of what `attend` returned, differentiable as if it came from the tape."""
        o, *kept, _ = output
        if not self.differentiable:
            return o
        found = o, self.forward.packed(kept)
        return _Replayed.apply(q, k, v, log_f, starts, self, found)  # pyright: ignore[reportReturnType]

    def differentiate(self, do: Tensor, *saved: Tensor):
        """Return dq, dk, dv, dlog_f; saved are q, k, v, log_f, o, what the forward kept beside them, and starts."""
        kind, watching = gradient_kind(do, *saved), watched()
        backward = self.backwards.get(kind)
        if backward is not None and not watching:
            return backward(do, *saved)
        q, k, v, log_f, o, kept, *starts = saved
        window, sink, softcap, log_eps, backend, _, deterministic = self.options
        lse2, c_hi, c_lo, residual, bounds = self.forward.parts(kept)
        with Tape() as tape:
            gradients = differentiate(
                do, None, q, k, v, log_f, o, lse2, c_hi, c_lo, residual, bounds, starts[0] if starts else None,
                self.scale, None, None, window, sink, softcap, log_eps, backend, deterministic,
            )  # fmt: skip
        if kind is not None and kind not in self.backwards and not watching:
            if len(self.backwards) >= MAX_GRADIENT_KINDS:
                self.backwards.clear()
            self.backwards[kind] = recorded(tape, (do, *saved), gradients, len(gradients))
        return gradients


def remember(kind: tuple | None, usual, *inputs) -> Tensor:
    """Return o of all that `attend` takes, and keep how it was found for the next call of this kind.

    usual(*inputs, attend=...) gives o the gradient of calls that can't be replayed.
    """
    q, k, v, log_f, *options = inputs
    _, cu_seqlens, seq_start, window, *_, backend, _, _ = options
    starts = find_starts(q, k, cu_seqlens, seq_start, window, backend)  # not on the tape: of any number of documents
    with torch.no_grad(), Tape() as tape:
        output = attend(*inputs, starts=starts)
    forward = recorded(tape, (q, k, v, log_f) if starts is None else (q, k, v, log_f, starts), output[:6], 1)
    if len(calls) >= MAX_KINDS:
        calls.clear()
    calls[kind] = call = None if forward is None else Call(forward, options)
    if call is None:
        return usual(*inputs, attend=lambda *inputs: output)[0]
    return call.found(output, q, k, v, log_f, starts)
