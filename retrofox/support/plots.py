"""The style of all figures: colours and dashes, titles, names of lengths, PNG and SVG files."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from typing import Any

import matplotlib
from matplotlib.figure import Figure

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


def save_figure(figure: Figure, stem: str | os.PathLike) -> dict[str, str]:
    """Writes <stem>.png (160 dpi) and <stem>.svg, each whole or not at all; returns {"png": path, "svg": path}."""
    drawn, png = svg(figure), io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(png, format="png", dpi=160)
    return {"png": write_result(f"{stem}.png", png.getvalue()), "svg": write_result(f"{stem}.svg", drawn)}


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


def span_label(span: Mapping[str, Any]) -> str:
    """{"from": 4096, "to": 8192} -> "4k-8k"."""
    return f"{tokens_label(span['from'])}-{tokens_label(span['to'])}"


def set_titles(axes: Any, title: str, subtitle: str) -> None:
    """A bold title, and below it a subtitle in small grey letters."""
    axes.set_title(title, fontweight="bold", pad=20)
    style = {"xycoords": "axes fraction", "textcoords": "offset points", "fontsize": 9, "color": "#555555"}
    axes.annotate(subtitle, (0, 1), xytext=(0, 5), va="bottom", **style)
