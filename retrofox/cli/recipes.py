"""`retrofox recipes ls|show|cp|new` and `config schema|show` on the command line. Importing it imports no torch."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Annotated

import typer

from retrofox.cli.options import METAVAR, Overrides, RecipeFile, count

app = typer.Typer(no_args_is_help=True, help="The recipes that ship with retrofox: ls, show, cp; new writes one.")
Name = Annotated[str, typer.Argument(help="A name that `retrofox recipes ls` gives, such as smollm2-stretch.")]


@app.command("ls")
def ls() -> None:
    """Lists the recipes and the launch files for several GPUs: what for, GPUs, time, model. `show` has the rest."""
    from retrofox.config.shipped import shipped, summary

    rows = [[name, *summary(file)] for name, file in shipped().items()]
    padded = [row[:-1] for row in rows]
    widths = [max(map(len, column)) for column in itertools.zip_longest(*padded, fillvalue="")]
    for row in rows:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False)), row[-1]]))


@app.command("show")
def show(name: Name) -> None:
    """Prints a recipe."""
    from retrofox.config.shipped import named

    print(named(name).read_text(encoding="utf-8"), end="")


@app.command("cp")
def cp(
    name: Name,
    out: Annotated[Path | None, typer.Argument(help="File or directory to write to. [default: here]")] = None,
) -> None:
    """Copies a recipe here, to be changed and run: data, output and model are yours to set."""
    from retrofox.config.shipped import copy

    print(copy(name, out))


@app.command("new")
def new(
    model: Annotated[str, typer.Option(help="Hub id or directory of an unconverted model.")],
    out: Annotated[Path, typer.Option(help="File to write.")],
    length: Annotated[int, typer.Option(parser=count, metavar=METAVAR, help="Tokens of a row.")] = 32768,
    gpu: Annotated[str | None, typer.Option(help="As for plan; default: this machine's.")] = None,
    memory: Annotated[str | None, typer.Option(help="As for plan.")] = None,
    gpus: Annotated[int, typer.Option(min=1, help="How many.")] = 1,
    lora: Annotated[bool, typer.Option("--lora", help="Adapters, also where whole weights fit.")] = False,
) -> None:
    """Writes a recipe that fits the machine: whole weights, else adapters, else adapters on a 4-bit base.

    Data and output are yours to set in it.
    """
    from retrofox.planning.hardware import hardware
    from retrofox.planning.new_recipe import new_recipe

    if out.exists():
        raise ValueError(f"{out} exists: remove it or name another file")
    text = new_recipe(model, length, hardware(gpu, memory), gpus, adapters=lora)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    print(out)


config_app = typer.Typer(no_args_is_help=True, help="What a recipe may say: schema, show.")


@config_app.command("schema")
def print_schema() -> None:
    """Prints the JSON schema of a recipe, for editors and for reading."""
    from retrofox.config import schema

    print(json.dumps(schema(), indent=2))


@config_app.command("show")
def print_recipe(recipe: RecipeFile, changes: Overrides = None) -> None:
    """Prints a recipe as it will run: defaults filled in, changes applied."""
    from retrofox.config import dump, load_recipe

    print(dump(load_recipe(recipe, changes or [])), end="")
