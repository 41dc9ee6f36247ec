"""A forward and a backward of the Triton or the Gluon kernels, from the gates' sums to the gates' gradient.

The residual is what rounding o to 16 bits lost, kept for the backward by the Triton kernels: with saturated gates the
gradients are differences of do.v and do.o that agree in more digits than o has. The bounds are what pruning leaves out,
starts where documents, padding and windows begin and end (`edges`), both found once for both passes. Each is None where
nothing needs it. No value is read back to the host.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from .common import cumsum, pruning
from .common.edges import edges
from .decoding import planner
from .host.device import on_device
from .host.readable import aligned
from .plain.backward import launch_backward
from .plain.forward import launch_forward


@functools.cache
def launchers(backend: str):
    if backend == "gluon":
        from .hopper import backward as hopper_backward
        from .hopper import forward as hopper_forward

        return hopper_forward.launch_forward, hopper_backward.launch_backward
    return launch_forward, launch_backward


def room_for_residual(q: Tensor, for_backward: bool) -> Tensor | None:
    """Return room for the residual, or None where the backward will want none."""
    if for_backward and q.element_size() == 2:
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)
    return None


def room_for_bounds(q: Tensor, for_backward: bool, log_eps: float | None) -> Tensor | None:
    """Return room for the pruning bounds, or None where the backward will want none."""
    B, T, H, _ = q.shape
    if for_backward and log_eps is not None:
        return torch.empty(B, H, -(-T // pruning.BLOCK_M), dtype=torch.int32, device=q.device)
    return None


def find_starts(q: Tensor, k: Tensor, cu_seqlens, seq_start, window: int | None, backend: str) -> Tensor | None:
    """Return the edges as a backend's kernels want them: the plain ones know a window by themselves."""
    return edges(q.shape[0], k.shape[1], cu_seqlens, seq_start, window if backend == "gluon" else None, q.device)


def as_made(x: Tensor | None) -> Tensor | None:
    """Return what a forward left for its backward as kernels want it: hooks may have turned or moved it meanwhile."""
    if x is None or (x.is_contiguous() and x.data_ptr() % 16 == 0):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def attend(
    q, k, v, log_f, scale, cu_seqlens, seq_start, window, sink, softcap, log_eps, backend, for_backward, deterministic,
    starts=None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Return o, lse2 (`launch_forward`), c_hi, c_lo, residual, bounds and starts; the last is found if not given."""
    with on_device(q):
        options: dict[str, Any] = {
            "scale": scale,
            "seq_start": seq_start,
            "window": window,
            "sink": sink,
            "softcap": softcap,
            "prune": log_eps,
        }
        if cu_seqlens is None and not for_backward and planner.pays(q, k):
            c_hi, c_lo = cumsum.cumulative(log_f)
            return *planner.launch_decode(q, k, v, c_hi, c_lo, **options), c_hi, c_lo, None, None, None
        if starts is None:
            starts = find_starts(q, k, cu_seqlens, seq_start, window, backend)
        options["prune"] = pruning.worth(q, k, log_eps)
        residual = room_for_residual(q, for_backward)
        bounds = room_for_bounds(q, for_backward, options["prune"])
        if backend == "gluon":
            options["counter"] = torch.empty(1, dtype=torch.int32, device=q.device)
        c_hi, c_lo = cumsum.cumulative(log_f, options.get("counter"))
        if residual is not None:
            options["residual"] = residual
        if bounds is not None:
            q, k = aligned(q), aligned(k)
            options["bounds"] = pruning.loop_bounds(q, k, c_hi, c_lo, scale, softcap, log_eps, out=bounds)
        launch, _ = launchers(backend)
        output = launch(q, k, v, c_hi, c_lo, cu_seqlens=cu_seqlens, starts=starts, **options)
        return *output, c_hi, c_lo, residual, bounds, starts


def differentiate(
    do, dlse2, q, k, v, log_f, o, lse2, c_hi, c_lo, residual, bounds, starts, scale, cu_seqlens, seq_start, window,
    sink, softcap, log_eps, backend, deterministic,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq, dk, dv and dlog_f, given what `attend` returned."""
    o, lse2, c_hi, c_lo, residual, bounds, starts = map(as_made, (o, lse2, c_hi, c_lo, residual, bounds, starts))
    with on_device(q):
        _, launch = launchers(backend)
        extra: dict[str, Any] = {}
        if backend == "gluon":  # the Triton backward is deterministic, whatever is asked for
            extra["deterministic"] = deterministic
            if dlse2 is not None and seq_start is not None:  # of rows that see nothing it may be NaN: no part of a loss
                dlse2 = dlse2.masked_fill(lse2 == -math.inf, 0.0)
        log_eps = pruning.worth(q, k, log_eps)
        dq, dk, dv, dc = launch(
            do, dlse2, q, k, v, o, lse2, c_hi, c_lo, scale=scale, starts=starts, cu_seqlens=cu_seqlens,
            seq_start=seq_start, window=window, sink=sink, softcap=softcap, prune=log_eps, residual=residual,
            bounds=None if log_eps is None else bounds, **extra,
        )  # fmt: skip
        return dq, dk, dv, cumsum.gate_gradient(dc, log_f)
