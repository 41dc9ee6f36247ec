"""The token before a process's first one: what key and value shift need from a neighbour."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from retrofox.parallel.mesh import Mesh


def segments_of_all(mesh: Mesh, length: int) -> list[list[tuple[int, int]]]:
    """The stretches of a row that each process of the context group holds."""
    return [mesh.degrees.segments(process, length) for process in range(mesh.size)]


def predecessors(mesh: Mesh, states: torch.Tensor, length: int) -> torch.Tensor:
    """The token before each stretch of a row that this process holds; zeros where there is none.

    Args:
        states: (B, t, ...), this process's tokens of rows of `length` tokens.

    Returns:
        (B, stretches, ...), with a gradient that reaches the process they came from.
    """
    return _Predecessors.apply(states, mesh, length)


class _Predecessors(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, mesh: Mesh, length: int) -> torch.Tensor:
        ctx.mesh, ctx.length, ctx.shape = mesh, length, states.shape
        everyone = segments_of_all(mesh, length)
        most = max(map(len, everyone))
        last = states.new_zeros(states.shape[0], most, *states.shape[2:])
        for number, at in enumerate(_ends(everyone[mesh.rank])):
            last[:, number] = states[:, at - 1]
        found = mesh.gathered(last)
        wanted = [_holder(everyone, start) for start, _ in everyone[mesh.rank]]
        parts = [torch.zeros_like(last[:, 0]) if at is None else found[at[0], :, at[1]] for at in wanted]
        return torch.stack(parts, 1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        mesh: Mesh = ctx.mesh
        everyone = segments_of_all(mesh, ctx.length)
        most = max(map(len, everyone))
        sent = grad.new_zeros(mesh.size, grad.shape[0], most, *grad.shape[2:], dtype=torch.float32)
        for number, (start, _) in enumerate(everyone[mesh.rank]):
            at = _holder(everyone, start)
            if at is not None:
                sent[at[0], :, at[1]] += grad[:, number].float()
        dist.all_reduce(sent, group=mesh.group)  # a token or two of each process
        mesh.traffic.add("summaries", sent)
        d_states = grad.new_zeros(ctx.shape)
        for number, at in enumerate(_ends(everyone[mesh.rank])):
            d_states[:, at - 1] = sent[mesh.rank, :, number].to(grad.dtype)
        return d_states, None, None


def _ends(segments: list[tuple[int, int]]) -> list[int]:
    """Where each stretch ends among the process's own tokens."""
    ends, total = [], 0
    for start, stop in segments:
        total += stop - start
        ends.append(total)
    return ends


def _holder(everyone: list[list[tuple[int, int]]], start: int) -> tuple[int, int] | None:
    """(process, stretch) that ends where a stretch begins."""
    for process, segments in enumerate(everyone):
        for number, (_, stop) in enumerate(segments):
            if stop == start:
                return process, number
    return None
