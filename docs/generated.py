"""The generated parts of the pages: commands, recipe fields, families and recipes, and the tables of figures.py.

    python docs/generated.py      # writes them into the pages, so that they can be read without the site

Each function returns Markdown; a page names it in `<!-- generated: name -->`, and has it from there to `<!-- end -->`.
Commands and recipe fields stay out of the pages: libraries word them, and `--help` has them. The site makes all anew.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import figures
import figures_of_retrofit
import figures_of_use
import typer
from figures import table

from retrofox.cli.app import app
from retrofox.config import schema
from retrofox.config.shipped import shipped, summary
from retrofox.fox_spec import PRESETS, FoxSpec
from retrofox.model.configuration_fox import SUPPORTED

MARK = re.compile(r"<!-- generated: ([a-z_]+) -->(?:\n\n(?:(?!<!--).)*?<!-- end -->)?", re.S)


def fill_in(markdown: str) -> str:
    """A page with its generated parts in place of their marks.

    Raises:
        ValueError: a part that isn't known.
    """
    return MARK.sub(lambda mark: part(mark[1]), markdown)


def written(markdown: str) -> str:
    """A page with its generated parts behind their marks, but for those of the site alone."""

    def block(mark: re.Match[str]) -> str:
        start = f"<!-- generated: {mark[1]} -->"
        return start if PARTS.get(mark[1]) in OF_THE_SITE else f"{start}\n\n{part(mark[1])}\n\n<!-- end -->"

    return MARK.sub(block, markdown)


def part(name: str) -> str:
    """The Markdown of one generated part.

    Raises:
        ValueError: there is none of this name.
    """
    if name not in PARTS:
        raise ValueError(f"no generated part {name!r}; there are {', '.join(PARTS)}")
    return PARTS[name]()


def commands() -> str:
    """Every command with its help text, arguments and options."""
    return "\n\n".join(_command(typer.main.get_command(app), "retrofox"))


def _command(command: Any, name: str) -> list[str]:
    """A command's sections; of a group those of its commands, too."""
    context = command.make_context(name, [], resilient_parsing=True)
    inner = getattr(command, "commands", None)
    if inner:
        title = [] if name == "retrofox" else [f"## {name}", command.help]
        return title + [text for key, value in inner.items() for text in _command(value, f"{name} {key}")]
    sections = [f"## {name}", " ".join(command.help.split("\n\n")[0].split())]
    sections += [" ".join(text.split()) for text in command.help.split("\n\n")[1:]]
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    usage = " ".join([name, *(f"{p.name.upper()}{'...' if p.nargs == -1 else ''}" for p in arguments)])
    sections.append(f"```text\n{usage}{' [OPTIONS]' if len(arguments) < len(command.params) else ''}\n```")
    rows = []
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is not None:
            word = parameter.name.upper() if parameter in arguments else record[0]
            meaning = " ".join(record[1].replace("<", "&lt;").split()).replace("] [", "; ")
            rows.append([f"`{word}`", meaning])
    if rows:
        sections.append(table(["argument or option", "meaning"], rows, left=2))
    return sections


def recipe_fields() -> str:
    """Every field of a recipe, by section: accepted values, default, meaning."""
    whole = schema()
    sections = {"The recipe": _rows(whole)}
    for name, section in whole["$defs"].items():
        if name != FoxSpec.__name__:  # its fields have a page of their own: FoxSpec in the Python API
            sections[name] = _rows(section)
    about = {"The recipe": whole["description"], **{name: part["description"] for name, part in whole["$defs"].items()}}
    for key, field in whole["properties"].items():
        kinds = _kinds(field)
        if len(kinds) > 1:
            shared = [row for row in sections[kinds[0]] if all(row in sections[kind] for kind in kinds)]
            sections |= {kind: [row for row in sections[kind] if row not in shared] for kind in kinds}
            sections[f"All kinds of {key}"] = shared
            about[f"All kinds of {key}"] = f"Fields that {', '.join(kinds)} have in common."
    header = ["field", "takes", "default", ""]
    return "\n\n".join(f"## {name}\n\n{about[name]}\n\n{table(header, rows, 4)}" for name, rows in sections.items())


def _rows(section: dict[str, Any]) -> list[list[str]]:
    """A section's fields as rows of a table."""
    required = section.get("required", ())
    return [
        [f"`{key}`", _takes(field), "required" if key in required else _default(field), field.get("description", "")]
        for key, field in section["properties"].items()
    ]


def _kinds(field: Any) -> list[str]:
    """The kinds of a section that a field of a JSON schema tells apart by a key of theirs."""
    if isinstance(field, dict):
        kinds = [option["$ref"].rsplit("/", 1)[1] for option in field.get("oneOf", ())]
        return kinds or [kind for inner in field.values() for kind in _kinds(inner)]
    return [kind for inner in field for kind in _kinds(inner)] if isinstance(field, list) else []


def _default(field: dict[str, Any]) -> str:
    value = field.get("default")
    return "" if isinstance(value, dict) else f"`{json.dumps(value)}`"


def _takes(field: dict[str, Any]) -> str:
    """What a field of a JSON schema takes, in a few words."""
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    if "$ref" in field:
        name = field["$ref"].rsplit("/", 1)[1]
        return "[FoxSpec](api.md#retrofox.FoxSpec)" if name == FoxSpec.__name__ else f"[{name}](#{name.lower()})"
    options = field.get("anyOf") or field.get("oneOf")
    if options:
        return " or ".join(dict.fromkeys(_takes(option) for option in options))
    if field["type"] == "array":
        return f"list of {_takes(field['items'])}"
    if "pattern" in field:
        return "a count such as 64K, 512Ki or 20M"
    kind: str = field["type"]
    return {"null": "null", "string": "text", "boolean": "true or false"}.get(kind, kind)


def families() -> str:
    """The table of families that can be converted."""
    rows = [
        [f"`{model_type}`", f"`{prefix}ForCausalLM`", f"`fox_{model_type}`", f"`Fox{prefix}ForCausalLM`"]
        for model_type, prefix in sorted(SUPPORTED.items())
    ]
    header = ["model_type", "class in transformers", "converted model_type", "converted class"]
    return f"{len(rows)} model types:\n\n" + table(header, rows, left=4)


def presets() -> str:
    """The published systems that --preset names, and the fields of each that differ from the defaults."""
    rows = []
    for name, (fields, about) in PRESETS.items():
        changes = [f"{key}: {', '.join(value) if isinstance(value, tuple) else value}" for key, value in fields.items()]
        rows.append([f"`{name}`", about, "; ".join(f"`{change}`" for change in changes) or "none"])
    return table(["`--preset`", "system", "fields that differ from the defaults"], rows, left=3)


def shipped_recipes() -> str:
    """The recipes and launch files that ship, a line each, as `retrofox recipes ls` has them."""
    rows = [[f"`{name}`", *summary(file)] for name, file in shipped().items()]
    recipes = [row[:4] for row in rows if len(row) > 2]
    launches = [row for row in rows if len(row) == 2]
    header = ["recipe", "for", "GPUs", "time"]
    return f"{table(header, recipes, left=4)}\n\n{table(['launch file', 'for'], launches, left=2)}"


OF_RESULTS = (
    figures_of_retrofit.readme_table,
    figures_of_retrofit.retrofit_live,
    figures_of_retrofit.cache_methods,
    figures_of_retrofit.retrofit_instructions,
    figures_of_retrofit.retrofit_distance,
    figures_of_retrofit.retrofit_ruler,
    figures_of_retrofit.retrofit_ruler_tasks,
    figures_of_retrofit.retrofit_loss,
    figures_of_retrofit.retrofit_untrained,
    figures.demo,
    figures.training_speed,
    figures.training_windows,
    figures.shapes,
    figures.several_gpus,
    figures.long_training,
    figures.context_parallel,
    figures.kernel_table,
    figures.kernel_ratios,
    figures.corpus,
    figures_of_use.decoding_with_a_horizon,
    figures_of_use.cache_left,
    figures_of_use.one_row,
    figures_of_use.decoding_layers,
    figures_of_use.horizon_kernels,
    figures_of_use.quantised,
    figures_of_use.serving,
    figures_of_use.vllm_throughput,
)
PARTS: dict[str, Callable[[], str]] = {
    function.__name__: function
    for function in (commands, recipe_fields, families, presets, shipped_recipes, *OF_RESULTS)
}
for name, arms in figures_of_retrofit.ARM_TABLES.items():
    PARTS[name] = functools.partial(figures_of_retrofit.arms_table, arms)
for name, arms in figures_of_retrofit.PANEL_TABLES.items():
    PARTS[name] = functools.partial(figures_of_retrofit.panel_table, *arms)
OF_THE_SITE = (commands, recipe_fields)

if __name__ == "__main__":
    docs = Path(__file__).parent
    for page in (docs.parent / "README.md", *sorted(docs.glob("*.md"))):
        text = page.read_text(encoding="utf-8")
        page.write_text(written(text), encoding="utf-8")
