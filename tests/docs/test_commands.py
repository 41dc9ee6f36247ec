"""Every `retrofox` command that a page shows exists and takes these arguments and options."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from retrofox.cli.app import app, spread
from retrofox.config import load_recipe

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*.sh"))]
FENCED = re.compile(r"^( *)```[^\n]*\n(.*?)^\1```", re.M | re.S)
INDENTED = re.compile(r"^ {4,}\S.*$", re.M)
COMMAND = re.compile(r"^\s*(?:\$ |.* -m )?retrofox ([a-z-]+(?: .*)?)$")
INLINE = re.compile(r"`(?:[^`\n]* -m )?retrofox ([a-z-]+(?: [^`\n]*)?)`")
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def shown(page: Path) -> list[list[str]]:
    """The arguments of every command in a page's code blocks; an ellipsis stands for what the page leaves out."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".sh":
        text = f"```bash\n{text}```"
    fenced = [line for block in FENCED.findall(text) for line in block[1].splitlines()]
    lines = [*fenced, *INDENTED.findall(FENCED.sub("", text))]
    found = [match[1] for match in map(COMMAND.match, lines) if match]
    return [[part for part in shlex.split(line, comments=True) if "..." not in part] for line in found]


LINES = [(page.name, arguments) for page in PAGES for arguments in shown(page)]


@pytest.mark.parametrize(("page", "arguments"), LINES, ids=lambda value: value if isinstance(value, str) else value[0])
def test_a_command_on_a_page_parses(page: str, arguments: list[str], tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if arguments[0] == "push":  # its directory has to be there
        (tmp_path / arguments[1]).mkdir(parents=True)
    command, rest = COMMANDS[arguments[0]], spread(arguments)[1:]
    if hasattr(command, "commands"):
        command, rest = command.commands[rest[0]], rest[1:]
    parsed = command.make_context(arguments[0], rest).params
    shipped = ROOT / "recipes" / Path(str(parsed.get("recipe", ""))).name
    if shipped.is_file():
        recipe = load_recipe(shipped, parsed.get("changes") or [])
        if recipe.fox is None or recipe.fox.gate == "none":
            assert not any(getattr(stage, "budget", None) for stage in recipe.stages)  # train refuses it without gates


def test_there_are_commands_to_parse():
    assert len(LINES) > 30
    assert {arguments[0] for _, arguments in LINES} > {"convert", "plan", "train", "eval", "report", "generate", "push"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_options_within_sentences_exist(page: Path):
    for line in INLINE.findall(page.read_text(encoding="utf-8")):
        name, *rest = line.split()
        command = COMMANDS[name]
        if hasattr(command, "commands"):
            command = command.commands[rest[0]] if rest else command
        options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        unknown = {part.split("=")[0] for part in rest if part.startswith("--")} - options - {"--help"}
        assert not unknown, line
