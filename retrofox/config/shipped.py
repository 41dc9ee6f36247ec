"""The recipes that ship with the package: listed, shown, copied. Importing it imports no torch."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from retrofox.spec_values import did_you_mean

HOME = Path(__file__).parents[1] / "shipped-recipes"


@dataclass(frozen=True)
class ShippedRecipe:
    """A recipe, or a launch file for accelerate, as it lies in the package.

    Attributes:
        name: path below the recipes without its ending, such as "smollm2-stretch" or "accelerate/ddp".
    """

    name: str
    file: Path

    @property
    def text(self) -> str:
        """The whole file."""
        return self.file.read_text(encoding="utf-8")

    def row(self) -> list[str]:
        """What it is for, GPUs, time, and the model; of a launch file the first sentence of its second line."""
        text = self.text
        short = re.search(r"^# short: +(.+)", text, re.MULTILINE)
        model = re.search(r"^model: (\S+)", text, re.MULTILINE)
        if short is None or model is None:
            return [text.splitlines()[1].removeprefix("# ").split(". ")[0]]
        return [*short[1].split(" | "), model[1]]


def shipped() -> list[ShippedRecipe]:
    """All of them by name, recipes before launch files."""
    files = sorted(HOME.rglob("*.yaml"), key=lambda file: (len(file.relative_to(HOME).parts), str(file)))
    return [ShippedRecipe(file.relative_to(HOME).with_suffix("").as_posix(), file) for file in files]


def named(name: str) -> ShippedRecipe:
    """The one of this name, with or without .yaml.

    Raises:
        FileNotFoundError: there is none; the text names the nearest and lists all.
    """
    wanted = name.removesuffix(".yaml").removeprefix("recipes/")
    recipes = {recipe.name: recipe for recipe in shipped()}
    if wanted not in recipes:
        hint = did_you_mean(wanted, recipes)
        raise FileNotFoundError(
            f"no recipe at {name}, and none of this name ships{hint and f' ({hint})'}: give the path of a YAML "
            f"file, or one of {', '.join(recipes)}"
        )
    return recipes[wanted]


def recipe_file(recipe: str | os.PathLike[str]) -> Path:
    """The file of a recipe: a path, or else the name of one that ships.

    Raises:
        FileNotFoundError: neither.
    """
    path = Path(recipe)
    if path.exists() and not path.is_dir():  # a pipe is a recipe too: <(sed ...)
        return path
    return named(os.fspath(recipe)).file


def copy(name: str, out: Path | None = None) -> Path:
    """Writes a shipped recipe to `out` (a file, or a directory that is there; None = here) and returns the file.

    Raises:
        OSError: there is no such recipe, or the file exists, or can't be written.
    """
    recipe = named(name)
    target = Path() if out is None else out
    if target.is_dir():
        target = target / recipe.file.name
    try:
        with open(target, "x", encoding="utf-8") as stream:
            stream.write(recipe.text)
    except FileExistsError:
        raise FileExistsError(f"{target} exists: remove it or name another file") from None
    return target
