"""How a trained model came about, for its card: the recipe and the loss over training."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import yaml
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def history(directory: Path) -> tuple[str, dict[str, bytes | Path]]:
    """(a section of the card, path in the repository -> content) about a model's training.

    A run keeps recipe.yaml and log.jsonl beside its model; both are empty for a model of no run.
    """
    lines, files = [], {}
    run = directory.absolute().parent
    if (run / "recipe.yaml").is_file() and (run / "log.jsonl").is_file():
        recipe = yaml.safe_load((run / "recipe.yaml").read_text(encoding="utf-8"))["recipe"]
        steps = _steps(run / "log.jsonl")
        files["training/recipe.yaml"] = yaml.safe_dump(recipe, sort_keys=False).encode()
        lines += ["## Training\n", "<details><summary>recipe</summary>\n", "```yaml"]
        lines += [yaml.safe_dump(recipe, sort_keys=False).rstrip(), "```\n", "</details>\n"]
        if steps:
            files["training/loss.csv"] = _csv(steps)
            files["training/loss.png"] = _curve(steps)
            lines += [f"{_summary(steps)}\n", "![loss over training tokens](training/loss.png)\n"]
    return "\n".join(lines), files


def _steps(log: Path) -> list[dict[str, Any]]:
    """Log lines that have a loss, tokens counted over all stages."""
    steps, done, before = [], 0, (0, 0)
    for line in log.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if "loss" not in entry or "tokens" not in entry:
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
