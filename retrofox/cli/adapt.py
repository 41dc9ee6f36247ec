"""`prepare`, `plan`, `train` and `merge` on the command line. Importing it imports no torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from retrofox.cli.options import Overrides, RecipeFile


def prepare(recipe: RecipeFile, changes: Overrides = None) -> None:
    """Tokenises a recipe's data into memory-mapped shards (train does this too); finished shards are reused."""
    from retrofox.config import load_recipe

    loaded = load_recipe(recipe, changes or [])
    from retrofox.data.prepare import prepare as run

    print(json.dumps(run(loaded), indent=2, default=str))


def plan(
    recipe: RecipeFile,
    changes: Overrides = None,
    measure: Annotated[bool, typer.Option("--measure", help="Run two real steps for time and memory.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Reports what a training run needs before anything runs: parameters, memory, steps, hours, disk, refusals.

    Exit code 2 where it lists refusals: `train` would stop at the first of them.
    """
    from retrofox.config import load_recipe

    loaded = load_recipe(recipe, changes or [])
    from retrofox.planning.plan import plan as run

    result = run(loaded, measure=measure, show=not as_json)
    if as_json and os.environ.get("RANK", "0") == "0":
        print(json.dumps(result, indent=2))
    if result["refusals"]:
        raise typer.Exit(2)


def train(recipe: RecipeFile, changes: Overrides = None) -> None:
    """Adapts a model by a recipe; run again after an interruption, it resumes. On several GPUs: `accelerate launch -m
    retrofox train RECIPE`.
    """
    from retrofox.config import load_recipe

    loaded = load_recipe(recipe, changes or [])
    from retrofox.training.train import train as run

    run(loaded)


def merge(
    adapter: Annotated[Path, typer.Argument(help="A LoRA adapter directory trained by retrofox.")],
    out: Annotated[Path, typer.Argument(help="Directory to write the merged model to.")],
) -> None:
    """Merges a LoRA adapter and its gates into its converted base and proves the logits equal."""
    from retrofox.loading.source import check_out

    check_out(adapter, out)
    from retrofox.conversion.merge import merge as run

    print(json.dumps(run(adapter, out), indent=2))
