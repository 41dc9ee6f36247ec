"""`--half-life 8 64` for `fox.half_life=[8,64]`: an option for each field of FoxSpec. Importing it imports no torch."""

from __future__ import annotations

import functools
import inspect
import re
import typing
from collections.abc import Callable
from typing import Annotated, Any

import typer

from retrofox.cli.options import METAVAR
from retrofox.fox_spec import PRESETS, STATE, FoxSpec
from retrofox.spec_values import TOKENS


def with_spec_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command with an option for each field of FoxSpec; those given arrive as `fox`, field -> text of its value."""
    hints = typing.get_type_hints(command, include_extras=True)
    parameters = inspect.signature(command).parameters
    own = [parameter.replace(annotation=hints[name]) for name, parameter in parameters.items()]
    options = [_option(name, about) for name, about in spec_fields().items()]
    at = next(number for number, parameter in enumerate(own) if parameter.name == "fox")

    @functools.wraps(command)
    def wrapped(**values: Any) -> None:
        given = {option.name: values.pop(option.name) for option in options}
        command(**values, fox={name: value for name, value in given.items() if value is not None})

    signature = inspect.Signature([*own[:at], *options, *own[at + 1 :]])
    wrapped.__signature__ = signature  # type: ignore[attr-defined]
    wrapped.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    return wrapped


def spec_fields() -> dict[str, str]:
    """Field of FoxSpec that a user may set -> its meaning, from FoxSpec's docstring."""
    arguments = inspect.getdoc(FoxSpec).partition("Args:\n")[2].partition("\n\n")[0]  # type: ignore[union-attr]
    found = {name: " ".join(text.split()) for name, text in re.findall(r"^ {4}(\w+): ((?:.|\n {8})*)", arguments, re.M)}
    systems = "; ".join(f"{name}: {what}" for name, (_, what) in PRESETS.items())
    preset = f"a published system, whose fields those given beside it change; kept as a note. {systems}."
    return {"preset": preset} | {name: text for name, text in found.items() if name not in STATE}


def spec_of(changes: list[str], options: dict[str, Any]) -> FoxSpec:
    """The spec of "fox.a=b" changes and of options, each read as YAML; an option goes before a change."""
    from retrofox.config.fields import read_fox
    from retrofox.config.yaml_text import apply_override, read_yaml

    values: dict[str, Any] = {"fox": {}}
    for change in changes:
        if not change.startswith("fox."):
            raise ValueError(f"convert takes changes of fox, such as fox.horizon=16; got {change!r}")
        apply_override(values, change)
    for name, given in options.items():
        flag = _flag(name)
        parts = [read_yaml(text, flag) for text in ([given] if isinstance(given, str) else given)]
        values["fox"][name] = parts[0] if isinstance(given, str) else parts
    return read_fox(values["fox"])


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _option(name: str, about: str) -> inspect.Parameter:
    pair = name == "half_life"
    metavar = "MIN MAX" if pair else METAVAR if name in TOKENS else "TEXT"
    kind: Any = tuple[str, str] if pair else str
    annotation = Annotated[kind | None, typer.Option(_flag(name), metavar=metavar, help=about, show_default=False)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
