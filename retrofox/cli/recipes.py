"""`retrofox recipes ls|show|cp` on the command line. Importing it imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="The recipes that ship with retrofox: ls, show, cp.")
Name = Annotated[str, typer.Argument(help="A name that `retrofox recipes ls` gives, such as smollm2-stretch.")]


@app.command("ls")
def ls(as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False) -> None:
    """Lists the recipes and the launch files for several GPUs: what for, GPUs, time, model. `show` has the rest."""
    from retrofox.config.shipped import shipped

    recipes = shipped()
    if as_json:
        print(json.dumps([{"name": r.name, "about": r.about, **r.facts} for r in recipes], indent=2))
        return
    rows = [[recipe.name, *recipe.row()] for recipe in recipes]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@app.command("show")
def show(name: Name) -> None:
    """Prints a recipe."""
    from retrofox.config.shipped import named

    print(named(name).text, end="")


@app.command("cp")
def cp(
    name: Name,
    out: Annotated[Path | None, typer.Argument(help="File or directory to write to. [default: here]")] = None,
) -> None:
    """Copies a recipe here, to be changed and run: data, output and model are yours to set."""
    from retrofox.config.shipped import copy

    print(copy(name, out))
