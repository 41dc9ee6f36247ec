"""One exchange a layer tells every process how far each chunk's gates fall, and which keys a horizon leaves out.

Per row, chunk and head: the sum of log f, in float64, so that c is exact across chunks. With a horizon, no query of
chunk a sees a key of chunk b, and the keys stay where they are, if the sum of log f of the chunks between is at most
-horizon for every query head of a kv head. All processes read the same numbers, so all agree on what is sent before
anything moves.
"""

from __future__ import annotations

import torch

from retrofox.parallel.mesh import Mesh
from retrofox.parallel.plan import RingPlan

LOG_F_MIN = -1e4  # as in the operator: exp underflows long before


class Summary:
    """What all processes of a ring know of all chunks of a layer; log_f (B, t, H) is this process's.

    Attributes:
        falls: (B, chunks, H) float64, sums of log f, on the device of the queries.
        needed: (B, chunks of queries, chunks of keys, Hkv) bool on the CPU: which keys have to come.
    """

    def __init__(self, mesh: Mesh, plan: RingPlan, log_f: torch.Tensor, kv_heads: int, horizon: float | None):
        chunks = mesh.degrees.chunks
        found = mesh.gathered(clamped(log_f).unflatten(1, (-1, plan.chunk)).sum(2), ring_only=True)
        held = [chunk for place in range(mesh.degrees.ring) for chunk in mesh.degrees.chunks_of(place)]
        self.falls = found.transpose(0, 1).flatten(1, 2)[:, torch.tensor(held, device=found.device).argsort()]
        self.needed = plan.possible()[..., None].expand(-1, -1, -1, kv_heads)
        if horizon is not None:
            seen = torch.ones(*self.needed.shape[:3], log_f.shape[2], dtype=torch.bool, device=log_f.device)
            for a in range(chunks):
                for b in range(a):
                    seen[:, a, b] = ~(self.between(b, a) <= -horizon)  # NaN is to be seen
            self.needed = self.needed & seen.unflatten(-1, (kv_heads, -1)).any(-1).cpu()
        self._count(mesh)

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
