"""The recipes that ship with the package: listed, shown, copied. Importing it imports no torch."""

from __future__ import annotations

import difflib
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

HOME = Path(__file__).parents[1] / "shipped-recipes"
FACTS = ("short", "hardware", "tokens", "time", "result", "corpus")
"""Keys of an opening comment. short: what it is for | GPUs | time. corpus: the texts its result was measured on."""

OLD_NAMES = {"smollm2-partial": "smollm2-stretch", "longcrawl64-fox": "smollm2-fox-paper"}


@dataclass(frozen=True)
class ShippedRecipe:
    """A recipe, or a launch file for accelerate, as it lies in the package.

    Attributes:
        name: path below the recipes without its ending, such as "smollm2-stretch" or "accelerate/ddp".
        text: the whole file.
        about: its opening comment, as one paragraph.
        facts: those of FACTS that the comment states, for recipes; "run" -> the command, for launch files.
    """

    name: str
    text: str
    about: str
    facts: dict[str, str]

    def row(self) -> list[str]:
        """What it is for, GPUs, time, and the model; of a launch file the first alone."""
        model = re.search(r"^model: (\S+)", self.text, re.MULTILINE)
        short = self.facts.get("short", re.split(r"[.:] ", self.about)[0]).split(" | ")
        return [*short, *[""] * (3 - len(short)), model[1] if model else ""]


def shipped() -> list[ShippedRecipe]:
    """All of them by name, recipes before launch files."""
    files = sorted(HOME.rglob("*.yaml"), key=lambda file: (len(file.relative_to(HOME).parts), str(file)))
    return [_read(file) for file in files]


def named(name: str) -> ShippedRecipe:
    """The one of this name, with or without .yaml.

    Raises:
        ValueError: there is none; the text names the nearest and lists all.
    """
    recipes = {recipe.name: recipe for recipe in shipped()}
    wanted = _name(name)
    if wanted not in recipes:
        hint = _near(wanted, list(recipes))
        raise ValueError(f"no recipe {name!r} ships with retrofox{hint}; there are {', '.join(recipes)}")
    return recipes[wanted]


def _name(name: str) -> str:
    """The name of a shipped recipe as `shipped` has it."""
    given = name.removesuffix(".yaml").removeprefix("recipes/")
    if given not in OLD_NAMES:
        return given
    print(f"{given} is the old name of {OLD_NAMES[given]}", file=sys.stderr)
    return OLD_NAMES[given]


def _near(name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def recipe_file(recipe: str | os.PathLike[str]) -> Path:
    """The file of a recipe: a path, or else the name of one that ships.

    Raises:
        FileNotFoundError: neither.
    """
    path = Path(recipe)
    if path.exists() and not path.is_dir():  # a pipe is a recipe too: <(sed ...)
        return path
    name = _name(os.fspath(recipe))
    file = HOME / f"{name}.yaml"
    if file.is_file() and file.is_relative_to(HOME):
        return file
    names = [shipped.name for shipped in shipped()]
    raise FileNotFoundError(
        f"no recipe at {path}, and none of this name ships{_near(name, names)}: give the path of a YAML file, or "
        "a name that `retrofox recipes ls` lists"
    )


def copy(name: str, out: Path | None = None) -> Path:
    """Writes a shipped recipe to `out` (a file, or a directory to put it in; None = here) and returns the file.

    A name without a suffix, of nothing that is there, is a new directory's, in one that is there.

    Raises:
        ValueError: there is no such recipe, or the file exists, or can't be written.
    """
    recipe = named(name)
    target = Path() if out is None else out
    if target.is_dir() or not (target.suffix or target.exists()):
        target = target / f"{Path(recipe.name).name}.yaml"
    try:
        target.parent.mkdir(exist_ok=True)  # one new directory, not the path to it
        with open(target, "x", encoding="utf-8") as stream:
            stream.write(recipe.text)
    except FileExistsError as error:
        raise ValueError(f"{error.filename} exists: remove it or name another file") from None
    except OSError as error:
        raise ValueError(f"can't write {target}: {error.strerror}; name another file") from error
    return target


def _read(file: Path) -> ShippedRecipe:
    text = file.read_text(encoding="utf-8")
    comment = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        comment.append(line[1:])
    about, facts, key = [], {}, None
    for line in comment:
        if line.strip().startswith("accelerate launch"):
            facts["run"] = line.strip()
            continue
        word, colon, rest = line.strip().partition(":")
        if colon and word in FACTS:
            key, line = word, rest
        if key is None:
            about.append(line.strip())
        else:
            facts[key] = f"{facts.get(key, '')} {line.strip()}".strip()
    name = file.relative_to(HOME).with_suffix("").as_posix()
    return ShippedRecipe(name, text, " ".join(about).strip(), facts)
