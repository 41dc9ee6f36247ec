"""Reports of `retrofox needle`: shares by length and depth, a table for each mode, figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, PercentFormatter
from rich.console import Console

from retrofox.evaluation.statistics import wilson_interval
from retrofox.support.plots import COLOURS, LINES, STYLE, save_figure, set_titles, tokens_label
from retrofox.support.report import print_table


def shares(answers: Sequence[dict[str, Any]], lengths: Sequence[int], depths: Sequence[float]) -> dict[str, Any]:
    """{"found": depths x lengths shares, "by_length": per length share, interval, mean log-probability in nats}.

    Prompts, not tokens, are the sample.

    Args:
        answers: to a mode's prompts, in the order in which `make_prompts` gives these.
    """
    found, log_p = (
        np.reshape([float(answer[name]) for answer in answers], (len(lengths), len(depths), -1))
        for name in ("found", "log_probability")
    )
    rows = []
    for length, own, own_log_p in zip(lengths, found, log_p, strict=True):
        share, prompts = float(own.mean()), own.size
        row = {"length": length, "prompts": prompts, "found": share, "log_probability": float(own_log_p.mean())}
        rows.append({**row, "interval": list(wilson_interval(share, prompts))})
    return {"found": found.mean(-1).T.tolist(), "by_length": rows}


def print_tables(result: dict[str, Any], console: Console) -> None:
    """For each mode and length, the models below each other: share found, its interval, mean log-probability."""
    count = len(result["depths"]) * result["trials"]
    for mode in result["modes"]:
        console.print(
            f"Needles found, {mode} mode: {count} prompts per length, 95 % Wilson interval; log p: mean of an answer's "
            "tokens, nats",
            highlight=False,
        )
        rows: list[list[str]] = []
        for number, length in enumerate(result["lengths"]):
            label = tokens_label(length)
            for name, values in result["models"].items():
                row = values["modes"][mode]["by_length"][number]
                low, high = row["interval"]
                share, interval = f"{row['found']:.0%}", f"{100 * low:.0f}-{100 * high:.0f} %"
                rows.append([label, name, share, interval, f"{row['log_probability']:.3f}"])
                label = ""
            rows.append([])
        print_table(console, ("length", "model", "found", "95 %", "log p"), rows, left="model")


def write_files(result: dict[str, Any], folder: Path) -> dict[str, str]:
    """Writes the figures, each whole or not at all; returns their paths."""
    files = save_figure(length_figure(result), folder / "needle")
    for name, values in result["models"].items():
        for mode in result["modes"]:
            key = f"{values['role']}_{mode}"
            saved = save_figure(depth_figure(result, name, mode), folder / f"needle_{key}")
            files |= {f"{key}_{kind}": path for kind, path in saved.items()}
    return files


def depth_figure(result: dict[str, Any], name: str, mode: str) -> Figure:
    """One model's share found in one mode, as a heat-map: context length across, depth (0 = start) downwards."""
    values, lengths, depths = result["models"][name], result["lengths"], result["depths"]
    trained = values["trained_length"]
    with matplotlib.rc_context({**STYLE, "axes.grid": False}):
        size = max(5.0, len(lengths) + 2.6), max(3.2, 0.5 * len(depths) + 1.9)
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        found = values["modes"][mode]["found"]
        image = axes.imshow(found, cmap="cividis", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        axes.set_xticks(range(len(lengths)), [tokens_label(n) for n in lengths])
        axes.set_yticks(range(len(depths)), [f"{100 * d:g} %" for d in depths])
        axes.tick_params(length=0)
        for (row, column), share in np.ndenumerate(found):
            shade = "white" if share < 0.55 else "black"
            axes.text(column, row, f"{share:.0%}", ha="center", va="center", fontsize=9, color=shade)
        inside = sum(n <= trained for n in lengths)
        if 0 < inside < len(lengths):
            axes.axvline(inside - 0.5, color="#D55E00", lw=2)
        axes.set_xlabel("Context length (tokens)" + ("; orange: trained length" if 0 < inside < len(lengths) else ""))
        axes.set_ylabel("Depth of the needle")
        figure.colorbar(image, ax=axes, pad=0.02, label="Needles found", format=PercentFormatter(1.0, 0))
        set_titles(axes, f"Needle retrieval, {mode} mode: {name}", f"{result['trials']} trials per cell")
    return figure


def length_figure(result: dict[str, Any]) -> Figure:
    """Share found against context length: a panel for each mode, a line for each model, bars the Wilson intervals."""
    modes, lengths = result["modes"], result["lengths"]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(max(6.8, 2.0 + 3.6 * len(modes)), 4.0), layout="constrained")
        panels = figure.subplots(1, len(modes), squeeze=False, sharey=True)
        for mode, panel in zip(modes, panels.flat, strict=True):
            for place, (name, values) in enumerate(result["models"].items()):
                rows = values["modes"][mode]["by_length"]
                share = np.array([row["found"] for row in rows])
                low, high = np.array([row["interval"] for row in rows]).T
                panel.errorbar(
                    np.array(lengths) * 2 ** (0.04 * place),  # beside each other, so that no bar hides another
                    share,
                    yerr=np.maximum(0, [share - low, high - share]),
                    color=COLOURS[place % len(COLOURS)],
                    linestyle=LINES[place % len(LINES)],
                    marker="o",
                    markersize=4,
                    capsize=3,
                    label=name,
                )
            panel.set_title(mode, fontsize=11)
            panel.set_xscale("log", base=2)
            panel.set_xticks(lengths, [tokens_label(length) for length in lengths])
            panel.xaxis.set_minor_formatter(NullFormatter())
            panel.set_ylim(-0.03, 1.03)
            panel.yaxis.set_major_formatter(PercentFormatter(1.0))
            panel.set_xlabel("Context length (tokens)")
        panels.flat[0].set_ylabel("Needles found")
        panels.flat[0].legend(loc="best", fontsize=9)
        title = "Needles found; bars: 95 % Wilson intervals"
        figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
    return figure
