"""The names of lm-eval's tasks and of presets of them. Importing it imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

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
