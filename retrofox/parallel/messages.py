"""The ring's messages: keys, values and gates to the processes that need them, gradients back to their owners."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from retrofox.parallel.mesh import Mesh
from retrofox.parallel.plan import Item, RingPlan


@dataclass
class Keys:
    """Keys of one item: k, v (tokens, heads, D) and log_f (tokens, heads, G) of the kv heads that were sent."""

    item: Item
    k: torch.Tensor
    v: torch.Tensor
    log_f: torch.Tensor


class Exchange:
    """Sends and receives under way; `wait` gives what came."""

    def __init__(self, work: list[dist.Work], kept: list[torch.Tensor], got: list[torch.Tensor]):
        self.work, self.kept, self.got = work, kept, got  # what is sent lives until it has gone

    def wait(self) -> list[torch.Tensor]:
        for each in self.work:
            each.wait()
        return self.got


def swap(
    mesh: Mesh, kind: str, to: int, given: list[torch.Tensor], source: int, like: list[tuple[int, torch.dtype]]
) -> Exchange:
    """Sends flat tensors to one place on the ring and receives others from another, without waiting.

    Args:
        like: (elements, dtype) of each tensor that comes.
    """
    device = given[0].device
    given = [x.contiguous() for x in given]
    got = [torch.empty(count, dtype=dtype, device=device) for count, dtype in like]
    sends = [dist.P2POp(dist.isend, x, mesh.on_ring(to), mesh.ring_group) for x in given if x.numel()]
    receives = [dist.P2POp(dist.irecv, x, mesh.on_ring(source), mesh.ring_group) for x in got if x.numel()]
    for x in given:
        mesh.traffic.add(kind, x)
    ops = sends + receives
    return Exchange(dist.batch_isend_irecv(ops) if ops else [], given, got)


class KeyRing:
    """Fetches the keys of other places, hop after hop: at hop h from h places back, while another hop is computed."""

    def __init__(
        self, mesh: Mesh, plan: RingPlan, needed: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_f: torch.Tensor
    ):
        self.mesh, self.plan, self.needed = mesh, plan, needed
        self.k, self.v, self.log_f = k, v, log_f.unflatten(2, (k.shape[2], -1))

    def sent(self, hop: int) -> list[Item]:
        """What this process sends at a hop."""
        ring, mine = self.mesh.degrees.ring, self.mesh.ring_rank
        return self.plan.items(mine, (mine + hop) % ring, self.needed)

    def received(self, hop: int) -> list[Item]:
        """What it receives."""
        ring, mine = self.mesh.degrees.ring, self.mesh.ring_rank
        return self.plan.items((mine - hop) % ring, mine, self.needed)

    def start(self, hop: int) -> Exchange:
        """Begins a hop."""
        keys, gates = [self.k.new_empty(0)], [self.log_f.new_empty(0)]
        for item in self.sent(hop):
            where, heads = self.where(item), list(item.heads)
            keys += [self.k[item.row, where][:, heads].flatten(), self.v[item.row, where][:, heads].flatten()]
            gates.append(self.log_f[item.row, where][:, heads].flatten())
        width, groups = self.k.shape[-1], self.log_f.shape[-1]
        tokens = sum((item.high - item.low) * len(item.heads) for item in self.received(hop))
        sizes = [(2 * tokens * width, self.k.dtype), (tokens * groups, self.log_f.dtype)]
        mine = self.mesh.ring_rank
        return swap(self.mesh, "keys", mine + hop, [torch.cat(keys), torch.cat(gates)], mine - hop, sizes)

    def finish(self, hop: int, under_way: Exchange) -> list[Keys]:
        """What a hop brought."""
        keys, gates = under_way.wait()
        found, at, gate_at = [], 0, 0
        width, groups = self.k.shape[-1], self.log_f.shape[-1]
        for item in self.received(hop):
            tokens, heads = item.high - item.low, len(item.heads)
            size, gate_size = tokens * heads * width, tokens * heads * groups
            k, v = keys[at : at + 2 * size].view(2, tokens, heads, width)
            log_f = gates[gate_at : gate_at + gate_size].view(tokens, heads, groups)
            found.append(Keys(item, k, v, log_f))
            at, gate_at = at + 2 * size, gate_at + gate_size
        return found

    def where(self, item: Item) -> slice:
        """Where the tokens of an item that this process owns are among its own."""
        slot = self.mesh.degrees.chunks_of(self.mesh.ring_rank).index(item.chunk)
        first = slot * self.plan.chunk - item.chunk * self.plan.chunk
        return slice(item.low + first, item.high + first)
