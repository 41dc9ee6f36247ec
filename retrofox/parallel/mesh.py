"""The process groups of context parallelism, and what is gathered over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from retrofox.parallel.layout import Degrees


@dataclass
class Mesh:
    """This process's place: in a context group (`rank`), among those that trade heads, and among those that gather.

    Attributes:
        group: all processes of the context group; ulysses_group, zigzag_group: those in one row and one column of it.
        readers, reader: how many context groups the run has, and which is this one: what data parallelism counts.
    """

    degrees: Degrees
    rank: int
    group: dist.ProcessGroup
    ulysses_group: dist.ProcessGroup | None
    zigzag_group: dist.ProcessGroup | None
    readers: int
    reader: int

    @property
    def size(self) -> int:
        """Processes in the context group."""
        return self.degrees.context

    @property
    def chunks(self) -> list[int]:
        """The chunks of a row that this process's heads attend from."""
        return self.degrees.chunks_of(self.rank // self.degrees.ulysses)

    def gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        """(processes, ...): everyone's tensor in the context group; its gradient goes back to where it came from."""
        return _Gather.apply(self.group, self.size, tensor)[0]

    def whole_rows(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Tensors (B, t, ...), the chunks of this process one after the other -> (B, T, ...), with a gradient."""
        degrees = self.degrees
        held = [chunk for place in range(degrees.zigzag) for chunk in degrees.chunks_of(place)]
        rows = []
        for found in _Gather.apply(self.zigzag_group, degrees.zigzag, *tensors):  # (zigzag, B, t, ...)
            chunks = found.unflatten(2, (2, -1)).transpose(1, 2).flatten(0, 1)
            rows.append(torch.cat([chunks[held.index(number)] for number in range(degrees.chunks)], 1))
        return rows

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the context group, without a gradient."""
        total = tensor.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total


class _Gather(torch.autograd.Function):
    """Tensors -> (processes, ...) each; all in one function, so that all processes exchange gradients in one order."""

    @staticmethod
    def forward(ctx: Any, group: Any, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        results = []
        for x in tensors:
            found = x.new_empty(count, *x.shape)
            # In a list: the form into one tensor has another name in each version of torch.
            dist.all_gather(list(found.unbind()), x.contiguous(), group=group)
            results.append(found)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        results: list[torch.Tensor | None] = [None, None]
        for grad, needed in zip(grads, ctx.needs_input_grad[2:], strict=True):
            if needed:
                shares = torch.empty_like(grad, memory_format=torch.contiguous_format)
                dist.all_to_all_single(shares, grad.contiguous(), group=ctx.group)
                results.append(shares.sum(0, dtype=torch.promote_types(grad.dtype, torch.float32)).to(grad.dtype))
            else:
                results.append(None)
        return tuple(results)


def build_mesh(split: Degrees) -> Mesh:
    """The mesh of this run: neighbouring processes make a context group. Every process must call it."""
    world, rank = dist.get_world_size(), dist.get_rank()
    assert world % split.context == 0, "planning.refusals.refused_on"

    def mine(groups: torch.Tensor) -> Any:
        """The group that holds this process, of (groups, members); all processes make all of them, in one order."""
        return dist.new_subgroups_by_enumeration(groups.tolist())[0] if groups.shape[1] > 1 else None

    ranks = torch.arange(world).view(-1, split.zigzag, split.ulysses)
    return Mesh(
        split,
        rank % split.context,
        mine(ranks.flatten(1)),
        ulysses_group=mine(ranks.flatten(0, 1)),
        zigzag_group=mine(ranks.mT.flatten(0, 1)),
        readers=len(ranks),
        reader=rank // split.context,
    )
