"""The figure of recall: accuracy by distance, whole and cut, and the loss that the cut adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from retrofox.support.plots import COLOURS, STYLE, _titles, tokens_label


def recall_figure(
    curves: Sequence[dict[str, Any]],
    *,
    trained_length: int | None = None,
    title: str = "Recall by distance",
    subtitle: str = "",
) -> Figure:
    """Accuracy on tokens seen d tokens back, solid; with their source cut, dotted; below, the loss it adds.

    Args:
        curves: per model {"label", "distance" (tokens), "accuracy", "cut_distance", "accuracy_cut", "recalled"}, the
            last three empty without a control; every number is {"mean", "interval" ([low, high] or None)}.
        trained_length: drawn as a vertical line where it lies inside the distances shown.
    """
    if not curves:
        raise ValueError("nothing to draw: no curve was given")
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.0, 6.6), layout="constrained")
        FigureCanvasAgg(figure)
        axes, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        for number, curve in enumerate(curves):
            colour = COLOURS[number % len(COLOURS)]
            looks: dict[str, Any] = {"color": colour, "lw": 1.9, "marker": "o", "ms": 4}
            label = curve["label"]
            _band(axes, curve["distance"], curve["accuracy"], label=f" {label}" if label[0] == "_" else label, **looks)
            _band(axes, curve["cut_distance"], curve["accuracy_cut"], **{**looks, "ls": ":", "lw": 1.3, "ms": 2})
            _band(lower, curve["cut_distance"], curve["recalled"], **looks)
        axes.plot([], [], color="#555555", ls=":", lw=1.3, label="source cut from the text")
        lower.axhline(0, color="black", lw=0.9)
        lower.set_xscale("log", base=2)
        lower.xaxis.set_major_formatter(FuncFormatter(lambda v, _: tokens_label(v)))
        lower.xaxis.set_minor_formatter(NullFormatter())
        places = [d for curve in curves for d in curve["distance"]]
        if trained_length is not None and min(places) < trained_length < max(places):
            for panel in (axes, lower):
                panel.axvline(trained_length, color="#555555", lw=1.0, ls=(0, (4, 3)))
        axes.set_ylim(0, 1)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.0%}"))
        axes.set_ylabel("Top-1 accuracy")
        lower.set_ylabel("Loss: cut less whole (nats)")
        lower.set_xlabel("Distance d back to the last occurrence (tokens, log scale)")
        _titles(axes, title, subtitle)
        axes.legend(loc="best", fontsize=10, handlelength=2.6)
    return figure


def _band(axes: Any, x: Sequence[float], values: Sequence[dict[str, Any]], **looks: Any) -> None:
    """A line through means, and a band between the ends of their intervals where they have one."""
    if not values:
        return
    axes.plot(x, [value["mean"] for value in values], **looks)
    low, high = np.array([v["interval"] or (np.nan, np.nan) for v in values], float).T
    axes.fill_between(x, low, high, color=looks["color"], alpha=0.12, linewidth=0)
