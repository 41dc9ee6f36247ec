"""Per-token loss L(i): the loss of each document position, and its average over documents.

The slope of L(i), not one perplexity, tells whether a model uses its context (Lin et al., "Forgetting Transformer",
ICLR 2025, section 4): a model that does keeps falling; one that breaks beyond its trained length turns upwards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from retrofox.anatomy import (
    require_known_tokens,
    token_losses,
)
from retrofox.data.windows import Window
from retrofox.evaluation.bootstrap import Bootstrap, trend
from retrofox.evaluation.token_scores import require_finite
from retrofox.loading.rope_scaling import depends_on_length
from retrofox.support.memory import out_of_memory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STANDARD_EDGES = (0, 512, 2048, 4096, 8192, 16384, 24576, 32768)
SCALE_BELOW = 4096


def window_losses(
    model: PreTrainedModel,
    windows: Sequence[Window],
    batch: int = 1,
    advance: Callable[[int], Any] | None = None,
    losses_of: Callable[[Any, torch.Tensor], torch.Tensor] = token_losses,
) -> list[np.ndarray]:
    """L(i) of every window, in the order given; each (T_w - 1,) float32.

    Windows of like length share a batch and are padded at the end, out of sight of every real token.

    Args:
        advance: called after each batch with the number of tokens done.
        losses_of: losses_of(model, token_ids (B, T)) -> (B, T - 1).

    Raises:
        ValueError: the device ran out of memory, or a token id lies outside the model's vocabulary.
    """
    device = next(model.parameters()).device
    require_known_tokens(model, max(int(w.token_ids.max()) for w in windows))
    order = sorted(range(len(windows)), key=lambda w: -len(windows[w].token_ids))
    result: list[np.ndarray] = [np.empty(0, np.float32)] * len(windows)
    same_length = depends_on_length(model.config)
    start = 0
    while start < len(order):
        members = order[start : start + batch]
        if same_length:  # padding would move the frequencies of a dynamic RoPE
            members = [w for w in members if len(windows[w].token_ids) == len(windows[members[0]].token_ids)]
        start += len(members)
        longest = len(windows[members[0]].token_ids)
        ids = np.zeros((len(members), longest), np.int64)
        for row, w in enumerate(members):
            ids[row, : len(windows[w].token_ids)] = windows[w].token_ids
        try:
            losses = losses_of(model, torch.from_numpy(ids).to(device)).cpu().numpy()
        except torch.cuda.OutOfMemoryError as error:
            raise out_of_memory(f"batch {len(members)} x {longest} tokens") from error
        for row, w in enumerate(members):
            result[w] = losses[row, : len(windows[w].token_ids) - 1].copy()
            require_finite(model, result[w], np.arange(1, len(result[w]) + 1), windows[w].name or "a document")
        if advance is not None:
            advance(sum(len(windows[w].token_ids) for w in members))
    return result


def mean_losses(
    losses: Mapping[str, Sequence[np.ndarray]], windows: Sequence[Window]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """(windows behind each position 1 .. T - 1, by line the mean L(i) at each of them)."""
    longest = max(len(window.token_ids) for window in windows)
    count = np.zeros(longest - 1, np.int64)
    sums = {key: np.zeros(longest - 1) for key in losses}
    for w, window in enumerate(windows):
        count[: len(window.token_ids) - 1] += 1
        for key in losses:
            sums[key][: len(losses[key][w])] += losses[key][w]
    return count, {key: values / count for key, values in sums.items()}


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
    """Sums of losses per document over position bins, from which means and standard errors over documents follow.

    With S_d the summed loss and n_d the tokens of document d in a bin, the mean is m = sum S_d / sum n_d and its
    standard error sqrt(D / (D - 1) * sum_d (S_d - m n_d)^2) / sum n_d: documents, not tokens, are the sample.
    """

    def __init__(self, losses: Sequence[np.ndarray], windows: Sequence[Window], edges: Sequence[int]):
        documents = sorted({w.document for w in windows})
        row = {d: r for r, d in enumerate(documents)}
        self.sums = np.zeros((len(documents), len(edges) - 1))
        self.counts = np.zeros_like(self.sums)
        for window, loss in zip(windows, losses, strict=True):
            cumulative = np.concatenate([[0.0], np.cumsum(loss, dtype=np.float64)])
            at = np.clip(np.asarray(edges) - 1, 0, len(loss))  # loss[i - 1] belongs to position i
            self.sums[row[window.document]] += np.diff(cumulative[at])
            self.counts[row[window.document]] += np.diff(at)

    def smoothed(self, edges: Sequence[int], octaves: float = 0.5) -> PositionSums:
        """Every bin widened to all bins whose centre is within octaves / 2 of its own: a moving log-spaced window."""
        centre = np.log2(np.sqrt(np.asarray(edges[:-1]) * np.maximum(np.asarray(edges[1:]) - 1, 1)))
        near = (np.abs(centre[:, None] - centre[None]) <= octaves / 2).astype(np.float64)
        wide = object.__new__(PositionSums)
        wide.sums, wide.counts = self.sums @ near, self.counts @ near
        return wide

    def statistics(self, base: PositionSums | None = None) -> list[dict[str, float | int | None]]:
        """Per bin: mean, standard_error, tokens, documents; of the paired difference to `base` if that is given."""
        sums = self.sums if base is None else self.sums - base.sums
        return [_ratio(sums[:, b], self.counts[:, b]) for b in range(sums.shape[1])]

    def total(self, base: PositionSums | None = None) -> dict[str, float | int | None]:
        """The same over all bins together."""
        sums = self.sums if base is None else self.sums - base.sums
        return _ratio(sums.sum(1), self.counts.sum(1))


def _ratio(sums: np.ndarray, counts: np.ndarray) -> dict[str, float | int | None]:
    there = counts > 0
    tokens, documents = int(counts.sum()), int(there.sum())
    if not tokens:
        return {"mean": None, "standard_error": None, "tokens": 0, "documents": 0}
    mean = float(sums.sum() / tokens)
    error = None
    if documents > 1:
        spread = float(((sums - mean * counts)[there] ** 2).sum())
        error = math.sqrt(documents / (documents - 1) * spread) / tokens
    return {"mean": mean, "standard_error": error, "tokens": tokens, "documents": documents}


def slope(
    losses: Sequence[np.ndarray],
    windows: Sequence[Window],
    start: int,
    stop: int,
    scale: Callable[[np.ndarray], np.ndarray],
) -> dict[str, Any]:
    """Slope of L(i) over positions start <= i < stop against scale(i), within windows, with its error over documents.

    b = sum_w sum_i (x_i - x_w) L(i) / sum_w sum_i (x_i - x_w)^2, x = scale(i), x_w the window's mean: an easier
    document among the long ones does not tilt it. The error is the cluster-robust one, documents being the clusters.

    Returns:
        {"slope", "standard_error", "interval" (95 %, bootstrapped over documents), "trend": "falling" or "rising" where
        the interval leaves out 0, else "flat"}; None for what one document can't tell.
    """
    covariance: dict[int, float] = {}
    variance: dict[int, float] = {}
    for window, loss in zip(windows, losses, strict=True):
        position = np.arange(max(start, 1), min(stop, len(loss) + 1))
        if len(position) < 2:
            continue
        x = scale(position.astype(np.float64))
        x = x - x.mean()
        y = loss[position[0] - 1 : position[-1]].astype(np.float64)
        covariance[window.document] = covariance.get(window.document, 0.0) + float(x @ (y - y.mean()))
        variance[window.document] = variance.get(window.document, 0.0) + float(x @ x)
    total = sum(variance.values())
    if not total:
        return {"slope": None, "standard_error": None, "interval": None, "trend": None}
    value = sum(covariance.values()) / total
    error = None
    if len(variance) > 1:
        residual = sum((covariance[d] - value * variance[d]) ** 2 for d in variance)
        error = math.sqrt(len(variance) / (len(variance) - 1) * residual) / total
    by_document = np.array([[covariance[d], variance[d]] for d in variance])
    interval: Any = Bootstrap(len(variance)).ratio(by_document[:, 0], by_document[:, 1])["interval"]
    return {"slope": value, "standard_error": error, "interval": interval, "trend": trend(interval)}
