"""A recipe's file to a `Recipe` and back: overrides applied, errors that name the key and what is allowed."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from retrofox.config.fields import FOX_COUNTS, FOX_TOKENS
from retrofox.config.recipe import Recipe
from retrofox.config.yaml_text import apply_override, read_yaml, write_yaml
from retrofox.fox_spec import PRESETS
from retrofox.support.counts import PATTERN


def load_recipe(path: str | os.PathLike[str], overrides: list[str] | None = None) -> Recipe:
    """Reads a recipe and applies overrides such as "stages.0.tokens=20M" or "fox.sink_tokens=2".

    Args:
        path: a YAML file, also OUTPUT/recipe.yaml of a run, which holds its recipe and what it ran with.
        overrides: "a.b=c": c is parsed as YAML, a number in the path is an index into a list.

    Raises:
        FileNotFoundError: no such file.
        ValueError: broken YAML, an unknown or missing key, a value outside its range; the text names the file, the
            key, what was given and what is allowed.
    """
    file = Path(path)
    if file.is_dir() or not file.exists():  # a pipe is a recipe too: <(sed ...)
        raise FileNotFoundError(
            f"no recipe at {file}: give the path of a YAML file (`retrofox recipes cp NAME` copies one that ships, "
            "`retrofox config schema` describes them)"
        )
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 text ({error}): give the path of a YAML file") from None
    values = read_yaml(text, str(file))
    if not isinstance(values, dict):
        raise ValueError(f"{file}: a recipe is a mapping of keys to values, got {type(values).__name__}")
    if isinstance(values.get("recipe"), dict) and "retrofox" in values:
        values = values["recipe"]
    for override in overrides or []:
        apply_override(values, override)
    return validate(values, str(file))


def validate(values: dict[str, Any], origin: str = "recipe") -> Recipe:
    """Builds a Recipe from plain values; errors name `origin`, the key, what was given and what is allowed."""
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise ValueError("\n".join(f"{origin}: {line}" for line in _lines(error.errors()))) from None


def dump(recipe: Recipe) -> str:
    """The recipe as YAML with every default written out; loading it gives the same recipe."""
    return write_yaml(recipe.model_dump(mode="python"))


def schema() -> dict[str, Any]:
    """The JSON schema of a recipe, for editors."""
    result = Recipe.model_json_schema()
    text = {"type": "string", "pattern": f"^{PATTERN}$"}
    properties = result["$defs"]["FoxSpec"]["properties"]
    for key in (FOX_COUNTS | FOX_TOKENS) - {"half_life", "layer_max_wavelength"}:
        properties[key] = {"anyOf": [properties[key], text]}
    numbers = {"anyOf": [{"type": "number"}, text]}
    properties["half_life"]["anyOf"][0]["prefixItems"] = [numbers, numbers]
    properties["layer_max_wavelength"]["additionalProperties"] = numbers
    properties["preset"] = {"enum": [*PRESETS, None], "default": None, "title": "Preset"}
    return result


_UNION_MEMBERS = ("constrained-int", "int", "str", "function-before", "FoxSpec")
"""Names pydantic puts into an error's place for the branch of a union: not keys of the recipe."""


def _shown(given: object) -> str:
    """A value in at most 80 characters; Python writes out no integer of more than 4300 digits."""
    try:
        text = repr(given)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= 80 else text[:77] + "..."


def _lines(errors: Sequence[Any]) -> list[str]:
    """A line for each key with errors; a value that is none of several kinds has an error for each kind."""
    lines: dict[str, str] = {}
    for item in errors:
        key, message = ".".join(map(str, _place(item))) or "recipe", _explain(item)
        if key in lines:
            message = lines[key] + "; or " + message.removesuffix(f", given {_shown(item['input'])}")
        lines[key] = message
    return [f"{key}: {message}" for key, message in lines.items()]


def _place(item: Any) -> list[Any]:
    return [part for part in item["loc"] if part not in _UNION_MEMBERS and "[" not in str(part)]


def _explain(item: Any) -> str:
    """One pydantic error as a sentence: what was given, what is allowed."""
    place = _place(item)
    given = item["input"]
    shown = _shown(given)
    if item["type"] == "extra_forbidden":
        known = _known_keys(place[:-1])
        near = difflib.get_close_matches(str(place[-1]), known, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        return f"unknown key, given {shown}{hint}. Known keys: {', '.join(known)}"
    if item["type"] == "missing":
        return "required key is missing"
    if item["type"] == "literal_error":
        near = difflib.get_close_matches(str(given), re.findall(r"'([^']*)'", item["ctx"]["expected"]), n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        return f"given {shown}, allowed {item['ctx']['expected']}{hint}"
    message = item["msg"].removeprefix("Value error, ")
    return message[0].lower() + message[1:] + ("" if item["type"] == "value_error" else f", given {shown}")


def _known_keys(place: list[Any]) -> list[str]:
    """The keys of the section at a place such as ["stages", 0, "rates"]."""
    section: type[BaseModel] = Recipe
    for part in place:
        if isinstance(part, str) and part in section.model_fields:
            section = _section_of(section.model_fields[part].annotation) or section
    return list(section.model_fields)


def _section_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for inner in get_args(annotation) if (found := _section_of(inner))), None)
