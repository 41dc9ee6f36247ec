"""`retrofox config schema|show` on the command line. Importing it imports no torch."""

from __future__ import annotations

import json

import typer

from retrofox.cli.options import Overrides, RecipeFile

app = typer.Typer(no_args_is_help=True, help="What a recipe may say: schema, show.")


@app.command("schema")
def print_schema() -> None:
    """Prints the JSON schema of a recipe, for editors and for reading."""
    from retrofox.config import schema

    print(json.dumps(schema(), indent=2))


@app.command("show")
def print_recipe(recipe: RecipeFile, changes: Overrides = None) -> None:
    """Prints a recipe as it will run: defaults filled in, changes applied."""
    from retrofox.config import dump, load_recipe

    print(dump(load_recipe(recipe, changes or [])), end="")
