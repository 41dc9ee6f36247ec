"""Options that several commands share. Importing it imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from retrofox.support.counts import ALLOWED, parse_count

if TYPE_CHECKING:
    from retrofox.data.sources import Text

METAVAR = "TOKENS"


def count(text: str | int) -> int:
    """A whole number of tokens from the command line, 1 or more."""
    number = parse_count(text)
    if not isinstance(number, int) or number < 1:
        raise typer.BadParameter(f"got {str(text)!r}: give {ALLOWED}, 1 or more")
    return number


MODEL = "a converted model: directory or Hub id (a plain model works too where it makes sense)"


Device = Annotated[
    str | None,
    typer.Option(metavar="DEVICE", help="cpu, cuda, cuda:1, ...; default: CUDA where there is one."),
]
Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    typer.Option(
        metavar="DTYPE",
        help="float32, bfloat16 or float16 (gates stay float32); default: bfloat16 on a GPU, else float32.",
    ),
]
TextField = Annotated[str, typer.Option(help="Field of JSON or Parquet records that holds the text.")]
Tasks = Annotated[
    str | None,
    typer.Option(help="lm-eval tasks by name, or short, ruler, longbench (pip install '.[eval]' in a clone)."),
]
RecipeFile = Annotated[str, typer.Argument(help="The recipe: a YAML file, or the name of one that ships.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Changes to the recipe, a.b=value, such as stages.0.tokens=2M.")
]


def require_there(models: Sequence[str], texts: Sequence[Text] = ()) -> None:
    """Refuses models and texts that are not there, before seconds go by in importing torch."""
    from retrofox.data.windows import require_files
    from retrofox.loading.source import holds_converted

    for model in models:
        holds_converted(model)
    require_files(texts)


def task_names(tasks: str | None) -> list[str]:
    """The tasks of --tasks, in order; none where it was not given."""
    return [task.strip() for task in (tasks or "").split(",") if task.strip()]
