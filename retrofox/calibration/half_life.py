"""Half-lives from where the original looks: attention mass by distance per head, and the decay that fits it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from retrofox.anatomy import is_converted
from retrofox.calibration.capture import Operands, enter, run_original
from retrofox.calibration.source import LayerSource
from retrofox.calibration.student import hidden_keys, scores
from retrofox.fox_spec import FoxSpec
from retrofox.support.files import write_result
from retrofox.support.plots import half_life_figure, save_csv, save_figure
from retrofox.surgery import apply, make_plan

BLOCK = 64
"""Consecutive queries whose attention exists at one time: (H, 64, keys) float32."""
BINS_PER_OCTAVE = 4
LONGEST = 8
"""Half-lives are capped at this many windows: a longer one can't be told from no decay at all."""
COLUMNS = ("layer", "head", "half_life_tokens", "fit_r2", "sink_mass", "median_distance_tokens", "mean_distance_tokens")


@torch.no_grad()
def calibrate_half_lives(
    model: PreTrainedModel | LayerSource,
    windows: torch.Tensor,
    sink_tokens: int,
    *,
    queries: int = 1024,
    advance: Callable[[int], Any] | None = None,
) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """Half-life of every head, fitted to how the original's attention falls off with distance.

    The original's attention a_ij over keys j >= sink_tokens, averaged over queries i of the second half of each
    window, gives a density rho(d) = mean_i a_i,i-d. With d in log-spaced bins, half-life ln 2 / lambda minimises
    sum_bins (ln rho(bin) - alpha - ln mean_{d in bin} e^(-lambda d))^2 over alpha and lambda >= 0: exact where
    attention decays exponentially. Gate bias -ln(expm1(ln 2 / half_life)) and weight 0 make the gate decay so.

    Runs layer by layer, a block of queries at a time, so no T x T matrix ever exists.

    Args:
        model: a live converted model (it is run in mode "original") or an unconverted one of a supported family.
        windows: (N, T) int64 tokens, T the full context the model was trained to; each row is one document.
        sink_tokens: first tokens of a window left out.
        queries: queries measured per window and layer, evenly spread over its second half.
        advance: called after each layer with 1.

    Returns:
        (layers, heads) float64 half-lives in tokens, at most 8 T; and the per-head table, one dict per head with the
        keys of COLUMNS.

    Raises:
        ValueError: windows too short to tell a decay, or an unsupported family.

    Source: calibrated initialisation of linear-attention decays (Taylor-Calibrate, arXiv 2606.16429); here with the
    first tokens, the attention sink, left out.
    """
    if windows.dim() != 2 or windows.shape[1] < sink_tokens + 16:
        raise ValueError(
            f"windows must be (N, T) with T at least {sink_tokens + 16} tokens, got {tuple(windows.shape)}"
        )
    if isinstance(model, LayerSource):
        source = model
    else:
        fox = model if is_converted(model) else apply(model, make_plan(model.config, FoxSpec()))
        source = LayerSource(fox, fox.dtype, None)
    hidden, calls = enter(source.model, windows)
    half_lives, table = [], []
    for number in range(len(calls)):
        with source.layer(number) as layer:
            hidden, captured = run_original(layer, hidden, calls[number])
        measured = MassByDistance(sink_tokens)
        for operands, _ in captured:
            measured.add(operands, queries)
        fitted = [measured.fit(head) for head in range(len(measured.mass))]
        half_lives.append([f[0] for f in fitted])
        table += [
            dict(zip(COLUMNS, (number, head, *fit, *measured.summary(head)), strict=True))
            for head, fit in enumerate(fitted)
        ]
        if advance is not None:
            advance(1)
    return torch.tensor(half_lives, dtype=torch.float64), table


class MassByDistance:
    """Attention mass of one layer's heads by distance i - j, sinks apart, summed over queries.

    Attributes:
        mass: (H, T) float64; count: (T,) queries that have a key at that distance; sink: (H,) mass on sink tokens.
    """

    def __init__(self, sink_tokens: int):
        self.sink_tokens = sink_tokens
        self.mass = self.count = self.sink = np.empty(0)
        self.queries = 0

    def add(self, operands: Operands, queries: int) -> None:
        """Adds about `queries` queries from the second half of a window."""
        heads, length, _ = operands.query.shape
        if not self.mass.size:
            self.mass, self.count, self.sink = np.zeros((heads, length)), np.zeros(length), np.zeros(heads)
        first = max(length // 2, self.sink_tokens + 1)
        number = min(max(1, queries // BLOCK), math.ceil((length - first) / BLOCK))
        for start in np.linspace(first, max(first, length - BLOCK), number).astype(int).tolist():
            self._add_block(operands, start, min(start + BLOCK, length))

    def _add_block(self, operands: Operands, start: int, stop: int) -> None:
        logits = scores(operands.query[:, start:stop], operands.key, operands, start)
        hidden = hidden_keys(start, stop, operands.window, logits.device)
        weights = logits.masked_fill_(hidden, -math.inf).softmax(-1)
        self.sink += weights[..., : self.sink_tokens].sum((1, 2), dtype=torch.float64).cpu().numpy()
        reach = operands.window or stop
        for row, query in enumerate(range(start, stop)):
            keys = weights[:, row, self.sink_tokens : query + 1].flip(-1).double().cpu().numpy()
            self.mass[:, : keys.shape[1]] += keys
            self.count[: min(keys.shape[1], reach)] += 1
        self.queries += stop - start

    def fit(self, head: int) -> tuple[float, float]:
        """(half-life in tokens, share of the variance of ln rho over the bins that it explains)."""
        edges = np.unique(np.round(np.geomspace(1, len(self.count) + 1, self._bins()))).astype(int) - 1
        inside = [slice(a, b) for a, b in pairwise(edges) if self.mass[head, a:b].sum() > 0]
        count = np.array([self.count[part].sum() for part in inside])
        target = np.log([self.mass[head, part].sum() for part in inside]) - np.log(count)

        def residual(decay: float) -> np.ndarray:
            """ln rho - alpha - ln of the bin's mean decay, each bin's first distance taken out against underflow."""
            model = [
                -decay * part.start
                + math.log((self.count[part] * np.exp(-decay * np.arange(part.stop - part.start))).sum() / n)
                for part, n in zip(inside, count, strict=True)
            ]
            difference = target - np.array(model)
            return difference - difference.mean()

        longest = float(LONGEST * len(self.count))
        half_life = _minimise(lambda h: float((residual(math.log(2) / h) ** 2).sum()), 0.25, longest)
        spread = float(((target - target.mean()) ** 2).sum())
        left = float((residual(math.log(2) / half_life) ** 2).sum())
        return half_life, round(1 - left / spread, 4) if spread > 0 else 0.0

    def summary(self, head: int) -> tuple[float, float, float]:
        """(mass on sinks per query, median and mean distance in tokens of the rest)."""
        mass = self.mass[head]
        total = max(float(mass.sum()), 1e-300)
        median = int(np.searchsorted(np.cumsum(mass), total / 2))
        mean = float(mass @ np.arange(len(mass))) / total
        return round(float(self.sink[head]) / self.queries, 4), median, round(mean, 2)

    def _bins(self) -> int:
        return max(4, math.ceil(BINS_PER_OCTAVE * math.log2(len(self.count))))


def _minimise(loss: Callable[[float], float], low: float, high: float) -> float:
    """The least value of a function of a positive number: a log-spaced grid, then golden sections about its best."""
    grid = np.geomspace(low, high, 97)
    best = int(np.argmin([loss(float(x)) for x in grid]))
    a, b = (math.log(grid[min(max(best + step, 0), len(grid) - 1)]) for step in (-1, 1))
    ratio = (math.sqrt(5) - 1) / 2
    while b - a > 1e-7:
        left, right = b - ratio * (b - a), a + ratio * (b - a)
        if loss(math.exp(left)) < loss(math.exp(right)):
            b = right
        else:
            a = left
    return min(high, math.exp((a + b) / 2))


def write_half_lives(
    table: Sequence[dict[str, Any]], out_dir: Path, length: int, trained_length: int
) -> dict[str, str]:
    """Writes half_lives.json, .csv, .png and .svg; returns their paths by kind."""
    by_layer: list[list[float]] = [[] for _ in range(1 + max(row["layer"] for row in table))]
    for row in table:
        by_layer[row["layer"]].append(row["half_life_tokens"])
    figure = half_life_figure(
        by_layer,
        local_below=trained_length / 16,
        global_from=trained_length,
        ceiling=float(LONGEST * length),
        title="Half-lives fitted to the original's attention",
        subtitle=f"least squares on ln attention by distance, {length} tokens of context, first tokens left out",
    )
    png, svg = save_figure(figure, out_dir / "half_lives")
    document = {"length_tokens": length, "trained_length_tokens": trained_length, "heads": list(table)}
    return {
        "json": write_result(out_dir / "half_lives.json", (json.dumps(document, indent=1) + "\n").encode()),
        "csv": save_csv(out_dir / "half_lives.csv", COLUMNS, [[row[c] for c in COLUMNS] for row in table]),
        "png": png,
        "svg": svg,
    }
