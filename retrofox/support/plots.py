"""Figures: per-token loss, needle retrieval, half-lives; each as PNG and SVG."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from retrofox.support.files import write_result

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette, told apart with every common kind of colour blindness."""
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), "-")
STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titlesize": 12,
    "legend.frameon": False,
    "text.parse_math": False,  # a model may be named with dollars
    "svg.hashsalt": "retrofox",  # the same numbers give the same file
}


def loss_figure(
    curves: Sequence[dict[str, Any]],
    differences: Sequence[dict[str, Any]],
    *,
    reference: str,
    trained_length: int | None = None,
    subtitle: str = "",
) -> Figure:
    """L(i) against document position on a log axis, one line per model; below it the paired differences to one of them.

    Bands are standard errors over documents. Differences beyond 0.1 nats are drawn on a log axis, so that a base that
    breaks beyond its trained length does not hide what happens within it.

    Args:
        curves: per model {"label", "look", "position" (tokens), "mean" (nats), "standard_error" (nats or None each)};
            "look", a number, sets colour and dashes, so that a model looks the same in every figure.
        differences: the same, of loss less the reference's loss; empty where there is nothing to compare with.
        reference: label of the model that differences are taken to.
        trained_length: drawn as a vertical line where it lies inside the positions shown.
    """
    last = max(float(curve["position"][-1]) for curve in curves)
    first = max(1.0, min(16.0, last / 16))
    with matplotlib.rc_context(STYLE):
        figure = new_figure(8.0, 6.6 if differences else 4.8)
        panels = list(figure.subplots(2, 1, sharex=True, height_ratios=(3, 2)) if differences else [figure.subplots()])
        for panel, drawn in zip(panels, (curves, differences), strict=False):
            for curve in drawn:
                _line(panel, curve)
            _limit(panel, drawn, first)
            if trained_length is not None and first < trained_length < last:
                panel.axvline(trained_length, color="#555555", lw=1.0, ls=(0, (4, 3)))
                place = {"rotation": 90, "ha": "right", "va": "top", "fontsize": 9, "color": "#555555"}
                text = f"trained length {tokens_label(trained_length)} "
                panel.text(trained_length, 0.99, text, transform=panel.get_xaxis_transform(), **place)
        if differences:
            lower = panels[1]
            lower.axhline(0, color="black", lw=0.9)
            if max(map(abs, lower.get_ylim())) > 1.0:
                lower.set_yscale("symlog", linthresh=0.1, linscale=0.6, base=10)
                lower.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:+g}" if v else "0"))
            lower.set_ylabel("Difference (nats)")
            lower.set_title(f"L(i) less that of {reference}", fontsize=10)
        below = panels[-1]
        below.set_xscale("log", base=2)
        below.set_xlim(first, last)
        below.xaxis.set_major_formatter(FuncFormatter(lambda v, _: tokens_label(v)))
        below.xaxis.set_major_locator(LogLocator(base=2, numticks=14))
        below.xaxis.set_minor_formatter(NullFormatter())
        below.set_xlabel("Position i in the document (tokens, log scale)")
        panels[0].set_ylabel("Loss L(i) (nats per token)")
        _titles(panels[0], "Per-token loss", subtitle)
        panels[0].legend(loc="best", fontsize=10, handlelength=2.6)
    return figure


def needle_figure(
    grid: Sequence[Sequence[float]],
    lengths: Sequence[int],
    depths: Sequence[float],
    *,
    trained_length: int | None = None,
    title: str,
    subtitle: str = "",
) -> Figure:
    """Share of needles found, as a heat-map: context length across, depth of the needle (0 = start) downwards.

    Args:
        grid: (depths, lengths) of shares in [0, 1].
    """
    with matplotlib.rc_context({**STYLE, "axes.grid": False}):
        figure = new_figure(max(5.0, len(lengths) + 2.6), max(3.2, 0.5 * len(depths) + 1.9))
        axes = figure.subplots()
        image = axes.imshow(grid, cmap="cividis", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        axes.set_xticks(range(len(lengths)), [tokens_label(n) for n in lengths])
        axes.set_yticks(range(len(depths)), [f"{100 * d:g} %" for d in depths])
        axes.tick_params(length=0)
        for (row, column), share in np.ndenumerate(grid):
            shade = "white" if share < 0.55 else "black"
            axes.text(column, row, f"{share:.0%}", ha="center", va="center", fontsize=9, color=shade)
        inside = sum(trained_length is None or n <= trained_length for n in lengths)
        if 0 < inside < len(lengths):
            axes.axvline(inside - 0.5, color="#D55E00", lw=2)
        axes.set_xlabel("Context length (tokens)" + ("; orange: trained length" if 0 < inside < len(lengths) else ""))
        axes.set_ylabel("Depth of the needle")
        figure.colorbar(image, ax=axes, pad=0.02, label="Needles found", format=PercentFormatter(1.0, 0))
        _titles(axes, title, subtitle)
    return figure


def half_life_figure(
    half_lives: Sequence[Sequence[float]],
    *,
    local_below: float,
    global_from: float,
    ceiling: float,
    subtitle: str = "",
) -> Figure:
    """Half-life of every head, layer by layer, on a log axis, with lines at the bounds of local and global heads.

    Args:
        half_lives: per layer, one half-life in tokens per head; values over `ceiling` (and inf, a gate that never
            forgets) are drawn at the ceiling as triangles.
    """
    marks = [
        (layer + 0.5 * (head + 1) / (len(heads) + 1) - 0.25, value)
        for layer, heads in enumerate(half_lives)
        for head, value in enumerate(heads)
    ]
    closed, never = ([mark for mark in marks if (mark[1] > ceiling) == beyond] for beyond in (False, True))
    with matplotlib.rc_context(STYLE):
        figure = new_figure(max(7.0, 0.25 * len(half_lives) + 3.0), 4.6)
        axes = figure.subplots()
        place, values = zip(*closed, strict=True) if closed else ((), ())
        axes.scatter(place, values, s=20, color=COLOURS[0], linewidths=0, alpha=0.85, label=f"a head ({len(closed)})")
        if never:
            label = f"over {tokens_label(ceiling)} ({len(never)})"
            at_the_top = [ceiling] * len(never)
            axes.scatter([x for x, _ in never], at_the_top, s=26, color="black", marker="^", label=label)
        layers = [layer for layer, heads in enumerate(half_lives) if len(heads)]
        medians = [float(np.median(np.minimum(half_lives[n], ceiling))) for n in layers]
        axes.plot(layers, medians, color="black", lw=1.2, alpha=0.7)
        axes.set_yscale("log", base=2)
        for level, name in ((local_below, "local below"), (global_from, "global from")):
            axes.axhline(level, color=COLOURS[1], lw=0.8, ls=(0, (4, 3)), label=f"{name} {tokens_label(level)}")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: tokens_label(v)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xlim(-0.6, len(half_lives) - 0.4)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("Layer (heads side by side; line: median)")
        axes.set_ylabel("Half-life (tokens, log scale)")
        _titles(axes, "Half-lives of the forget gates", subtitle)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=10, borderaxespad=0.2)
    return figure


def save_figure(figure: Figure, stem: str | os.PathLike) -> list[str]:
    """Writes <stem>.png (160 dpi) and <stem>.svg, each whole or not at all; returns their paths."""
    drawn, png = svg(figure), io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(png, format="png", dpi=160)
    return [write_result(f"{stem}.png", png.getvalue()), write_result(f"{stem}.svg", drawn)]


def svg(figure: Figure) -> bytes:
    """A figure as SVG: the same numbers give the same bytes."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def tokens_label(value: float) -> str:
    """512 -> "512", 2048 -> "2k", 1536 -> "1.5k", 1048576 -> "1M": multiples of 1024, as context lengths are named."""
    for unit, name in ((1 << 20, "M"), (1 << 10, "k")):
        if value >= 0.9996 * unit:  # as good as one
            return f"{value / unit:.0f}{name}" if value >= 100 * unit else f"{value / unit:.3g}{name}"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def legend_label(name: str) -> str:
    """A name as a legend shows it, which leaves out _names."""
    return f" {name}" if name.startswith("_") else name


def _titles(axes: Any, title: str, subtitle: str) -> None:
    axes.set_title(title, fontweight="bold", pad=20 if subtitle else 8)
    style = {"xycoords": "axes fraction", "textcoords": "offset points", "fontsize": 9, "color": "#555555"}
    axes.annotate(subtitle, (0, 1), xytext=(0, 5), va="bottom", **style)


def _line(axes: Any, curve: dict[str, Any]) -> None:
    """A curve and the band of its standard error; the first curve lies on top."""
    mean = np.array(curve["mean"], float)
    error = np.array([np.nan if e is None else e for e in curve["standard_error"]], float)
    colour, style = COLOURS[curve["look"] % len(COLOURS)], LINES[curve["look"] % len(LINES)]
    look = {"color": colour, "linestyle": style, "lw": 1.9, "zorder": 3.0 - 0.01 * curve["look"]}
    axes.plot(curve["position"], mean, label=legend_label(curve["label"]), **look)
    axes.fill_between(curve["position"], mean - error, mean + error, color=colour, alpha=0.12, linewidth=0)


def _limit(axes: Any, curves: Sequence[dict[str, Any]], first: float) -> None:
    """Fits the vertical range to the means at the positions shown."""
    shown = [m for curve in curves for m, at in zip(curve["mean"], curve["position"], strict=True) if at >= first]
    if len(shown) > 1:
        margin = 0.08 * max(max(shown) - min(shown), 0.01)
        axes.set_ylim(min(shown) - margin, max(shown) + margin)
