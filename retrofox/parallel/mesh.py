"""The process groups of context parallelism, and what has been sent through them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from retrofox.parallel.layout import Degrees


@dataclass
class Traffic:
    """What attention sent from this process since `reset`.

    Attributes:
        bytes: by kind: "heads" (tokens for heads), "keys" (the ring's keys, values and gates), "gradients" (the way
            back), "summaries" (the gates' sums, sinks, shifts).
        hops, hops_saved: (row, chunk of keys, chunk of queries, kv head) for which keys had to move, and for which
            documents, windows or a horizon showed that none had to.
    """

    bytes: dict[str, int] = field(default_factory=dict)
    hops: int = 0
    hops_saved: int = 0

    def add(self, kind: str, tensor: torch.Tensor, share: float = 1.0) -> None:
        """Counts a tensor, of which `share` goes to other processes."""
        self.bytes[kind] = self.bytes.get(kind, 0) + int(tensor.numel() * tensor.element_size() * share)

    def reset(self) -> None:
        self.bytes, self.hops, self.hops_saved = {}, 0, 0


@dataclass
class Mesh:
    """This process's place: in a context group (`rank`), among those that trade heads, and on the ring.

    Attributes:
        group: all processes of the context group; ulysses_group, ring_group: those in one row and in one column of it.
        readers, reader: how many context groups the run has, and which is this one: what data parallelism counts.
    """

    degrees: Degrees
    rank: int
    group: dist.ProcessGroup
    ulysses_group: dist.ProcessGroup | None
    ring_group: dist.ProcessGroup | None
    readers: int
    reader: int
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def size(self) -> int:
        """Processes in the context group."""
        return self.degrees.context

    @property
    def ring_rank(self) -> int:
        """Place on the ring."""
        return self.rank // self.degrees.ulysses

    def on_ring(self, place: int) -> int:
        """The global rank of a place on this process's ring."""
        return (
            self.reader * self.size
            + (place % self.degrees.ring) * self.degrees.ulysses
            + (self.rank % self.degrees.ulysses)
        )

    def gathered(self, tensor: torch.Tensor, ring_only: bool = False) -> torch.Tensor:
        """(processes, ...): everyone's tensor, of the context group or of the ring; without a gradient."""
        count = self.degrees.ring if ring_only else self.size
        found = torch.empty(count, *tensor.shape, dtype=tensor.dtype, device=tensor.device)
        # In a list: the form into one tensor has another name in each version of torch.
        dist.all_gather(list(found.unbind()), tensor.contiguous(), group=self.ring_group if ring_only else self.group)
        self.traffic.add("summaries", tensor, share=count - 1)
        return found

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the context group, without a gradient."""
        total = tensor.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total


def build_mesh(split: Degrees) -> Mesh:
    """The mesh of this run: neighbouring processes make a context group. Every process must call it."""
    world, rank = dist.get_world_size(), dist.get_rank()
    assert world % split.context == 0, "settings.refuse_processes"

    def mine(groups: list[list[int]]) -> Any:
        """The group that holds this process; all processes make all of them, in one order."""
        found = None
        for members in groups:
            made = dist.new_group(members) if len(members) > 1 else None
            if rank in members:
                found = made
        return found

    firsts = range(0, world, split.context)
    u, r = split.ulysses, split.ring
    group = mine([list(range(first, first + split.context)) for first in firsts])
    assert group is not None, "a context group has at least two processes"
    ulysses_group = mine([[first + place * u + i for i in range(u)] for first in firsts for place in range(r)])
    ring_group = mine([[first + place * u + i for place in range(r)] for first in firsts for i in range(u)])
    return Mesh(
        split,
        rank % split.context,
        group,
        ulysses_group,
        ring_group,
        readers=world // split.context,
        reader=rank // split.context,
    )
