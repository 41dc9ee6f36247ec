"""How a trained model came about, for its card: the recipe and the loss over training."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import yaml
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from retrofox.loading.errors import first_line


def history(directory: Path) -> tuple[str, dict[str, bytes | Path]]:
    """(a section of the card, path in the repository -> content) about a model's training.

    A run keeps recipe.yaml and log.jsonl beside its model; both are empty for a model of no run.

    Raises:
        ValueError: recipe.yaml is damaged.
    """
    lines, files = [], {}
    run = directory.absolute().parent
    recipe = _recipe(run / "recipe.yaml")
    if recipe is not None and (run / "log.jsonl").is_file():
        steps = _steps(run / "log.jsonl")
        files["training/recipe.yaml"] = yaml.safe_dump(recipe, sort_keys=False).encode()
        lines += ["## Training\n", "<details><summary>recipe</summary>\n", "```yaml"]
        lines += [yaml.safe_dump(recipe, sort_keys=False).rstrip(), "```\n", "</details>\n"]
        if steps:
            files["training/loss.csv"] = _csv(steps)
            files["training/loss.png"] = _curve(steps)
            lines += [f"{_summary(steps)}\n", "![loss over training tokens](training/loss.png)\n"]
    return "\n".join(lines), files


def _recipe(file: Path) -> dict[str, Any] | None:
    """The recipe of a run; None where the file is not there or is not a run's."""
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{file} is damaged ({first_line(error)}): restore it, or push a copy of the model that lies elsewhere"
        ) from error
    recipe = values.get("recipe") if isinstance(values, dict) else None
    return recipe if isinstance(recipe, dict) else None


def _steps(log: Path) -> list[dict[str, Any]]:
    """Log lines that have a loss, tokens counted over all stages; a last one that was cut short has none."""
    steps, done, before = [], 0, (0, 0)
    for line in log.read_bytes().split(b"\n"):
        entry = None
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
        if not isinstance(entry, dict) or not {"stage", "tokens", "loss"} <= entry.keys():
            continue
        if entry["stage"] != before[0]:
            done += before[1]
        before = entry["stage"], entry["tokens"]
        steps.append({"stage": entry["stage"], "tokens": done + entry["tokens"], "loss": entry["loss"]})
    return steps


def _summary(steps: list[dict[str, Any]]) -> str:
    first, last = steps[0], steps[-1]
    return f"{last['tokens'] / 1e6:.1f}M tokens, loss {first['loss']:.3f} at first and {last['loss']:.3f} at last."


def _csv(steps: list[dict[str, Any]]) -> bytes:
    return "\n".join(["stage,tokens,loss", *(f"{s['stage']},{s['tokens']},{s['loss']}" for s in steps), ""]).encode()


def _curve(steps: list[dict[str, Any]]) -> bytes:
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for stage in sorted({step["stage"] for step in steps}):
        points = [(step["tokens"] / 1e6, step["loss"]) for step in steps if step["stage"] == stage]
        axes.plot(*zip(*points, strict=True), marker="." if len(points) == 1 else "", label=f"stage {stage + 1}")
    axes.set_xlabel("training tokens (millions)")
    axes.set_ylabel("training loss (nats per token)")
    axes.legend()
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()
