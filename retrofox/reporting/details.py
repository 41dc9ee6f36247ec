"""Tables of a report that are folded away: slopes, context used, gates and heads by layer."""

from __future__ import annotations

from typing import Any

from retrofox.reporting.tables import table
from retrofox.support.plots import tokens_label


def slopes_table(loss: dict[str, Any]) -> str:
    """Slope of L(i) of every line, with its interval and the word that the interval allows."""
    rows = []
    for line in loss["lines"]:
        cells: list[str] = [line["label"]]
        for name in ("slope_per_doubling", "late_slope_per_1k"):
            slope = line[name]
            if slope["slope"] is None:
                cells.append("-")
            elif slope["interval"] is None:
                cells.append(f"{slope['slope']:+.4f}")
            else:
                low, high = slope["interval"]
                cells.append(f"{slope['trend']}: {slope['slope']:+.4f} ({low:+.4f} to {high:+.4f})")
        rows.append(cells)
    return table(["", "nats per octave", "nats per 1000 tokens, second half"], rows)


def short_context_table(loss: dict[str, Any]) -> str:
    """Loss with the last k tokens only, less the loss with all of the text."""
    lines = [line for line in loss["lines"] if line.get("short_context")]
    rows = []
    for number, first in enumerate(lines[0]["short_context"]):
        cells = [tokens_label(first["tokens"])]
        for line in lines:
            value = line["short_context"][number]["excess"]
            ends = "" if value["interval"] is None else " ({:+.4f} to {:+.4f})".format(*value["interval"])
            cells.append(f"{value['mean']:+.4f}{ends}")
        rows.append(cells)
    return table(["last k tokens only", *(line["label"] for line in lines)], rows)


def gates_table(gates: dict[str, Any]) -> str:
    """Per layer: rotary pairs kept, kinds of heads; with texts also attention mass by distance and copy scores."""
    models = gates.get("attention", [])
    beyond = list(models[0]["heads"][0]["mass_beyond"]) if models else []
    several = len(models) > 1
    header = ["layer", "rotary kept", "local", "between", "global", "dead"]
    for model in models:
        name = f"{model['label']}: " if several else ""
        header += [f"{name}> {tokens_label(int(d))}" for d in beyond] + [f"{name}best copy score"]
        header += [f"{name}pruning skips"] if "prune_skips" in model["summary"] else []
    rows = []
    for layer in gates["layers"]:
        own = [head for head in gates["heads"] if head["layer"] == layer["layer"]]
        cells: list[object] = [layer["layer"], f"{layer['rotary_pairs_kept']}/{layer['rotary_pairs']}"]
        cells += [sum(head["kind"] == kind for head in own) for kind in ("local", "medium", "global")]
        cells.append(sum(head["dead"] for head in own))
        for model in models:
            heads = [head for head in model["heads"] if head["layer"] == layer["layer"]]
            cells += [_mean([head["mass_beyond"][d] for head in heads]) for d in beyond]
            cells.append(f"{max(head['copy_score'] for head in heads):.2f}" if heads else "-")
            if "prune_skips" in model["summary"]:
                cells.append(_mean([head["prune_skips"] for head in heads]))
        rows.append(cells)
    title = "Layer by layer" + (": attention mass beyond so many tokens, mean over heads" if models else "")
    return f"<details><summary>{title}</summary>{table(header, rows)}</details>"


def _mean(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{100 * sum(known) / len(known):.1f} %" if known else "-"
