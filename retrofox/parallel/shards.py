"""A batch cut into the parts of a context group's processes, and how attention finds the rest."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from retrofox.parallel.layout import Degrees
from retrofox.parallel.mesh import Mesh
from retrofox.parallel.ulysses import heads_for_tokens, tokens_for_heads
from retrofox.parallel.zigzag import zigzag_attention

BY_TOKEN = ("input_ids", "position_ids", "targets")
"""Entries of a batch with a row for every token, (B, T)."""


@dataclass
class WholeRows:
    """Shape, documents and targets of a cut batch's whole rows, on the CPU.

    Attributes:
        batch, length: of the whole rows.
        cu_seqlens: (N + 1,) int32 document starts over the flattened batch * length tokens; None: one a row.
        row_targets: (batch,) int64, targets of each whole row.
    """

    batch: int
    length: int
    cu_seqlens: torch.Tensor | None
    row_targets: torch.Tensor

    def documents(self, row: int) -> list[int]:
        """Where the documents of a row begin and, last, its length."""
        if self.cu_seqlens is None:
            return [0, self.length]
        first = row * self.length
        inside = [int(x) - first for x in self.cu_seqlens if first <= int(x) <= first + self.length]
        return sorted({0, self.length, *inside})


def cut(batch: dict[str, Any], split: Degrees, process: int) -> dict[str, Any]:
    """A process's part of a batch of whole rows: input_ids, position_ids, targets (B, t), num_targets, rows.

    Args:
        batch: input_ids, position_ids and targets (B, T), and cu_seqlens where rows hold several documents. Positions
            count from each document's start and stay as they are.
    """
    rows, length = batch["input_ids"].shape
    check_length(length, split)
    keep = torch.cat([torch.arange(*segment) for segment in split.segments(process, length)])
    part: dict[str, Any] = {key: batch[key][:, keep] for key in BY_TOKEN if key in batch}
    part["num_targets"] = int((part["targets"] >= 0).sum())
    part["rows"] = WholeRows(rows, length, batch.get("cu_seqlens"), (batch["targets"] >= 0).sum(1))
    return part


def check_length(length: int, split: Degrees) -> None:
    """Raises ValueError for rows that don't divide among a context group."""
    if length % split.unit:
        below = max(1, length // split.unit) * split.unit
        parts = f"{split.context} processes" + (" in a zigzag, two pieces each" if split.zigzag > 1 else "")
        raise ValueError(
            f"rows of {length} tokens don't divide among {parts}: give a multiple of {split.unit}, such as {below} or "
            f"{below + split.unit}"
        )


class Shards:
    """Attention and shifts over cut rows, for `FoxModelMixin.forward(shards=...)`."""

    def __init__(self, mesh: Mesh, rows: WholeRows, device: torch.device):
        self.mesh, self.rows = mesh, rows
        self.cu_seqlens = None if rows.cu_seqlens is None else rows.cu_seqlens.to(device, non_blocking=True)
        self.row_targets = rows.row_targets.to(device, non_blocking=True)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        log_f: torch.Tensor,
        options: dict[str, Any],
        locally: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        """Forgetting Attention over whole rows, of which each process gives its part and gets its part.

        Args:
            query: (B, H, t, D); key: (B, Hkv, t, D); value: (B, Hkv, t, DV), DV <= D; log_f: (B, t, H) float32.
            options: scale, window, sink, softcap and horizon, as `fox_kernels.forgetting_attention` takes them.
            locally: locally(query, key, value, log_f, cu_seqlens, options) attends on one device.

        Returns:
            (B, t, H, DV).
        """
        width = value.shape[-1]
        if width < query.shape[-1]:  # one exchange takes one width
            value = torch.nn.functional.pad(value, (0, query.shape[-1] - width))
        kv_heads = key.shape[1]
        q, k, v = heads_for_tokens(self.mesh, kv_heads, *(x.transpose(1, 2) for x in (query, key, value)))
        gates = heads_for_tokens(self.mesh, kv_heads, log_f[..., None])[0][..., 0]
        if self.mesh.degrees.zigzag == 1:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            out = locally(q, k, v, gates, self.cu_seqlens, options)
        else:
            documents = [self.rows.documents(row) for row in range(self.rows.batch)]
            out = zigzag_attention(self.mesh, documents, q, k, v, gates, options, locally)
        return tokens_for_heads(self.mesh, kv_heads, out)[..., :width]

    def shifted(
        self,
        shift: Callable[..., torch.Tensor],
        states: torch.Tensor,
        hidden_states: torch.Tensor,
        position_ids: torch.Tensor,
    ) -> torch.Tensor:
        """`modeling_fox.Shift` of states (B, t, Hkv, D) whose predecessors may lie in another process."""
        before = predecessors(self.mesh, states, self.rows.length)
        joined, at, parts = position_ids.expand(states.shape[0], -1) != 0, 0, []
        for number, (start, stop) in enumerate(self.mesh.degrees.segments(self.mesh.rank, self.rows.length)):
            part = slice(at, at + stop - start)
            at = part.stop
            parts.append(shift(states[:, part], before[:, number], joined[:, part], hidden_states[:, part]))
        return torch.cat(parts, 1)


def predecessors(mesh: Mesh, states: torch.Tensor, length: int) -> torch.Tensor:
    """The token before each stretch of a row that this process holds; zeros where there is none.

    Args:
        states: (B, t, ...), this process's tokens of rows of `length` tokens.

    Returns:
        (B, stretches, ...), with a gradient that reaches the process they came from.
    """
    everyone = [mesh.degrees.segments(process, length) for process in range(mesh.size)]
    mine, most = everyone[mesh.rank], max(map(len, everyone))
    ends = [end - 1 for end in itertools.accumulate(stop - start for start, stop in mine)]
    ends += ends[-1:] * (most - len(ends))  # all processes gather as many tokens
    found = mesh.gathered(states[:, ends])
    holder = {stop: (process, n) for process, segments in enumerate(everyone) for n, (_, stop) in enumerate(segments)}
    places = [holder.get(start, (0, 0)) for start, _ in mine]
    before = torch.stack([found[process, :, number] for process, number in places], 1)
    # A mask, not other zeros: every process takes part in the exchange of gradients.
    first = torch.tensor([start == 0 for start, _ in mine], device=states.device)
    return before.masked_fill(first.view(1, -1, *[1] * (states.dim() - 2)), 0.0)
