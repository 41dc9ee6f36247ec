"""Runs calls in eager mode, and their backwards, from the tape (`replay`) of the first call of their kind (`kinds`)."""

from typing import Any

import torch
from torch import Tensor

from .chunked import check_backward
from .host.kinds import gradient_kind
from .host.launch import watched
from .host.replay import Replay, Tape, calls, recorded
from .options import Documents, Options, Saved, Way
from .passes import attend, differentiate, find_edges

MAX_KINDS, MAX_GRADIENT_KINDS = 1024, 16  # at more, all are forgotten


class _Replayed(torch.autograd.Function):
    """Saves the same tensors whether `found` gives o and its companions or not: checkpointing compares them."""

    @staticmethod
    def forward(ctx, q, k, v, log_f, edges, call, found):
        edges = () if edges is None else (edges,)
        o, kept = found or call.forward(q, k, v, log_f, *edges)
        ctx.save_for_backward(q, k, v, log_f, o, kept, *edges)
        ctx.call = call
        return o

    @staticmethod
    def backward(ctx, do):
        check_backward(do)
        return *ctx.call.differentiate(do, *ctx.saved_tensors), None, None, None


class Call:
    """Calls like one that was recorded; their backwards are told apart by the kind of gradient they get.

    forward is the tape of the first call's `attend`.
    """

    def __init__(self, forward: Replay, options: Options, way: Way):
        self.forward, self.options, self.way = forward, options, way
        self.backwards: dict[tuple | None, Replay | None] = {}  # None: can't be replayed

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, documents: Documents) -> Tensor:
        """Return o."""
        edges = find_edges(q, k, documents, self.options.window, self.way.backend)
        if watched():
            documents = documents._replace(edges=edges)
            with torch.no_grad():
                saved, _ = attend(q, k, v, log_f, self.options, documents, self.way, known_edges=True)
            return self.found(saved, q, k, v, log_f, edges)
        if self.way.for_backward:
            return _Replayed.apply(q, k, v, log_f, edges, self, None)  # pyright: ignore[reportReturnType]
        return self.forward(q, k, v, log_f, *(() if edges is None else (edges,)))[0]

    def found(self, saved: Saved, q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, edges: Tensor | None) -> Tensor:
        """Return o of what `attend` returned, differentiable as if it came from the tape."""
        o, *kept = saved
        if not self.way.for_backward:
            return o
        found = o, self.forward.packed(kept)
        return _Replayed.apply(q, k, v, log_f, edges, self, found)  # pyright: ignore[reportReturnType]

    def differentiate(self, do: Tensor, *saved: Tensor):
        """Return dq, dk, dv, dlog_f; saved: q, k, v, log_f, o, the packed rest of `Saved`, edges if any."""
        kind, watching = gradient_kind(do, *saved), watched()
        backward = self.backwards.get(kind)
        if backward is not None and not watching:
            return backward(do, *saved)
        q, k, v, log_f, o, kept, *edges = saved
        documents = Documents(edges=edges[0] if edges else None)
        parts: Any = self.forward.parts(kept)
        with Tape() as tape:
            gradients = differentiate(
                do, None, q, k, v, log_f, Saved(o, *parts), self.options, documents, self.way
            )  # fmt: skip
        if kind is not None and kind not in self.backwards and not watching:
            if len(self.backwards) >= MAX_GRADIENT_KINDS:
                self.backwards.clear()
            self.backwards[kind] = recorded(tape, (do, *saved), gradients, len(gradients))
        return gradients


def remember(kind: tuple | None, usual, q, k, v, log_f, options: Options, documents: Documents, way: Way) -> Tensor:
    """Return o, and record how it was found for the next call of this kind.

    usual(q, ..., way, attend=...) gives o the gradient of calls that can't be replayed.
    """
    # the edges are not on the tape: there may be any number of documents
    edges = find_edges(q, k, documents, options.window, way.backend)
    documents = documents._replace(edges=edges)
    with torch.no_grad(), Tape() as tape:
        saved, _ = attend(q, k, v, log_f, options, documents, way, known_edges=True)
    forward = recorded(tape, (q, k, v, log_f) if edges is None else (q, k, v, log_f, edges), saved, 1)
    if len(calls) >= MAX_KINDS:
        calls.clear()
    calls[kind] = call = None if forward is None else Call(forward, options, way)
    if call is None:
        return usual(q, k, v, log_f, options, documents, way, attend=lambda *inputs: (saved, documents))[0]
    return call.found(saved, q, k, v, log_f, edges)
