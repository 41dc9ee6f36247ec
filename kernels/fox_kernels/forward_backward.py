"""One forward and one backward by the Triton or the Gluon kernels, from the gates' sums to the gates' gradient.

residual: the rounding error of o, for the backward. With saturated gates, gradients are differences of do.v and do.o
that agree in more digits than 16 bits hold. first_seen: the keys that a horizon hides. edges: where documents, padding
and windows begin and end. Both passes use one copy of each; each is None where it isn't needed. No value is read back
to the host.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from .common import cumsum
from .common.horizon import found_edges
from .decoding import planner
from .host.device import on_device
from .options import Backend, Documents, Options, Saved
from .triton.backward import launch_backward
from .triton.forward import launch_forward


@functools.cache
def launchers(backend: str):
    if backend == "gluon":
        from .hopper import backward as hopper_backward
        from .hopper import forward as hopper_forward

        return hopper_forward.launch_forward, hopper_backward.launch_backward
    return launch_forward, launch_backward


def room_for_residual(q: Tensor, for_backward: bool) -> Tensor | None:
    """Return room for the residual, or None where the backward needs none."""
    if for_backward and q.element_size() == 2:
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return None


def unwritten(q: Tensor, k: Tensor, v: Tensor, way: Backend) -> Saved:
    """Return what `attend` saves, unwritten."""
    B, T, H, _ = q.shape
    lse2, c_hi, c_lo = (q.new_empty(B, H, n, dtype=torch.float32) for n in (T, k.shape[1], k.shape[1]))
    return Saved(q.new_empty(q.shape), lse2, c_hi, c_lo, room_for_residual(q, way.for_backward))


def as_made(x: Tensor | None) -> Tensor | None:
    """Return a saved tensor, contiguous and aligned: a saved-tensor hook may have copied it with other strides."""
    if x is None or (x.is_contiguous() and x.data_ptr() % 16 == 0):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def attend(
    q, k, v, log_f, options: Options, documents: Documents, way: Backend, out: Tensor | None = None
) -> tuple[Saved, Documents]:
    """Return what the forward saves, o among it, and the documents with their edges; out, contiguous, becomes o."""
    with on_device(q):
        if documents.cu_seqlens is None and not way.for_backward and planner.pays(q, k):
            c_hi, c_lo = cumsum.cumulative(log_f)
            o, lse2 = planner.launch_decode(q, k, v, c_hi, c_lo, options, documents.seq_start)
            return Saved(o if out is None else out.copy_(o), lse2, c_hi, c_lo), documents
        residual = room_for_residual(q, way.for_backward)
        extra: dict[str, Any] = {"out": out}
        if way.backend == "gluon":
            extra["counter"] = torch.empty(1, dtype=torch.int32, device=q.device)
        c_hi, c_lo = cumsum.cumulative(log_f, extra.get("counter"))
        documents = found_edges(c_hi, c_lo, q.shape[1], options, documents, per_head=way.backend == "gluon")
        launch, _ = launchers(way.backend)
        o, lse2 = launch(q, k, v, c_hi, c_lo, options, documents, residual=residual, **extra)
        return Saved(o, lse2, c_hi, c_lo, residual), documents


def differentiate(
    do, dlse2, q, k, v, log_f, saved: Saved, options: Options, documents: Documents, way: Backend
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dq, dk, dv and dlog_f, given what `attend` returned."""
    kept: Any = map(as_made, saved)
    saved = Saved(*kept)
    documents = documents._replace(edges=as_made(documents.edges), first_seen=as_made(documents.first_seen))
    with on_device(q):
        _, launch = launchers(way.backend)
        extra: dict[str, Any] = {}
        if way.backend == "gluon":  # the Triton backward is always deterministic
            extra["deterministic"] = way.deterministic
            if dlse2 is not None and documents.seq_start is not None:
                # rows that see nothing have no part in the loss, but may have a gradient of NaN
                dlse2 = dlse2.masked_fill(saved.lse2 == -math.inf, 0.0)
        dq, dk, dv, dc = launch(do, dlse2, q, k, v, saved, options, documents, **extra)
        return dq, dk, dv, cumsum.gate_gradient(dc, log_f)
