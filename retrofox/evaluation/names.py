"""The names of lm-eval's tasks and of presets of them. Importing it imports no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

PRESETS = {
    "short": (
        *("wikitext", "lambada_openai", "piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "copa"),
        *("openbookqa", "sciq", "boolq"),
    ),
    "ruler": ("niah_single_1", "niah_multikey_2", "niah_multikey_3", "ruler_vt", "ruler_cwe", "ruler_fwe"),
    "longbench": ("longbench",),
}
"""Name -> lm-eval's own tasks: `short` is the list of the FoX paper (Lin et al., ICLR 2025, table 2); `ruler` those of
RULER (arXiv 2404.06654) that are made without a network: the others read essays or questions from the Hub."""


def expand(tasks: Sequence[str]) -> list[str]:
    """Presets replaced by their tasks, each name once."""
    return list(dict.fromkeys(name for task in tasks for name in PRESETS.get(task, (task,))))


def refuse_without_tasks(tasks: Sequence[str], **options: object) -> None:
    """Raises ValueError where options say how tasks run, and there are none."""
    given = ", ".join(name for name, value in options.items() if value is not None)
    if given and not tasks:
        raise ValueError(f"{given} says how lm-eval tasks run: name tasks, or drop it")


def refuse_unknown(tasks: Sequence[str], include_path: str | None) -> None:
    """Looks for tasks that no YAML file of lm-eval mentions; says nothing where lm-eval is not installed.

    It takes half a second, lm-eval's own index ten times as long. Patterns, such as arc_*, are left to the index.

    Raises:
        FileNotFoundError: `include_path` is not a directory.
        ValueError: an unknown task.
    """
    if include_path is not None and not Path(include_path).is_dir():
        raise FileNotFoundError(f"include_path is not a directory: {include_path}")
    found = find_spec("lm_eval")
    unknown = {name for name in expand(tasks) if not set(name) & set("*?[")}
    if found is None or not unknown:
        return
    folders = [Path(place) / "tasks" for place in found.submodule_search_locations or ()]
    for folder in [*folders, *([Path(include_path)] if include_path else [])]:
        for place, _, files in os.walk(folder):
            for file in files:
                if file.endswith((".yaml", ".yml")) or "." not in file:  # those that others include have no ending
                    text = Path(place, file).read_text(encoding="utf-8", errors="ignore")
                    unknown.difference_update(re.split(r"[\s\"',\[\]#]+", text))
    if unknown:
        raise unknown_tasks(sorted(unknown))


def unknown_tasks(names: Sequence[str]) -> ValueError:
    """The error for names that lm-eval does not know."""
    return ValueError(
        f"unknown task {', '.join(names)}; `lm_eval ls tasks` lists lm-eval's own, include_path adds a directory, "
        f"presets are {', '.join(PRESETS)}"
    )
