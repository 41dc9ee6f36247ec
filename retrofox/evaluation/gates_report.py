"""What `retrofox inspect` reports: tables of half-lives and heads, files, images of chosen heads."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from rich.console import Console
from rich.table import Table

from retrofox.support.files import write_result
from retrofox.support.plots import STYLE, _titles, half_life_figure, save_csv, save_figure, tokens_label

PERCENTILES = (5, 25, 50, 75, 95)
Images = Mapping[str, dict[str, Any]]
"""By name, such as "3.1", the images "attention" and "decay" of one head, "tokens" that they cover, and a "title"."""


def print_gates(result: dict[str, Any], console: Console) -> None:
    measured = f"measured over {result['tokens']:,} tokens" if result["tokens"] else "from the gate biases alone"
    table = Table(title=f"{result['model']}: half-lives in tokens, {measured}", title_justify="left")
    for name, side in (
        ("layer", "right"),
        ("rotary kept", "right"),
        ("sinks", "right"),
        ("half-life of each head", "left"),
    ):
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    for name in ("local", "global", "dead", "saturated"):
        table.add_column(name, justify="right")
    how = "slower" if result["fox"]["rope"] == "interpolate" else "fading"
    for layer in result["layers"]:
        heads = [h for h in result["heads"] if h["layer"] == layer["layer"]]
        fading = f" +{layer['rotary_pairs_fading']} {how}" if layer["rotary_pairs_fading"] else ""
        table.add_row(
            str(layer["layer"]),
            f"{layer['rotary_pairs_kept']}/{layer['rotary_pairs']}{fading}",
            str(layer["sink_tokens"]),
            " ".join(f"{_label(h['half_life']):>5}" for h in heads) or "no gates",
            str(sum(h["kind"] == "local" for h in heads)),
            str(sum(h["kind"] == "global" for h in heads)),
            str(sum(h["dead"] for h in heads)),
            str(sum(h["saturated"] for h in heads)),
        )
    console.print(table)
    summary, trained = result["summary"], result["trained_length"]
    console.print(
        f"{summary['heads']} heads: {summary['local']} local (under {tokens_label(trained / 16)}), {summary['medium']} "
        f"between, {summary['global']} global (from {tokens_label(trained)}); {summary['dead']} dead, "
        f"{summary['saturated']} saturated",
        highlight=False,
    )


def _label(half_life: float | None) -> str:
    return "inf" if half_life is None or half_life > 1e9 else tokens_label(half_life)


def write_gates(result: dict[str, Any], out: Path, images: Images) -> dict[str, str]:
    header = [
        "layer",
        "head",
        "bias",
        "weight_norm",
        "half_life",
        "half_life_of_bias",
        "kind",
        "dead",
        "saturated_share",
    ]
    percentiles = [f"half_life_p{p}" for p in PERCENTILES] if result["tokens"] else []
    rows = [
        [h[name] for name in header] + [h["half_life_percentiles"][str(p)] for p in PERCENTILES if percentiles]
        for h in result["heads"]
    ]
    files = {"csv": save_csv(out / "gates.csv", header + percentiles, rows)}
    if "attention" in result:
        files["heads_csv"] = save_csv(out / "heads.csv", *_head_rows(result["attention"]))
    for name, image in images.items():
        files[f"map_{name}_png"], files[f"map_{name}_svg"] = save_figure(_map_figure(image), out / f"map-{name}")
    if result["heads"]:
        trained = result["trained_length"]
        by_layer = [
            [math.inf if h["half_life"] is None else h["half_life"] for h in result["heads"] if h["layer"] == n]
            for n in range(len(result["layers"]))
        ]
        figure = half_life_figure(
            by_layer,
            local_below=trained / 16,
            global_from=trained,
            ceiling=trained * 128,
            subtitle=f"measured over {result['tokens']:,} tokens" if result["tokens"] else "from the gate biases alone",
        )
        files["png"], files["svg"] = save_figure(figure, out / "half_lives")
    files["json"] = str(out / "gates.json")
    write_result(files["json"], (json.dumps({**result, "files": files}, indent=1, allow_nan=False) + "\n").encode())
    return files


def print_heads(models: Sequence[dict[str, Any]], console: Console) -> None:
    """Per layer and model, the means over heads of the masses; then each model's retrieval heads, and what changed."""
    beyond = list(models[0]["heads"][0]["mass_beyond"])
    table = Table(title="Attention mass, mean over heads, and the best copy score", title_justify="left")
    table.add_column("layer", justify="right")
    for model in models:
        for name in ("first tokens", *(f"> {tokens_label(int(d))}" for d in beyond), "copy"):
            table.add_column(f"{model['label']} {name}" if len(models) > 1 else name, justify="right")
        if "prune_skips" in model["summary"]:
            table.add_column(f"{model['label']} skipped" if len(models) > 1 else "skipped", justify="right")
    for layer in sorted({head["layer"] for model in models for head in model["heads"]}):
        cells = []
        for model in models:
            heads = [head for head in model["heads"] if head["layer"] == layer]
            cells += [_share([h["first_token_mass"] for h in heads])]
            cells += [_share([h["mass_beyond"][d] for h in heads]) for d in beyond]
            cells += [f"{max(h['copy_score'] for h in heads):.2f}" if heads else "-"]
            if "prune_skips" in model["summary"]:
                cells += [_share([h["prune_skips"] for h in heads])]
        table.add_row(str(layer), *cells)
    console.print(table)
    for sentence in head_sentences(models):
        console.print(sentence, highlight=False, soft_wrap=True)


def head_sentences(models: Sequence[dict[str, Any]]) -> list[str]:
    """Per model its retrieval heads and where its attention goes; with two, how many retrieval heads both have."""
    sentences = []
    for model in models:
        summary = model["summary"]
        names = summary["retrieval_heads"]
        label = f"{model['label']}: " if len(models) > 1 else ""  # alone it is named in the first table
        shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        masses = ", ".join(
            f"{100 * mass:.1f} % beyond {tokens_label(int(d))}"
            for d, mass in summary["mass_beyond"].items()
            if mass is not None
        )
        skipped = summary.get("prune_skips")
        more = "" if skipped is None else f"; pruning may skip {100 * skipped:.1f} % of the pairs"
        found = f"{len(names)} retrieval heads ({shown})" if names else "no retrieval head"
        sentences.append(f"{label}{found}; attention {masses or 'of texts too short to look far back'}{more}")
    if len(models) == 2:
        after, before = (set(model["summary"]["retrieval_heads"]) for model in models)
        sentences.append(
            f"of {len(before)} retrieval heads in {models[1]['label']}, {len(before & after)} are retrieval heads in "
            f"{models[0]['label']}"
        )
    return sentences


def _share(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{100 * sum(known) / len(known):.1f} %" if known else "-"


def _head_rows(models: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[object]]]:
    """One row per model and head."""
    beyond = list(models[0]["heads"][0]["mass_beyond"])
    header = ["model", "layer", "head", "copy_score", "retrieval", "first_token_mass"]
    header += [f"mass_beyond_{d}" for d in beyond] + ["prune_skips"]
    rows = [
        [model["label"], *(head[name] for name in header[1:6]), *head["mass_beyond"].values(), head.get("prune_skips")]
        for model in models
        for head in model["heads"]
    ]
    return header, rows


def _map_figure(image: dict[str, Any]) -> Figure:
    """Attention and forget-gate matrix of one head side by side: queries down, keys across."""
    tokens = int(image["tokens"])
    with matplotlib.rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(10.0, 4.6), layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(1, 2)
        floor = 1e-4 / image["attention"].shape[0]
        for axes, values, title, norm in (
            (panels[0], np.maximum(image["attention"], floor), "Attention (log scale)", LogNorm(floor, 1.0)),
            (panels[1], image["decay"], "Forget-gate matrix F", Normalize(0.0, 1.0)),
        ):
            shown = axes.imshow(
                values, cmap="cividis", norm=norm, extent=(0, tokens, tokens, 0), interpolation="nearest"
            )
            axes.set_xlabel("Key j (tokens)")
            _titles(axes, title, image["title"] if axes is panels[0] else " ")
            bar = figure.colorbar(shown, ax=axes, pad=0.03, shrink=0.86)
            bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
            bar.outline.set_visible(False)  # type: ignore[operator]
        panels[0].set_ylabel("Query i (tokens)")
    return figure
