"""The report of per-token losses: buckets, curves, verdicts on the gates, a table, files."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from rich.console import Console

from retrofox.evaluation.per_token_loss import PositionSums, bucket_edges, curve_edges
from retrofox.evaluation.statistics import side
from retrofox.support.plots import COLOURS, LINES, STYLE, set_titles, span_label, tokens_label
from retrofox.support.report import print_table

Losses = Mapping[str, Sequence[np.ndarray]]
CONTROLS = {"open": "gates forced open", "shuffled": "gates shuffled"}
"""Lines of the model with its gates changed, and their names."""
NO_CHANGE = 1e-4
"""Nats: a change of the loss that is called none whatever its standard error."""


def buckets(losses: Losses, length: int) -> list[dict[str, Any]]:
    """Per position bucket: tokens, documents, and by line its loss and difference, each as `mean_over_documents`.

    Differences are of the other lines to "base" (and of the controls to "model"), paired by document.
    """
    edges = bucket_edges(length, reach(losses))
    sums = {key: PositionSums(values, edges) for key, values in losses.items()}
    loss = {key: s.statistics() for key, s in sums.items()}
    difference = {
        f"{key}-{to}": sums[key].statistics(sums[to]) for key in sums for to in [_compared_to(key, sums)] if to in sums
    }
    counts = sums["model"].counts
    return [
        {
            "from": low,
            "to": high,
            "tokens": int(counts[:, b].sum()),
            "documents": int((counts[:, b] > 0).sum()),
            "loss": {key: rows[b] for key, rows in loss.items()},
            "difference": {name: rows[b] for name, rows in difference.items()},
        }
        for b, (low, high) in enumerate(pairwise(edges))
    ]


def reach(losses: Losses) -> int:
    """Tokens of the longest document, of which the first has no loss."""
    return 1 + max(len(loss) for loss in losses["model"])


def summarise(losses: Losses, length: int) -> dict[str, dict[str, Any]]:
    """By line: its mean over all positions, and the mean difference."""
    sums = {key: PositionSums(values, [0, length]) for key, values in losses.items()}
    summary = {key: own.statistics()[0] for key, own in sums.items()}
    for key, found in summary.items():
        to = _compared_to(key, sums)
        found["difference"] = sums[key].statistics(sums[to])[0] if to in sums else None
    return summary


def curves(
    lines: Sequence[dict[str, Any]], losses: Losses, length: int, less: str | None = None
) -> list[dict[str, Any]]:
    """L(i) by line, smoothed over half an octave of positions: mean and standard error over documents.

    With `less`, the key of a line, the other lines' paired differences to it.
    """
    edges = curve_edges(min(length, reach(losses)))
    position = [math.sqrt(a * (b - 1)) for a, b in pairwise(edges)]
    sums = {key: PositionSums(values, edges).smoothed(edges) for key, values in losses.items()}
    result = []
    looks = [line["key"] for line in sorted(lines, key=lambda line: line["key"] in CONTROLS)]  # as in other figures
    for line in lines:
        if line["key"] == less:
            continue
        rows = sums[line["key"]].statistics(sums[less] if less is not None else None)
        kept = [(p, r) for p, r in zip(position, rows, strict=True) if r["mean"] is not None]
        result.append(
            {
                "key": line["key"],
                "label": line["label"],
                "look": looks.index(line["key"]),
                "position": [p for p, _ in kept],
                "mean": [r["mean"] for _, r in kept],
                "standard_error": [r["standard_error"] for _, r in kept],
            }
        )
    return result


def print_losses(result: dict[str, Any], console: Console) -> None:
    """The bucket table and, for a converted model, the controls' verdict on its gates."""
    spread = " (± standard error over documents)" if result["documents"] > 1 else ""
    count = f"{result['documents']} document{'s' * (result['documents'] > 1)}, {result['tokens']:,} tokens"
    keys = [line["key"] for line in result["lines"]]
    rows: list[list[str]] = []
    for bucket in result["buckets"]:
        place = [span_label(bucket), f"{bucket['tokens']:,}"]
        for line in result["lines"]:
            change = bucket["difference"].get(f"{line['key']}-{_compared_to(line['key'], keys)}")
            rows.append([*place, line["label"], _cell(bucket["loss"][line["key"]]), _cell(change, signed=True)])
            place = ["", ""]
        rows.append([])
    place = ["all", f"{sum(bucket['tokens'] for bucket in result['buckets']):,}"]
    for line in result["lines"]:
        rows.append([*place, line["label"], _cell(line), _cell(line["difference"], signed=True)])
        place = ["", ""]
    columns = ("positions", "tokens", "model", "loss", "difference")
    print_table(console, columns, rows, f"Loss in nats per token, {count}{spread}", left="model")
    if len(keys) > 1:
        controls = ", of gates forced open or shuffled to the model" if set(CONTROLS) & {*keys} else ""
        reference = next(line["label"] for line in result["lines"] if line["key"] == _reference(keys))
        console.print(f"differences are to {reference}{controls}", highlight=False, soft_wrap=True)
    if result["longest"] < result["length"]:
        console.print(
            f"no document reaches {result['length']} tokens: the longest has {result['longest']}", highlight=False
        )
    for sentence in verdicts(result):
        console.print(sentence, highlight=False, soft_wrap=True)


def verdicts(result: dict[str, Any]) -> list[str]:
    """Plain sentences on the controls: whether opening or shuffling the gates changes the loss, and by how much.

    A change is named only where its 95 % interval over documents leaves out 0; one document gives none.
    """
    sentences = []
    for line in result["lines"]:
        if line["key"] not in CONTROLS:
            continue
        change, interval = line["difference"]["mean"], line["difference"]["interval"]
        if line["key"] == "open":
            start, subject = "forcing the gates open", "gating"
        else:
            start, subject = "shuffling the gates over heads", "which head has which gate"
        amount = f"changes the loss by {_cell(line['difference'], signed=True)}"
        if interval is None and abs(change) > NO_CHANGE:
            verdict = "makes no clear difference (one document gives no interval)"
        elif abs(change) <= NO_CHANGE or not side(interval):
            verdict = "makes no clear difference"
        else:
            verdict = "helps" if change > 0 else "hurts"
        sentences.append(f"{start} {amount}: {subject} {verdict} on this text")
    return sentences


def add_curves(result: dict[str, Any], losses: Losses) -> None:
    """Adds the curves that the figure draws to the result."""
    keys = [line["key"] for line in result["lines"]]
    result["curves"] = curves(result["lines"], losses, result["length"])
    result["difference_curves"] = curves(result["lines"], losses, result["length"], less=_reference(keys))


def figure(result: dict[str, Any]) -> Figure:
    """L(i) of every line against document position on a log axis, and below it the differences, from eval.json.

    Bands are standard errors over documents. Differences beyond 0.1 nats are drawn on a log axis, so that a base that
    breaks beyond its trained length does not hide what happens within it.
    """
    drawn, differences, trained = result["curves"], result["difference_curves"], result["trained_length"]
    labels = {line["key"]: line["label"] for line in result["lines"]}
    last = max(2.0, *(float(curve["position"][-1]) for curve in drawn))
    first = max(1.0, min(16.0, last / 16))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.0, 6.6 if differences else 4.8), layout="constrained")
        panels = list(figure.subplots(2, 1, sharex=True, height_ratios=(3, 2)) if differences else [figure.subplots()])
        for panel, shown in zip(panels, (drawn, differences), strict=False):
            for curve in shown:
                _line(panel, curve)
            _limit(panel, shown, first)
            if first < trained < last:
                panel.axvline(trained, color="#555555", lw=1.0, ls=(0, (4, 3)))
                place = {"rotation": 90, "ha": "right", "va": "top", "fontsize": 9, "color": "#555555"}
                text = f"trained length {tokens_label(trained)} "
                panel.text(trained, 0.99, text, transform=panel.get_xaxis_transform(), **place)
        if differences:
            lower = panels[1]
            lower.axhline(0, color="black", lw=0.9)
            if max(map(abs, lower.get_ylim())) > 1.0:
                lower.set_yscale("symlog", linthresh=0.1, linscale=0.6, base=10)
                lower.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:+g}" if v else "0"))
            lower.set_ylabel("Difference (nats)")
            lower.set_title(f"L(i) less that of {labels[_reference(labels)]}", fontsize=10)
        below = panels[-1]
        below.set_xscale("log", base=2)
        below.set_xlim(first, last)
        below.xaxis.set_major_formatter(FuncFormatter(lambda v, _: tokens_label(v)))
        below.xaxis.set_major_locator(LogLocator(base=2, numticks=14))
        below.xaxis.set_minor_formatter(NullFormatter())
        below.set_xlabel("Position i in the document (tokens, log scale)")
        panels[0].set_ylabel("Loss L(i) (nats per token)")
        count = result["documents"]
        subtitle = "1 document" if count == 1 else f"{count} documents, band: standard error over documents"
        set_titles(panels[0], "Per-token loss", subtitle)
        panels[0].legend(loc="best", fontsize=10, handlelength=2.6)
    return figure


def _line(axes: Any, curve: dict[str, Any]) -> None:
    """A curve and the band of its standard error; the first curve lies on top."""
    mean = np.array(curve["mean"], float)
    error = np.array([np.nan if e is None else e for e in curve["standard_error"]], float)
    colour, style = COLOURS[curve["look"] % len(COLOURS)], LINES[curve["look"] % len(LINES)]
    look = {"color": colour, "linestyle": style, "lw": 1.9, "zorder": 3.0 - 0.01 * curve["look"]}
    axes.plot(curve["position"], mean, label=curve["label"], **look)
    axes.fill_between(curve["position"], mean - error, mean + error, color=colour, alpha=0.12, linewidth=0)


def _limit(axes: Any, curves: Sequence[dict[str, Any]], first: float) -> None:
    shown = [m for curve in curves for m, at in zip(curve["mean"], curve["position"], strict=True) if at >= first]
    if len(shown) > 1:
        margin = 0.08 * max(max(shown) - min(shown), 0.01)
        axes.set_ylim(min(shown) - margin, max(shown) + margin)


def _reference(keys: Collection[str]) -> str:
    return "base" if "base" in keys else "model"


def _compared_to(key: str, keys: Collection[str]) -> str | None:
    """The line a line's difference is taken to: controls to the model, everything else to the base, if there is one."""
    if key in CONTROLS:
        return "model"
    return None if key == _reference(keys) else _reference(keys)


def _cell(value: Mapping[str, Any] | None, signed: bool = False) -> str:
    if value is None or value["mean"] is None:
        return "-"
    text = f"{value['mean']:+.4f}" if signed else f"{value['mean']:.4f}"
    error = value["standard_error"]
    return text if error is None else f"{text} ±{error:.3f}"
