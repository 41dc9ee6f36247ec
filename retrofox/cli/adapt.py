"""`prepare`, `plan`, `train` and `merge` on the command line. Importing it imports no torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from retrofox.cli.options import Overrides, RecipeFile, require_there
from retrofox.support.interruptions import Interruptions


def prepare(recipe: RecipeFile, changes: Overrides = None) -> None:
    """Tokenises a recipe's data into memory-mapped shards (train does this too); finished shards are reused."""
    from retrofox.config import load_recipe

    loaded = load_recipe(recipe, changes or [])
    from retrofox.data.prepare import prepare as run

    print(json.dumps(run(loaded), indent=2, default=str))


def plan(
    recipe: RecipeFile,
    changes: Overrides = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="a100-40, a100-80, h100, h200, b200, l40s, 4090 or 5090; default: this machine's."),
    ] = None,
    memory: Annotated[str | None, typer.Option(help="Memory in place of the GPU's own, such as 80G.")] = None,
    flops: Annotated[str | None, typer.Option(help="Its peak of bfloat16 operations a second, such as 990T.")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="How many; default: 1, or as launched.")] = None,
    sharding: Annotated[
        Literal["ddp", "fsdp2", "zero3"] | None, typer.Option(help="Default: ddp where it fits, else fsdp2.")
    ] = None,
    price: Annotated[float | None, typer.Option(min=0, max=1e6, help="Dollars of one GPU's hour.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Also check all that train checks before it starts.")] = False,
    measure: Annotated[bool, typer.Option("--measure", help="Run two real steps of each stage here.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Says what a run takes on any machine: memory by part, hours, disk, price, and what to change if it doesn't fit.

    From the recipe and the model's config.json, in seconds. Exit code 2 where it lists refusals.
    """
    from retrofox.config import load_recipe
    from retrofox.planning.hardware import hardware
    from retrofox.planning.plan import plan as run
    from retrofox.planning.report import print_plan
    from retrofox.support.processes import processes

    loaded = load_recipe(recipe, changes or [])
    result = run(loaded, hardware(gpu, memory, flops), gpus or processes(), sharding, price)
    if check or measure:
        from retrofox.training.measure import check_here, measure_here

        result["refusals"] += [text for text in check_here(loaded) if text not in result["refusals"]]
        if measure and not result["refusals"]:
            measure_here(loaded, result, price)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(result, indent=2)) if as_json else print_plan(result)
    if result["refusals"]:
        raise typer.Exit(2)


def train(recipe: RecipeFile, changes: Overrides = None) -> None:
    """Converts and trains a model by a recipe; run again after an interruption, it resumes. On several GPUs:
    `accelerate launch -m retrofox train RECIPE`.
    """
    from retrofox.config import load_recipe

    loaded = load_recipe(recipe, changes or [])
    if not os.path.exists(loaded.output):  # a run that resumes may do without them
        require_there([loaded.model], [*loaded.data.train, *loaded.data.eval])
    from retrofox.training.train import train as run

    run(loaded)


def merge(
    adapter: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="A LoRA adapter directory trained by retrofox.")
    ],
    out: Annotated[Path, typer.Argument(help="Directory to write the merged model to.")],
) -> None:
    """Merges a LoRA adapter and its gates into its converted base and proves the logits equal."""
    from retrofox.conversion.merge import merge as run

    with Interruptions("nothing was written"):
        report = run(adapter, out)
    print(json.dumps(report, indent=2))
