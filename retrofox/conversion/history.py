"""How a trained model came about, for its card: the recipe and the loss over training."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import yaml


def history(directory: Path) -> str:
    """A section of the card about a model's training, from the recipe.yaml and log.jsonl that a run keeps beside it.

    Empty for a model of no run.
    """
    run = directory.absolute().parent
    if not (run / "recipe.yaml").is_file() or not (run / "log.jsonl").is_file():
        return ""
    values = yaml.safe_load((run / "recipe.yaml").read_text(encoding="utf-8"))
    recipe = values.get("recipe") if isinstance(values, dict) else None
    if recipe is None:
        return ""
    text = yaml.safe_dump(recipe, sort_keys=False).rstrip()
    shown = f"<details><summary>recipe</summary>\n\n```yaml\n{text}\n```\n\n</details>\n"
    return f"## Training\n\n{_summary(run / 'log.jsonl')}{shown}"


def _summary(log: Path) -> str:
    """Tokens over all stages, first and last loss; a line that was cut short is left out."""
    losses: list[float] = []
    tokens: dict[int, int] = {}
    for line in log.read_bytes().split(b"\n"):
        entry: Any = None
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
        if isinstance(entry, dict) and {"stage", "tokens", "loss"} <= entry.keys():
            tokens[entry["stage"]] = entry["tokens"]
            losses.append(entry["loss"])
    if not losses:
        return ""
    return f"{sum(tokens.values()) / 1e6:.1f}M tokens, loss {losses[0]:.3f} at first and {losses[-1]:.3f} at last.\n\n"
