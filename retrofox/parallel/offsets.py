"""One exchange a layer tells every process how far each chunk's gates fall, and which keys can be left where they are.

Per row, chunk and head: the sum of log f, the greatest |q|, the greatest |k|, and the gap max_i (c_i - c_start - s_ii),
s_ii being a query's score of its own key. Sums are float64, so that c is exact across chunks.

Keys of chunk b hold at most eps of the weight of any query of chunk a, and stay where they are, if

    between(b, a) + gap_a + |scale| max|q_a| max|k_b| < ln eps - ln T,     between = sum of log f of the chunks between

(Lin et al., "Adaptive Computation Pruning", arXiv 2504.06949, for chunks instead of blocks). All processes read
the same numbers, so all agree on what is sent before anything moves.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from retrofox.parallel.mesh import Mesh
from retrofox.parallel.plan import RingPlan

LOG_F_MIN = -1e4  # as in the operator: exp underflows long before


class Summary:
    """What all processes of a ring know of all chunks of a layer.

    Attributes:
        falls: (B, chunks, H) float64, sums of log f, on the device of the queries.
        needed: (B, chunks of queries, chunks of keys, Hkv) bool on the CPU: which keys have to come.
    """

    def __init__(self, mesh: Mesh, plan: RingPlan, q: Any, k: Any, log_f: torch.Tensor, options: dict[str, Any]):
        chunks = mesh.degrees.chunks
        mine = torch.cat([x.double() for x in self._mine(plan, q, k, log_f, options)], -1)  # (B, 2, 3 H + Hkv)
        found = mesh.gathered(mine, ring_only=True)
        held = [chunk for place in range(mesh.degrees.ring) for chunk in mesh.degrees.chunks_of(place)]
        order = torch.tensor(held, device=mine.device).argsort()
        table = found.transpose(0, 1).flatten(1, 2)[:, order]  # (B, chunks, ...)
        heads, kv_heads = log_f.shape[2], k.shape[2]
        self.falls, most_q, gap, most_k = table.split([heads, heads, heads, kv_heads], -1)
        self.needed = plan.possible()[..., None].expand(-1, -1, -1, kv_heads)
        if options["prune"] is not None:
            groups, never = heads // kv_heads, options["prune"] - math.log(plan.length)
            bound = abs(options["scale"]) * most_q[:, :, None] * most_k.repeat_interleave(groups, -1)[:, None] * 1.0001
            if options["softcap"] is not None:
                bound = bound.clamp_max(options["softcap"])
            fall = torch.zeros_like(bound)
            for a in range(chunks):
                for b in range(a):
                    fall[:, a, b] = self.between(b, a)
            open_heads = ~(fall + gap[:, :, None] + bound < never)  # NaN keeps its keys
            self.needed = self.needed & open_heads.unflatten(-1, (kv_heads, groups)).any(-1).cpu()
        self._count(mesh)

    @staticmethod
    def _mine(plan: RingPlan, q: Any, k: Any, log_f: torch.Tensor, options: dict[str, Any]) -> list[torch.Tensor]:
        """Sums, norms and gaps of this process's chunks: (B, 2, H or Hkv) each."""

        def by_chunk(x: torch.Tensor) -> torch.Tensor:
            return x.unflatten(1, (-1, plan.chunk))

        c = by_chunk(clamped(log_f)).cumsum(2)
        falls = c[:, :, -1]
        if options["prune"] is None:
            return [
                falls,
                torch.zeros_like(falls),
                torch.zeros_like(falls),
                falls.new_zeros(*falls.shape[:2], k.shape[2]),
            ]
        own = (q.double() * k.double().repeat_interleave(q.shape[2] // k.shape[2], 2)).sum(-1) * options["scale"]
        if options["softcap"] is not None:
            own = options["softcap"] * torch.tanh(own / options["softcap"])
        norms = [by_chunk(torch.linalg.vector_norm(x.double(), dim=-1)).amax(2) for x in (q, k)]
        return [falls, norms[0], (c - by_chunk(own)).amax(2), norms[1]]

    def between(self, keys: int, queries: int) -> torch.Tensor:
        """(B, H) float64: the sum of log f over the chunks between two."""
        return self.falls[:, keys + 1 : queries].sum(1)

    def _count(self, mesh: Mesh) -> None:
        """Adds to the traffic what this process's queries had fetched, and what they had not."""
        mine = mesh.degrees.chunks_of(mesh.ring_rank)
        theirs = [[b for b in range(a) if b not in mine] for a in mine]
        fetched = sum(int(self.needed[:, a, b].sum()) for a, keys in zip(mine, theirs, strict=True) for b in keys)
        whole = sum(map(len, theirs)) * self.needed.shape[0] * self.needed.shape[3]
        mesh.traffic.hops += fetched
        mesh.traffic.hops_saved += whole - fetched


def clamped(log_f: torch.Tensor) -> torch.Tensor:
    """log f in float64, as the operator sums it."""
    return log_f.double().clamp_min(LOG_F_MIN)
