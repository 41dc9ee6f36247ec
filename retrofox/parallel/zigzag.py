"""Forgetting Attention of rows that are cut zigzag: a process has two chunks of queries, and gathers the row's keys.

Each chunk's queries and the keys before them go through the operator of one device, so sums of log f, sinks, windows
and horizons need nothing else. Keys, values and gates of whole rows exist for one layer at a time, of the heads that
this process has after the trade of heads: small beside what the layer computes. Source: Llama Team, "The Llama 3 Herd
of Models" (arXiv 2407.21783, section 3.3.2).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from retrofox.parallel.mesh import Mesh


@dataclass
class Piece:
    """Queries [first, last) of a row that attend by one call; their keys begin at first_key.

    Attributes:
        bounds: where documents begin among keys of several, and their end, all counted from first_key; else None.
    """

    first: int
    last: int
    first_key: int
    bounds: list[int] | None


def pieces(documents: list[int], first: int, last: int) -> list[Piece]:
    """The queries [first, last): those of the document that began before, and those of the documents that begin here.

    Args:
        documents: where a row's documents begin and, last, its length.
    """
    inside = [start for start in documents if first <= start < last]
    begin = inside[0] if inside else last
    found = []
    if begin > first:
        found.append(Piece(first, begin, documents[bisect.bisect_right(documents, first) - 1], None))
    if inside:
        bounds = [start - begin for start in (*inside, last)]
        found.append(Piece(begin, last, begin, bounds if len(inside) > 1 else None))
    return found


def zigzag_attention(
    mesh: Mesh,
    documents: list[list[int]],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_f: torch.Tensor,
    options: dict[str, Any],
    locally: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Attention over whole rows, this process giving and getting two chunks of each.

    Args:
        documents: of each row, see `pieces`.
        q: (B, t, H, D); k, v: (B, t, Hkv, D); log_f: (B, t, H) float32, the chunks one after the other.
        options, locally: as in `Shards.attend`.

    Returns:
        (B, t, H, D) in q's dtype.
    """
    keys, values, gates = mesh.whole_rows(k, v, log_f)
    size, rows = q.shape[1] // 2, []
    for row, starts in enumerate(documents):
        outputs = []
        for slot, chunk in enumerate(mesh.chunks):
            for piece in pieces(starts, chunk * size, (chunk + 1) * size):
                own, low = slice(piece.first - chunk * size, piece.last - chunk * size), piece.first_key
                if options["window"] is not None and not options["sink"]:
                    low = max(low, piece.first - options["window"] + 1)
                query = q[row : row + 1, slot * size : (slot + 1) * size][:, own]
                seen = [x[row : row + 1, low : piece.last] for x in (keys, values, gates)]
                given = (x.transpose(1, 2) for x in (query, *seen[:2]))
                cu_seqlens = None
                if piece.bounds is not None:
                    cu_seqlens = torch.tensor(piece.bounds, dtype=torch.int32).to(q.device, non_blocking=True)
                outputs.append(locally(*given, seen[2], cu_seqlens, options))
        rows.append(torch.cat(outputs, 1))
    return torch.cat(rows)
