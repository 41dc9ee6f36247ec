"""Tokens for heads: before attention each process gives away tokens and gets heads, after it the other way round.

    (B, t, heads) on each of U processes  <->  (B, U t, heads / U)

Query heads go with the key/value head that they share. These are dealt in turn, as neighbours often look alike far.
Source: Jacobs et al., "DeepSpeed Ulysses" (arXiv 2309.14509).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from retrofox.parallel.mesh import Mesh


class _Trade(torch.autograd.Function):
    """x (U, ...) by receiver -> (U, ...) by sender; its gradient goes the same way back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
        ctx.mesh = mesh
        return _exchanged(x, mesh)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return _exchanged(grad, ctx.mesh), None


def _exchanged(x: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    x = x.contiguous()
    result = torch.empty_like(x)
    dist.all_to_all_single(result, x, group=mesh.ulysses_group)
    return result


def heads_for_tokens(mesh: Mesh, kv_heads: int, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Tensors (B, t, heads_n, D) of one dtype and D -> (B, U t, heads_n / U, D) each, in one exchange."""
    u = mesh.degrees.ulysses
    if u == 1:
        return list(tensors)
    dealt = [x.unflatten(2, (kv_heads // u, u, -1)).transpose(2, 3).flatten(3, 4) for x in tensors]
    parts = torch.cat(dealt, 3)  # (B, t, U, heads, D)
    got = _Trade.apply(parts.permute(2, 0, 1, 3, 4), mesh)  # (U, B, t, heads, D), by sender
    rows = got.transpose(0, 1).flatten(1, 2)
    return list(rows.split([x.shape[3] for x in dealt], 2))


def tokens_for_heads(mesh: Mesh, kv_heads: int, x: torch.Tensor) -> torch.Tensor:
    """(B, U t, heads / U, D) -> (B, t, heads, D)."""
    u = mesh.degrees.ulysses
    if u == 1:
        return x
    got = _Trade.apply(x.unflatten(1, (u, -1)).transpose(0, 1), mesh)  # (U, B, t, heads / U, D), by sender
    return got.permute(1, 2, 0, 3, 4).unflatten(3, (kv_heads // u, -1)).transpose(2, 3).flatten(2, 4)
