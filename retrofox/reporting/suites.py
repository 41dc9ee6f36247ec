"""The suites of `retrofox report`, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from retrofox.support.counts import require_at_least


@dataclass(frozen=True)
class Suite:
    """Sizes of one suite.

    Attributes:
        length: tokens of the longest text.
        lengths: lengths of needle prompts, tokens.
        depths: depths of the needles.
        trials: by mode of the needles, prompts for each length and depth.
        documents: documents that the loss reads; the gates read a quarter of them.
        heads_length: tokens of each document that the gates read.
        panel_tokens: tokens of each kind of unlike text; below 8192, the panel's quick form.
        chat: prompts that model and base answer.
        tasks: lm-eval tasks that belong to the suite.
    """

    length: int
    lengths: tuple[int, ...]
    depths: int
    trials: dict[str, int]
    documents: int
    heads_length: int
    panel_tokens: int
    chat: int
    tasks: tuple[str, ...] = ()


_QUICK = Suite(
    length=32768,
    lengths=(1024, 4096, 8192, 16384, 32768),
    depths=5,
    trials={"easy": 10, "standard": 4},
    documents=8,
    heads_length=32768,
    panel_tokens=131072,
    chat=64,
)
_LONG = replace(
    _QUICK,
    length=65536,
    lengths=(1024, 2048, 4096, 8192, 16384, 32768, 65536),
    trials={"easy": 20, "standard": 10},
    documents=16,
    heads_length=65536,
    chat=208,
    tasks=("ruler",),
)
_FULL = replace(_LONG, trials={"easy": 40, "standard": 40}, documents=64, heads_length=131072, tasks=("short", "ruler"))
SUITES = {"quick": _QUICK, "long": _LONG, "full": _FULL}
QUICK_ON_CPU = Suite(
    length=2048,
    lengths=(512, 1024, 2048),
    depths=3,
    trials={"easy": 2, "standard": 1},
    documents=4,
    heads_length=1024,
    panel_tokens=2048,
    chat=6,
)
"""`quick` on a CPU: minutes for 135M parameters on two cores, with wide intervals."""


def choose_suite(
    name: str,
    on_cpu: bool = False,
    *,
    length: int | None = None,
    max_documents: int | None = None,
    trials: int | None = None,
    tasks: Sequence[str] = (),
) -> Suite:
    """The suite of a name with the sizes that the user changed; tasks are added to its own."""
    require_at_least(64, length=length)
    require_at_least(1, max_documents=max_documents, trials=trials)
    suite = QUICK_ON_CPU if on_cpu and name == "quick" else SUITES[name]
    changed: dict[str, Any] = {"tasks": tuple(dict.fromkeys([*suite.tasks, *tasks]))}
    if length is not None:
        changed |= {"length": length, "heads_length": min(length, suite.heads_length)}
        changed["lengths"] = (*(n for n in suite.lengths if n < length), length)
    if max_documents is not None:
        changed["documents"] = max_documents
    if trials is not None:
        changed["trials"] = dict.fromkeys(suite.trials, trials)
    return replace(suite, **changed)
