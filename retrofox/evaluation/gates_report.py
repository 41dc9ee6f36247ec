"""Reports of `retrofox inspect`: tables of half-lives and live shares, which heads look facts up, files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter
from rich.console import Console

from retrofox.support.plots import COLOURS, STYLE, set_titles, tokens_label
from retrofox.support.report import print_table

LIVE_COLUMNS = (
    "tokens",
    "texts",
    "attention",
    "cache",
    "cache bytes per token",
    "decode ms",
    "measured ms",
    "open heads",
)
LOOKS_UP = 0.1
"""Share of a head's attention from which it is said to look facts up."""
SHOWN = 8


def print_gates(result: dict[str, Any], console: Console) -> None:
    """A row for each layer, and a sentence on all heads."""
    rows = []
    for layer in range(result["layers"]):
        heads = [h for h in result["heads"] if h["layer"] == layer]
        row = [str(layer), " ".join(f"{_label(h['half_life']):>5}" for h in heads) or "no gates"]
        row += [str(sum(h["kind"] == kind for h in heads)) for kind in ("local", "global")]
        rows.append([*row, str(sum(h["dead"] for h in heads))])
    columns = ("layer", "half-lives", "local", "global", "dead")
    title = f"{result['model']}: half-lives in tokens of each head, {_source(result)}"
    print_table(console, columns, rows, title, left="half-lives")
    summary, trained = result["summary"], result["trained_length"]
    console.print(
        f"{summary['heads']} heads: {summary['local']} local (under {tokens_label(trained / 16)}), {summary['medium']} "
        f"between, {summary['global']} global (from {tokens_label(trained)}); {summary['dead']} dead",
        highlight=False,
    )


def _source(result: dict[str, Any]) -> str:
    return f"measured over {result['tokens']:,} tokens" if result["tokens"] else "from the gate biases alone"


def _label(half_life: float | None) -> str:
    return "inf" if half_life is None or half_life > 1e9 else tokens_label(half_life)


def figure(result: dict[str, Any]) -> Figure:
    """Half-life of every head, layer by layer, on a log axis, with lines at the bounds of local and global heads.

    Half-lives beyond 128 times the trained length, and gates that never forget, are drawn there as triangles.
    """
    trained, layers = result["trained_length"], result["layers"]
    ceiling = trained * 128
    marks: list[tuple[float, float]] = []
    medians: dict[int, float] = {}
    for layer in range(layers):
        lives = [h["half_life"] for h in result["heads"] if h["layer"] == layer]
        lives = [math.inf if life is None else life for life in lives]
        marks += [(layer + 0.5 * (head + 1) / (len(lives) + 1) - 0.25, life) for head, life in enumerate(lives)]
        if lives:
            medians[layer] = float(np.median(np.minimum(lives, ceiling)))
    closed, never = ([mark for mark in marks if (mark[1] > ceiling) == beyond] for beyond in (False, True))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(max(7.0, 0.25 * layers + 3.0), 4.6), layout="constrained")
        axes = figure.subplots()
        place, values = zip(*closed, strict=True) if closed else ((), ())
        axes.scatter(place, values, s=20, color=COLOURS[0], linewidths=0, alpha=0.85, label=f"a head ({len(closed)})")
        if never:
            label = f"over {tokens_label(ceiling)} ({len(never)})"
            at_the_top = [ceiling] * len(never)
            axes.scatter([x for x, _ in never], at_the_top, s=26, color="black", marker="^", label=label)
        axes.plot([*medians], [*medians.values()], color="black", lw=1.2, alpha=0.7)
        axes.set_yscale("log", base=2)
        for level, name in ((trained / 16, "local below"), (trained, "global from")):
            axes.axhline(level, color=COLOURS[1], lw=0.8, ls=(0, (4, 3)), label=f"{name} {tokens_label(level)}")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: tokens_label(v)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xlim(-0.6, layers - 0.4)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel("Layer (heads side by side; line: median)")
        axes.set_ylabel("Half-life (tokens, log scale)")
        set_titles(axes, "Half-lives of the forget gates", _source(result))
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=10, borderaxespad=0.2)
    return figure


def print_live_share(live: dict[str, Any], console: Console) -> None:
    """At each length: share of attention operations and of the cache, cache bytes per token, decoding, open heads."""
    title = f"Live share at a horizon of {live['horizon']:g} nats"
    print_table(console, LIVE_COLUMNS, live_rows(live), title)
    console.print(decoding_note(live), highlight=False, soft_wrap=True)


def decoding_note(live: dict[str, Any]) -> str:
    """How the milliseconds of a decoded token were computed, and measured."""
    return (
        "decode ms: predicted, of one text: the time to read weights and live cache once at "
        f"{live['bandwidth'] / 1e12:g} TB/s, an H100's by its data sheet. Measured: on this machine, by `generate`"
    )


def live_rows(live: dict[str, Any]) -> list[list[str]]:
    """Cells under LIVE_COLUMNS for each length."""
    return [
        [
            tokens_label(row["length"]),
            str(row["documents"]),
            *(f"{100 * row[name]:.0f} %" for name in ("ops", "cache")),
            f"{row['cache_bytes_per_token']:,.0f} of {row['base_bytes_per_token']:,.0f}",
            f"{row['decode_ms']:.3g} of {row['base_decode_ms']:.3g}",
            f"{row['measured_decode_ms']:.3g}",
            str(len(row["open_heads"])),
        ]
        for row in live["lengths"]
    ]


def open_heads_sentence(live: Mapping[str, Any], heads: Sequence[Mapping[str, Any]]) -> str:
    """How many heads see the whole of the longest text, and how many of them look facts up."""
    row = live["lengths"][-1]
    whole = row["open_heads"]
    where = f"all of {tokens_label(row['length'])} tokens"
    scores = {f"{head['layer']}.{head['head']}": head["needle_attention"] for head in heads}
    count = f"no head sees {where}"
    if whole:
        count = f"{len(whole)} head{'s' * (len(whole) > 1)} of {len(heads)} see{'s' * (len(whole) == 1)} {where}"
    if None in scores.values():
        count += f": {_names(whole)}" if whole else ""
        return f"{count}; attention to planted facts was not measured: text or model is too short"
    if not whole:
        return count
    looking = sorted((name for name, score in scores.items() if score >= LOOKS_UP), key=lambda name: -scores[name])
    seeing = [f"{name} ({100 * scores[name]:.0f} %)" for name in looking if name in whole]
    closed = [f"{name} ({100 * scores[name]:.0f} %)" for name in looking if name not in whole]
    most = f"at least {100 * LOOKS_UP:.0f} % of attention on a planted fact"
    text = f"{count}; {len(seeing)} of these look facts up ({most})"
    text += f": {_names(seeing)}" if seeing else ""
    return text + (f"; closed heads that would: {_names(closed)}" if closed else "")


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
