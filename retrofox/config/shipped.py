"""The recipes that ship with the package: listed, shown, copied. Importing it imports no torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

from retrofox.spec_values import did_you_mean

HOME = Path(__file__).parents[1] / "shipped-recipes"


def shipped() -> dict[str, Path]:
    """Name, such as "smollm2-stretch" or "accelerate/ddp" -> file: recipes, then launch files for accelerate."""
    files = sorted(HOME.rglob("*.yaml"), key=lambda file: (len(file.relative_to(HOME).parts), str(file)))
    return {file.relative_to(HOME).with_suffix("").as_posix(): file for file in files}


def summary(file: Path) -> list[str]:
    """What a recipe is for, GPUs, time, and the model; of a launch file the first sentence of its second line."""
    text = file.read_text(encoding="utf-8")
    short = re.search(r"^# short: +(.+)", text, re.MULTILINE)
    model = re.search(r"^model: (\S+)", text, re.MULTILINE)
    if short is None or model is None:
        return [text.splitlines()[1].removeprefix("# ").split(". ")[0]]
    return [*short[1].split(" | "), model[1]]


def named(name: str) -> Path:
    """The file of this name, with or without .yaml; FileNotFoundError names the nearest and lists all."""
    wanted = name.removesuffix(".yaml").removeprefix("recipes/")
    recipes = shipped()
    if wanted not in recipes:
        hint = did_you_mean(wanted, recipes)
        raise FileNotFoundError(
            f"no recipe at {name}, and none of this name ships{hint and f' ({hint})'}: give the path of a YAML "
            f"file, or one of {', '.join(recipes)}"
        )
    return recipes[wanted]


def recipe_file(recipe: str | os.PathLike[str]) -> Path:
    """The file of a recipe: a path, or else the name of one that ships; FileNotFoundError where it is neither."""
    path = Path(recipe)
    if path.exists() and not path.is_dir():  # a pipe is a recipe too: <(sed ...)
        return path
    return named(os.fspath(recipe))


def copy(name: str, out: Path | None = None) -> Path:
    """Writes a shipped recipe to `out` (a file, or a directory that is there; None = here) and returns the file.

    Raises:
        OSError: there is no such recipe, or the file exists, or can't be written.
    """
    file = named(name)
    target = Path() if out is None else out
    if target.is_dir():
        target = target / file.name
    try:
        with open(target, "x", encoding="utf-8") as stream:
            stream.write(file.read_text(encoding="utf-8"))
    except FileExistsError:
        raise FileExistsError(f"{target} exists: remove it or name another file") from None
    return target
