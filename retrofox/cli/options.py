"""Options that several commands share. Importing it imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from retrofox.support.counts import ALLOWED, parse_count

METAVAR = "TOKENS"


def count(text: str | int) -> int:
    """A whole number of tokens from the command line, 1 or more."""
    number = parse_count(text)
    if not isinstance(number, int) or number < 1:
        raise typer.BadParameter(f"got {str(text)!r}: give {ALLOWED}, 1 or more")
    return number


MODEL = "a converted model: directory or Hub id (a plain model works too where it makes sense)"


def device(name: str) -> str:
    """A device's name, looked at before torch is imported."""
    if not re.fullmatch(r"(cpu|cuda|mps|xpu)(:\d+)?", name):
        raise typer.BadParameter(f"got {name!r}: give cpu, cuda or cuda:N")
    return name


Device = Annotated[
    str | None,
    typer.Option(parser=device, metavar="DEVICE", help="cpu, cuda, cuda:1, ...; default: CUDA where there is one."),
]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    typer.Option(
        metavar="DTYPE",
        help="float32, bfloat16 or float16 (gates stay float32); default: bfloat16 on a GPU, else float32.",
    ),
]
TextField = Annotated[str, typer.Option(help="Field of JSON or Parquet records that holds the text.")]
RecipeFile = Annotated[str, typer.Argument(help="The recipe: a YAML file, or the name of one that ships.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Changes to the recipe, a.b=value, such as stages.0.tokens=2M.")
]


def there(model: str) -> str:
    """A model's name, unless it is a path of this machine at which there is none.

    Raises:
        FileNotFoundError: there is none.
    """
    from retrofox.loading.source import read_config

    local = not Path(model).exists() and (model.startswith((".", "/", "~")) or model.count("/") != 1)
    if local or not model.strip():
        read_config(model)
    return model


def look(models: Sequence[str], data: Sequence[str] | None = None) -> None:
    """Raises, before torch is imported, for models and texts of this machine that are not there.

    Raises:
        FileNotFoundError: a model or text is not there.
        ValueError: nothing readable in a directory of texts.
    """
    from retrofox.data.windows import require_files

    for name in models:
        there(name)
    require_files(data or ())


def task_names(tasks: str | None) -> list[str]:
    """The tasks of --tasks, in order; none where it was not given.

    Raises:
        ValueError: it was given and names none.
    """
    names = [task.strip() for task in (tasks or "").split(",") if task.strip()]
    if tasks is not None and not names:
        raise ValueError(f"tasks must be names with commas between, such as short or arc_easy,piqa; got {tasks!r}")
    return names
