"""What each suite of `retrofox report` measures, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from retrofox.support.counts import require_at_least


@dataclass(frozen=True)
class Needles:
    """One part on needles: its mode, and `depths` x `trials` prompts for each length."""

    mode: str
    depths: int
    trials: int


@dataclass(frozen=True)
class Suite:
    """Sizes of one suite.

    Attributes:
        length: tokens of the longest text.
        lengths: lengths of needle prompts, tokens; those beyond `length` are left out.
        needles: the parts on needles.
        documents: documents that the loss reads.
        heads_length, heads_documents: what the gates are measured over.
        panel_tokens: tokens of each kind of unlike text; below 8192, the panel's quick form.
        chat: prompts that model and base answer.
        tasks: lm-eval tasks that belong to the suite.
    """

    length: int
    lengths: tuple[int, ...]
    needles: tuple[Needles, ...]
    documents: int
    heads_length: int
    heads_documents: int
    panel_tokens: int
    chat: int
    tasks: tuple[str, ...] = ()


_QUICK = Suite(
    length=32768,
    lengths=(1024, 4096, 8192, 16384, 32768),
    needles=(Needles("easy", 5, 10), Needles("standard", 5, 4)),
    documents=8,
    heads_length=32768,
    heads_documents=2,
    panel_tokens=131072,
    chat=64,
)
_LONG = Suite(
    length=65536,
    lengths=(1024, 2048, 4096, 8192, 16384, 32768, 65536),
    needles=(Needles("easy", 5, 20), Needles("standard", 5, 10)),
    documents=16,
    heads_length=65536,
    heads_documents=4,
    panel_tokens=131072,
    chat=208,
    tasks=("ruler",),
)
_FULL = replace(
    _LONG,
    needles=(Needles("easy", 5, 40), Needles("standard", 5, 40)),
    documents=64,
    heads_length=131072,
    heads_documents=8,
    tasks=("short", "ruler"),
)
SUITES = {"quick": _QUICK, "long": _LONG, "full": _FULL}
QUICK_ON_CPU = Suite(
    length=2048,
    lengths=(512, 1024, 2048),
    needles=(Needles("easy", 3, 2), Needles("standard", 3, 1)),
    documents=4,
    heads_length=1024,
    heads_documents=1,
    panel_tokens=2048,
    chat=6,
)
"""What `quick` is on a CPU: minutes for 135M parameters on two cores, with wide intervals."""


def choose_suite(
    name: str,
    on_cpu: bool = False,
    *,
    length: int | None = None,
    max_documents: int | None = None,
    trials: int | None = None,
    tasks: Sequence[str] = (),
) -> Suite:
    """The suite of a name with the sizes that the user changed; tasks are added to its own.

    Raises:
        ValueError: an unknown name, or a size that can't be.
    """
    if name not in SUITES:
        raise ValueError(f"suite must be one of {', '.join(SUITES)}; got {name!r}")
    require_at_least(64, length=length)
    require_at_least(1, max_documents=max_documents, trials=trials)
    suite = QUICK_ON_CPU if on_cpu and name == "quick" else SUITES[name]
    if length is not None:
        lengths = (*(n for n in suite.lengths if n < length), length)
        suite = replace(suite, length=length, lengths=lengths, heads_length=min(length, suite.heads_length))
    if max_documents is not None:
        heads = min(max_documents, suite.heads_documents)
        suite = replace(suite, documents=max_documents, heads_documents=heads)
    if trials is not None:
        suite = replace(suite, needles=tuple(replace(part, trials=trials) for part in suite.needles))
    return replace(suite, tasks=tuple(dict.fromkeys([*suite.tasks, *tasks])))
