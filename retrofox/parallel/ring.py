"""Forgetting Attention of rows whose tokens lie zigzag on a ring of processes.

A chunk's queries of documents that begin in the chunk need nothing from elsewhere: they take the operator as on one
device. Those of the document that began earlier see, part by part,

    the document's sinks (summed up once over the ring), its keys in the same chunk, and its keys in earlier chunks

and the parts merge by their log-sum-exp. Keys of other processes come in R - 1 hops, at hop h from h places back; a hop
carries only what documents, windows and a horizon leave to be seen (`offsets`), so it may carry nothing.
The backward fetches the keys again and sends their gradients back, in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from retrofox.parallel.mesh import Mesh
from retrofox.parallel.offsets import Summary
from retrofox.parallel.plan import RingPlan
from retrofox.parallel.ring_tasks import Walk
from retrofox.parallel.sums import Sums


def ring_attention(
    mesh: Mesh,
    plan: RingPlan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_f: torch.Tensor,
    options: dict[str, Any],
    locally: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Attention over whole rows, this process giving and getting two chunks of each.

    Args:
        q: (B, t, H, D); k, v: (B, t, Hkv, D); log_f: (B, t, H) float32, the chunks one after the other.
        options, locally: as in `Shards.attend`.

    Returns:
        (B, t, H, D) in q's dtype.
    """
    options = {**options, "scale": q.shape[-1] ** -0.5 if options["scale"] is None else options["scale"]}
    shared = None if plan.local else _Ring.apply(q, k, v, log_f, mesh, plan, options)
    rows = []
    for row in range(q.shape[0]):
        pieces = []
        for slot, chunk in enumerate(mesh.degrees.chunks_of(mesh.ring_rank)):
            begin, (skipped, cu_seqlens) = slot * plan.chunk, plan.rest(row, chunk, q.device)
            if shared is not None:  # also for none of its queries: the others wait for this process's backward
                pieces.append(shared[row : row + 1, begin : begin + skipped])
            if skipped < plan.chunk:
                own = slice(begin + skipped, begin + plan.chunk)
                query, key, value = (x[row : row + 1, own].transpose(1, 2) for x in (q, k, v))
                pieces.append(locally(query, key, value, log_f[row : row + 1, own], cu_seqlens, options))
        rows.append(torch.cat(pieces, 1))
    return torch.cat(rows)


class _Ring(torch.autograd.Function):
    """The queries of documents that began in an earlier chunk; zeros for the others."""

    @staticmethod
    def forward(ctx: Any, q, k, v, log_f, mesh: Mesh, plan: RingPlan, options: dict[str, Any]) -> torch.Tensor:
        with torch.autocast(q.device.type, enabled=False):
            summary = Summary(mesh, plan, log_f, k.shape[2], options["horizon"])
            walk = Walk(mesh, plan, options, summary, q, k, v, log_f)
            o = torch.zeros(q.shape, dtype=walk.dtype, device=q.device)
            lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=walk.dtype, device=q.device)
            sinks = walk.gathered_sinks()
            for task in walk.tasks():
                for _, part in walk.own_parts(task, sinks):
                    task.add(o, lse, part)
            under_way = walk.ring.start(1)
            for hop in range(1, mesh.degrees.ring):
                arrived = walk.ring.finish(hop, under_way)
                if hop + 1 < mesh.degrees.ring:
                    under_way = walk.ring.start(hop + 1)
                for keys in arrived:
                    for task, part, _, _ in walk.parts_of(keys):
                        task.add(o, lse, part)
        ctx.save_for_backward(q, k, v, log_f, o, lse, sinks)
        ctx.walk, ctx.summary = (mesh, plan, options), summary
        return o.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor):  # type: ignore[override]
        q, k, v, log_f, o, lse, sinks = ctx.saved_tensors
        mesh, plan, options = ctx.walk
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            walk = Walk(mesh, plan, options, ctx.summary, q, k, v, log_f)
            sums = Sums(walk, o, lse, do)
            d_sinks = torch.zeros_like(sinks)
            for task in walk.tasks():
                for kind, part in walk.own_parts(task, sinks):
                    sums.add_own(task, kind, part, d_sinks)
            under_way, back = walk.ring.start(1), []
            for hop in range(1, mesh.degrees.ring):
                arrived = walk.ring.finish(hop, under_way)
                if hop + 1 < mesh.degrees.ring:
                    under_way = walk.ring.start(hop + 1)
                gradients = [sums.of_keys(keys, walk.parts_of(keys)) for keys in arrived]
                back.append((hop, sums.send_back(hop, gradients)))
            for hop, exchange in back:
                sums.add_returned(hop, exchange)
            sums.add_sinks(d_sinks)
            d_log_f = sums.gate_gradient(log_f)
        return sums.dq.to(q.dtype), sums.dk.to(k.dtype), sums.dv.to(v.dtype), d_log_f, None, None, None
