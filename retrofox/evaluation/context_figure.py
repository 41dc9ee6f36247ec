"""Figures beside that of L(i): perplexity over the first l tokens, and the loss given only the last k."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from retrofox.support.plots import COLOURS, LINES, STYLE, _figure, _titles, tokens_label


def perplexity_figure(curves: Sequence[dict[str, Any]], *, trained_length: int | None, subtitle: str = "") -> Figure:
    """P(l) against l, both axes logarithmic, one line per model.

    Args:
        curves: per model {"label", "position" (tokens), "perplexity"}.
        trained_length: drawn as a vertical line where it lies inside the lengths shown.
    """
    with matplotlib.rc_context(STYLE):
        figure, axes = _figure(8.0, 4.8)
        for number, curve in enumerate(curves):
            axes.plot(curve["position"], curve["perplexity"], **_looks(curve["label"], curve.get("look", number)))
        last = max(curve["position"][-1] for curve in curves)
        first = max(1.0, min(16.0, last / 16))
        shown = [p for c in curves for x, p in zip(c["position"], c["perplexity"], strict=True) if x >= first]
        axes.set_yscale("log", base=2)
        axes.set_ylim(min(shown) / 1.1, max(shown) * 1.1)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.3g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        _token_axis(axes, "Length l (tokens, log scale)")
        axes.set_xlim(first, last)
        if trained_length is not None and first < trained_length < last:
            axes.axvline(trained_length, color="#555555", lw=1.0, ls=(0, (4, 3)))
        axes.set_ylabel("Perplexity P(l) of the first l tokens")
        _titles(axes, "Perplexity by length", subtitle)
        axes.legend(loc="best", fontsize=10, handlelength=2.6)
    return figure


def short_context_figure(lines: Sequence[dict[str, Any]], *, subtitle: str = "") -> Figure:
    """Loss given only the last k tokens less the loss given all, against k, with 95 % intervals.

    Args:
        lines: per model {"label", "short_context": as `ShortContexts.measure` returns it}.
    """
    with matplotlib.rc_context(STYLE):
        figure, axes = _figure(8.0, 4.8)
        for number, line in enumerate(lines):
            table, looks = line["short_context"], _looks(line["label"], number)
            x = [row["tokens"] for row in table]
            axes.plot(x, [row["excess"]["mean"] for row in table], marker="o", ms=4, **looks)
            ends = np.array([row["excess"]["interval"] or (np.nan, np.nan) for row in table], float)
            axes.fill_between(x, ends[:, 0], ends[:, 1], color=looks["color"], alpha=0.12, linewidth=0)
        axes.axhline(0, color="black", lw=0.9)
        _token_axis(axes, "Context k (tokens, log scale)")
        axes.set_ylabel("Loss with the last k tokens less with all (nats)")
        _titles(axes, "Context used", subtitle)
        axes.legend(loc="best", fontsize=10, handlelength=2.6)
    return figure


def _token_axis(axes: Any, label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: tokens_label(v)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(label)


def _looks(label: str, number: int) -> dict[str, Any]:
    shown = f" {label}" if label.startswith("_") else label  # a legend leaves out _names
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": LINES[number % len(LINES)], "lw": 1.9, "label": shown}
