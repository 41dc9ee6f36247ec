"""Per-token loss L(i): the loss of each document position, and its average over documents.

L(i), not one perplexity, tells whether a model uses its context (Lin et al., "Forgetting Transformer",
ICLR 2025, section 4): a model that does keeps falling; one that breaks beyond its trained length turns upwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from retrofox.evaluation.statistics import mean_over_documents

STANDARD_EDGES = (0, 512, 2048, 4096, 8192, 16384, 24576, 32768)
SCALE_BELOW = 4096


def bucket_edges(length: int, reach: int | None = None) -> list[int]:
    """Edges of the position buckets: 0, 512, 2k, 4k, 8k, 16k, 24k, 32k, 48k, 64k, 96k ... up to `length`.

    Under 4096 tokens the same structure scaled: length x (0, 1/64, 1/16, 1/8, 1/4, 1/2, 3/4, 1). They end at `reach`
    where no document has more tokens than that. Position 0 has no loss, so no bucket ends at 1.
    """
    if length < SCALE_BELOW:
        edges = [length * e // STANDARD_EDGES[-1] for e in STANDARD_EDGES]
    else:
        edges = list(STANDARD_EDGES)
        while edges[-1] < length:
            edges += [edges[-1] * 3 // 2, edges[-1] * 2]
    end = length if reach is None else min(length, reach)
    return sorted({e for e in edges if e != 1 and e < end} | {end})


def curve_edges(length: int, per_octave: int = 12) -> list[int]:
    """Edges of log-spaced position bins from 1 to `length`, each at least one token wide."""
    count = math.ceil(per_octave * math.log2(max(2, length)))
    edges = np.unique(np.round(np.geomspace(1, max(2, length), count + 1)).astype(int))
    return [int(e) for e in edges]


class PositionSums:
    """Sums of losses per document over position bins, from which means and errors over documents follow."""

    def __init__(self, losses: Sequence[np.ndarray], edges: Sequence[int]):
        self.sums = np.zeros((len(losses), len(edges) - 1))
        self.counts = np.zeros_like(self.sums)
        for document, loss in enumerate(losses):
            cumulative = np.concatenate([[0.0], np.cumsum(loss, dtype=np.float64)])
            at = np.clip(np.asarray(edges) - 1, 0, len(loss))  # loss[i - 1] belongs to position i
            self.sums[document] = np.diff(cumulative[at])
            self.counts[document] = np.diff(at)

    def smoothed(self, edges: Sequence[int], octaves: float = 0.5) -> PositionSums:
        """Every bin widened to all bins whose centre is within octaves / 2 of its own: a moving log-spaced window."""
        centre = np.log2(np.sqrt(np.asarray(edges[:-1]) * np.maximum(np.asarray(edges[1:]) - 1, 1)))
        near = (np.abs(centre[:, None] - centre[None]) <= octaves / 2).astype(np.float64)
        wide = object.__new__(PositionSums)
        wide.sums, wide.counts = self.sums @ near, self.counts @ near
        return wide

    def statistics(self, base: PositionSums | None = None) -> list[dict[str, Any]]:
        """Per bin `mean_over_documents` of the loss, or of its paired difference to `base`."""
        sums = self.sums if base is None else self.sums - base.sums
        return [mean_over_documents(*column) for column in zip(sums.T, self.counts.T, strict=True)]
