"""Figures: per-token loss, needle retrieval, half-lives; each as PNG and SVG with the numbers drawn as CSV."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

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
    differences: Sequence[dict[str, Any]] = (),
    *,
    reference: str = "",
    trained_length: int | None = None,
    subtitle: str = "",
) -> Figure:
    """L(i) against document position on a log axis, one line per model; below it the paired differences to one of them.

    Bands are standard errors over documents. Differences beyond 0.1 nats are drawn on a log axis, so that a base that
    breaks beyond its trained length does not hide what happens within it.

    Args:
        curves: per model {"label", "position" (tokens), "mean" (nats), "standard_error" (nats or None each)}; "look",
            a number, sets colour and dashes, so that a model looks the same in every figure.
        differences: the same, of loss less the reference's loss; a label found in `curves` keeps its colour.
        reference: label of the model that differences are taken to.
        trained_length: drawn as a vertical line where it lies inside the positions shown.
    """
    looks = {curve["label"]: curve.get("look", number) for number, curve in enumerate(curves)}
    last = max(float(np.asarray(c["position"])[-1]) for c in curves)
    first = max(1.0, min(16.0, last / 16))
    with matplotlib.rc_context(STYLE):
        if differences:
            figure = Figure(figsize=(8.0, 6.6), layout="constrained")
            FigureCanvasAgg(figure)
            axes, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
            for curve in differences:
                _line(lower, curve, looks[curve["label"]])
            lower.axhline(0, color="black", lw=0.9)
            _limit(lower, differences, first)
            low, high = lower.get_ylim()
            if max(-low, high) > 1.0:
                lower.set_yscale("symlog", linthresh=0.1, linscale=0.6, base=10)
                lower.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:+g}" if v else "0"))
            lower.set_ylabel("Difference (nats)")
            lower.set_title(f"L(i) less that of {reference}", fontsize=10)
        else:
            figure, axes = _figure(8.0, 4.8)
            lower = axes
        for curve in curves:
            _line(axes, curve, looks[curve["label"]])
        lower.set_xscale("log", base=2)
        lower.set_xlim(first, last)
        _limit(axes, curves, first)
        lower.xaxis.set_major_formatter(FuncFormatter(lambda v, _: tokens_label(v)))
        lower.xaxis.set_major_locator(LogLocator(base=2, numticks=14))
        lower.xaxis.set_minor_formatter(NullFormatter())
        if trained_length is not None and first < trained_length < last:
            for panel in {axes, lower}:
                panel.axvline(trained_length, color="#555555", lw=1.0, ls=(0, (4, 3)))
            style = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "color": "#555555"}
            text = f"trained length {tokens_label(trained_length)}"
            place = {"xytext": (-4, -3), "rotation": 90, "ha": "right", "va": "top", "fontsize": 9}
            axes.annotate(text, (trained_length, 1.0), **place, **style)
        lower.set_xlabel("Position i in the document (tokens, log scale)")
        axes.set_ylabel("Loss L(i) (nats per token)")
        _titles(axes, "Per-token loss", subtitle)
        axes.legend(loc="best", fontsize=10, handlelength=2.6)
    return figure


def needle_figure(
    grid: np.ndarray,
    lengths: Sequence[int],
    depths: Sequence[float],
    *,
    trained_length: int | None = None,
    title: str = "Needle retrieval",
    subtitle: str = "",
) -> Figure:
    """Share of needles found, as a heat-map: context length across, depth of the needle (0 = start) downwards.

    Args:
        grid: (depths, lengths) of shares in [0, 1]; NaN = not run.
    """
    values = np.asarray(grid, float)
    with matplotlib.rc_context({**STYLE, "axes.grid": False}):
        figure, axes = _figure(max(5.0, 1.0 * len(lengths) + 2.6), max(3.2, 0.5 * len(depths) + 1.9))
        image = axes.imshow(values, cmap="cividis", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        axes.set_xticks(range(len(lengths)), [tokens_label(n) for n in lengths])
        axes.set_yticks(range(len(depths)), [f"{100 * d:g} %" for d in depths])
        axes.tick_params(length=0)
        axes.set_xticks(np.arange(-0.5, len(lengths)), minor=True)
        axes.set_yticks(np.arange(-0.5, len(depths)), minor=True)
        axes.grid(which="minor", color="white", linewidth=1.5)
        axes.tick_params(which="minor", length=0)
        for row in range(len(depths)):
            for column in range(len(lengths)):
                share = values[row, column]
                text = "" if np.isnan(share) else f"{share:.0%}"
                shade = "white" if share < 0.55 else "black"
                axes.text(column, row, text, ha="center", va="center", fontsize=9, color=shade)
        beyond = [c for c, n in enumerate(lengths) if trained_length is not None and n > trained_length]
        if beyond and beyond[0] > 0:
            axes.axvline(beyond[0] - 0.5, color="#D55E00", lw=2)
        axes.set_xlabel("Context length (tokens)" + ("; orange: trained length" if beyond and beyond[0] else ""))
        axes.set_ylabel("Depth of the needle")
        bar = figure.colorbar(image, ax=axes, pad=0.02)
        bar.set_label("Needles found")
        bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.0%}"))
        bar.outline.set_visible(False)  # type: ignore[operator]
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
    """Half-life of every head, layer by layer, on a log axis, local and global heads marked.

    Args:
        half_lives: per layer, one half-life in tokens per head; values over `ceiling` (and inf, a gate that never
            forgets) are drawn at the ceiling as open triangles.
    """
    with matplotlib.rc_context(STYLE):
        figure, axes = _figure(max(7.0, 0.25 * len(half_lives) + 3.0), 4.6)
        kinds = (("local", COLOURS[1], "v"), ("medium", "#777777", "o"), ("global", COLOURS[0], "s"))
        points: dict[str, list[tuple[float, float]]] = {"local": [], "medium": [], "global": [], "open": []}
        for layer, heads in enumerate(half_lives):
            for head, value in enumerate(heads):
                x = layer + (0.0 if len(heads) == 1 else 0.5 * (head / (len(heads) - 1) - 0.5))
                if not value <= ceiling:
                    points["open"].append((x, ceiling))
                else:
                    kind = "local" if value < local_below else "global" if value >= global_from else "medium"
                    points[kind].append((x, value))
        for kind, colour, marker in kinds:
            if points[kind]:
                x, y = zip(*points[kind], strict=True)
                label = f"{kind} ({len(x)})"
                axes.scatter(x, y, s=20, color=colour, marker=marker, label=label, linewidths=0, alpha=0.85)
        if points["open"]:
            x, y = zip(*points["open"], strict=True)
            label = f"over {tokens_label(ceiling)} ({len(x)})"
            axes.scatter(x, y, s=26, facecolors="none", edgecolors="black", marker="^", label=label)
        layers = [layer for layer, heads in enumerate(half_lives) if len(heads)]
        axes.plot(
            layers,
            [float(np.median(np.minimum(half_lives[n], ceiling))) for n in layers],
            color="black",
            lw=1.2,
            alpha=0.7,
        )
        axes.set_yscale("log", base=2)
        if points["open"]:
            axes.set_ylim(top=ceiling * 1.5)
        for level in (local_below, global_from):
            axes.axhline(level, color="#999999", lw=0.8, ls=(0, (4, 3)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: tokens_label(v)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xlim(-0.6, len(half_lives) - 0.4)
        axes.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[attr-defined]
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


def save_csv(path: str | os.PathLike, header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Writes a CSV file, whole or not at all; None becomes an empty field."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows([["" if cell is None else cell for cell in row] for row in rows])
    return write_result(path, text.getvalue().encode())


def tokens_label(value: float) -> str:
    """512 -> "512", 2048 -> "2k", 1536 -> "1.5k", 1048576 -> "1M": multiples of 1024, as context lengths are named."""
    for unit, name in ((1 << 20, "M"), (1 << 10, "k")):
        if value >= 0.9996 * unit:  # as good as one
            return f"{value / unit:.0f}{name}" if value >= 100 * unit else f"{value / unit:.3g}{name}"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _figure(width: float, height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)  # no global pyplot state, no display
    return figure, figure.add_subplot()


def _titles(axes: Any, title: str, subtitle: str) -> None:
    axes.set_title(title, fontweight="bold", pad=20 if subtitle else 8)
    if subtitle:
        style = {"xycoords": "axes fraction", "textcoords": "offset points", "fontsize": 9, "color": "#555555"}
        axes.annotate(subtitle, (0, 1), xytext=(0, 5), va="bottom", **style)


def _line(axes: Any, curve: dict[str, Any], number: int) -> None:
    """A curve and the band of its standard error; the first curve lies on top."""
    x, mean = np.asarray(curve["position"], float), np.asarray(curve["mean"], float)
    error = np.array([np.nan if e is None else e for e in curve["standard_error"]], float)
    colour, order = COLOURS[number % len(COLOURS)], 3.0 - 0.01 * number
    style = LINES[number % len(LINES)]
    label = f" {curve['label']}" if curve["label"].startswith("_") else curve["label"]  # a legend leaves out _names
    axes.plot(x, mean, color=colour, linestyle=style, lw=1.9, label=label, zorder=order)
    axes.fill_between(x, mean - error, mean + error, color=colour, alpha=0.12, linewidth=0)


def _limit(axes: Any, curves: Sequence[dict[str, Any]], first: float) -> None:
    """Fits the vertical range to the means at the positions shown."""
    values = np.concatenate([np.asarray(c["mean"], float)[np.asarray(c["position"], float) >= first] for c in curves])
    if len(values) < 2:
        return
    low, high = float(values.min()), float(values.max())
    margin = 0.08 * max(high - low, 0.01)
    axes.set_ylim(low - margin, high + margin)
