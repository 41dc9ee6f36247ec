"""A recipe's file to a `Recipe` and back: overrides applied, errors that name the key and what is allowed."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import ValidationError

from retrofox.config.fields import Section
from retrofox.config.recipe import Recipe
from retrofox.config.shipped import recipe_file
from retrofox.config.yaml_text import apply_override, read_yaml, write_yaml
from retrofox.fox_spec import PRESETS
from retrofox.spec_values import TOKENS, did_you_mean
from retrofox.support.counts import PATTERN
from retrofox.support.files import text_of


def load_recipe(path: str | os.PathLike[str], overrides: list[str] | None = None) -> Recipe:
    """Reads a recipe and applies overrides such as "stages.0.tokens=20M" or "fox.sink_tokens=2".

    Args:
        path: a YAML file, also OUTPUT/recipe.yaml of a run, which holds its recipe and what it ran with; or the name
            of a recipe that ships, such as "smollm2-lora".
        overrides: "a.b=c": c is parsed as YAML, a number in the path is an index into a list.

    Raises:
        FileNotFoundError: no such file.
        ValueError: broken YAML, an unknown or missing key, a value outside its range; the text names the file, the
            key, what was given and what is allowed.
    """
    file = recipe_file(path)
    values = read_yaml(text_of(file), str(file))
    if not isinstance(values, dict):
        got = "nothing" if values is None else f"a {type(values).__name__}"
        raise ValueError(f"{file}: a recipe is a mapping of keys to values, got {got}")
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
    for key in TOKENS - {"half_life", "layer_max_wavelength"}:
        properties[key] = {"anyOf": [properties[key], text]}
    numbers = {"anyOf": [{"type": "number"}, text]}
    properties["half_life"]["anyOf"][0]["prefixItems"] = [numbers, numbers]
    properties["layer_max_wavelength"]["additionalProperties"] = numbers
    properties["preset"] = {"enum": [*PRESETS, None], "default": None, "title": "Preset"}
    return result


_UNION_MEMBERS = ("constrained-int", "int", "str", "function-before", "FoxSpec")
"""Names pydantic puts into an error's place for the branch of a union: not keys of the recipe."""


def _lines(errors: Sequence[Any]) -> list[str]:
    """A line for each key with errors; a value that is none of several kinds has an error for each kind."""
    lines: dict[str, str] = {}
    for item in errors:
        key, message = _explain(item)
        lines[key] = f"{lines[key]}; or {message}" if key in lines else message
    return [f"{key}: {message}" for key, message in lines.items()]


def _explain(item: Any) -> tuple[str, str]:
    """One pydantic error as the key of the recipe and a sentence: what was given, what is allowed."""
    place, section = _trace(item["loc"])
    kind, given, context = item["type"], item["input"], item.get("ctx", {})
    shown = repr(given)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    if kind == "union_tag_not_found":
        return ".".join([*place, context["discriminator"].strip("'")]), "required key is missing"
    if kind == "union_tag_invalid":
        place, given, kind = [*place, context["discriminator"].strip("'")], context["tag"], "literal_error"
        shown, context = repr(given), {"expected": " or ".join(context["expected_tags"].rsplit(", ", 1))}
    key = ".".join(place) or "recipe"
    if kind == "missing":
        return key, "required key is missing"
    if kind == "extra_forbidden":
        known = list(section.model_fields)
        hint = section.hints.get(place[-1]) or _only_with(place[-1], section) or did_you_mean(place[-1], known)
        return key, f"unknown key, given {shown}{hint and f' ({hint})'}. Known keys: {', '.join(known)}"
    if kind == "literal_error":
        allowed = context["expected"]
        hint = did_you_mean(given, re.findall(r"'([^']*)'", allowed))
        return key, f"given {shown}, allowed {allowed}{hint and f' ({hint})'}"
    message = item["msg"].removeprefix("Value error, ")
    return key, message[0].lower() + message[1:] + ("" if kind == "value_error" else f", given {shown}")


def _only_with(key: str, section: type[Section]) -> str:
    """A hint naming the objectives that take a key which this stage doesn't take; "" where none does."""
    kinds = _sections(Recipe.model_fields["stages"].annotation)
    having = [kind for kind in kinds if section in kinds and key in kind.model_fields]
    objectives = [name for kind in having for name in get_args(kind.model_fields["objective"].annotation)]
    return f"only with objective {' or '.join(objectives)}" if objectives else ""


def _trace(loc: Sequence[Any]) -> tuple[list[str], type[Section]]:
    """The keys on the way to an error, and its section."""
    place: list[str] = []
    kinds: list[type[Section]] = [Recipe]
    for part in loc:
        if len(kinds) > 1 and isinstance(part, str):  # the kind of a section, which pydantic puts into the place
            kinds = [kind for kind in kinds if part in get_args(kind.model_fields["objective"].annotation)]
            continue
        if part in _UNION_MEMBERS or "[" in str(part):
            continue
        place.append(str(part))
        if (
            isinstance(part, str)
            and part in kinds[0].model_fields
            and (sections := _sections(kinds[0].model_fields[part].annotation))
        ):
            kinds = sections
    return place, kinds[0]


def _sections(annotation: Any) -> list[type[Section]]:
    """The sections that an annotation names: more than one where a key tells kinds apart."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for inner in get_args(annotation) for section in _sections(inner)]
