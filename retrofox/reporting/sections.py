"""The sections of a report: the evaluation behind each one, and its options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from retrofox.evaluation.baseline_names import Baseline
from retrofox.evaluation.evaluate import evaluate
from retrofox.evaluation.gates import inspect
from retrofox.evaluation.needle import needle
from retrofox.evaluation.panel import LENGTH as PANEL_ROW
from retrofox.evaluation.panel import panel
from retrofox.evaluation.task_names import expand
from retrofox.loading.source import holds_converted
from retrofox.loading.tokenizers import open_tokenizer
from retrofox.reporting.suites import Suite
from retrofox.support.plots import tokens_label

TASK_LENGTH = 4096
"""Tokens of context of short tasks."""
MADE_FOR_A_LENGTH = ("ruler", "niah", "longbench")
RULER_EXAMPLES = 50
"""Examples of each long task where no limit was asked for: lm-eval makes 500, each as long as the suite."""


@dataclass(frozen=True)
class Part:
    """One evaluation of a report.

    Attributes:
        name: of its folder and in the report's JSON, such as "needle-easy".
        measures: what it does, for the line that is printed while it runs.
        run: the evaluation; called with `options`, `out` and where it runs (dtype, device).
        file: the JSON that the evaluation writes last.
        options: all that decides its result besides the models' and texts' contents.
        tokens: about how many it reads, for the estimate of the time left; 0 = unknown.
    """

    name: str
    measures: str
    run: Callable[..., Any]
    file: str
    options: dict[str, Any]
    tokens: int = 0


@dataclass
class Asked:
    """What a report is asked for: models, texts and further options of the parts."""

    model: str
    against: list[str]
    data: list[str]
    baselines: list[Baseline] = field(default_factory=list)
    text_field: str = "text"
    min_tokens: int = 2
    include_path: str | None = None
    limit: int | None = None


def plan_parts(asked: Asked, suite: Suite) -> tuple[list[Part], dict[str, str]]:
    """(parts to run in their order, name -> why not of what the suite or the user asks for and can't be measured)."""
    parts: list[Part] = []
    missing: dict[str, str] = {}
    specs = [baseline.text for baseline in asked.baselines]
    models = {"model": asked.model, "against": asked.against}
    columns = 1 + len(asked.against) + len(specs)
    read: dict[str, Any] = {**models, "data": asked.data, "text_field": asked.text_field}
    longest = tokens_label(suite.length)
    for needles in suite.needles:
        count = needles.depths * needles.trials
        measures = f"{count} prompt{'s' * (count > 1)} of {', '.join(map(tokens_label, suite.lengths))} tokens"
        options: dict[str, Any] = {"lengths": list(suite.lengths), "depths": needles.depths, "mode": [needles.mode]}
        options |= {"trials": needles.trials, "baselines": specs}
        tokens = count * sum(suite.lengths) * columns
        parts.append(Part(f"needle-{needles.mode}", measures, needle, "needle.json", {**read, **options}, tokens))
    options = {"length": suite.length, "max_documents": suite.documents, "min_tokens": asked.min_tokens}
    options["baselines"] = specs
    measures = f"{_documents(suite.documents)} of up to {longest} tokens"
    tokens = suite.documents * suite.length * (columns + 2)
    parts.append(Part("loss", measures, evaluate, "eval.json", {**read, **options}, tokens))
    if not asked.data:
        missing = {part.name: "it needs texts: give --data" for part in parts}
        parts = []
    _add_panel(parts, missing, asked, suite)
    _add_heads(parts, missing, asked, suite)
    _add_tasks(parts, missing, asked, suite)
    return parts, missing


def _documents(count: int) -> str:
    return f"{count} document{'s' * (count > 1)}"


def _add_panel(parts: list[Part], missing: dict[str, str], asked: Asked, suite: Suite) -> None:
    if not asked.against:
        missing["panel"] = "it compares with a base: give --against"
        return
    options: dict[str, Any] = {"model": asked.model, "against": asked.against[0], "chat": suite.chat}
    options |= {"length": min(PANEL_ROW, suite.length, suite.panel_tokens), "tokens": suite.panel_tokens}
    options |= {"quick": True} if suite.panel_tokens < PANEL_ROW else {}
    if not _has_chat_template(asked.model):
        options["chat"] = 0
        missing["instructions"] = f"{asked.model} has no chat template: it is no instruct model's"
    measures = f"11 kinds of text, {options['chat']} prompts answered"
    parts.append(Part("panel", measures, panel, "panel.json", options, 22 * suite.panel_tokens))


def _has_chat_template(model: str) -> bool:
    return bool(getattr(open_tokenizer(model), "chat_template", None))


def _add_heads(parts: list[Part], missing: dict[str, str], asked: Asked, suite: Suite) -> None:
    if not holds_converted(asked.model):
        missing["heads"] = f"{asked.model} has no forget gates: `retrofox inspect` looks at converted models"
        return
    options: dict[str, Any] = {"model": asked.model, "data": asked.data, "length": suite.heads_length}
    options |= {"max_documents": suite.heads_documents, "text_field": asked.text_field}
    tokens = 2 * suite.heads_length * suite.heads_documents if asked.data else 0
    measures = f"{_documents(suite.heads_documents)} of up to {tokens_label(suite.heads_length)} tokens"
    parts.append(Part("heads", measures if asked.data else "parameters alone", inspect, "gates.json", options, tokens))


def _add_tasks(parts: list[Part], missing: dict[str, str], asked: Asked, suite: Suite) -> None:
    if not suite.tasks:
        missing["tasks"] = "none were asked for: --tasks short adds the paper's list, --tasks ruler, longbench or names"
    elif find_spec("lm_eval") is None:
        missing["tasks"] = (
            f"{', '.join(suite.tasks)} need lm-eval, which is not installed: pip install '.[eval]' in a clone"
        )
    else:
        long = [name for name in suite.tasks if name.split("_")[0] in MADE_FOR_A_LENGTH]
        short = [name for name in suite.tasks if name not in long]
        for name, tasks, length in (("tasks", short, TASK_LENGTH), ("tasks-long", long, suite.length)):
            if tasks:
                options: dict[str, Any] = {"model": asked.model, "against": asked.against, "tasks": tasks}
                options |= {"length": length, "include_path": asked.include_path, "limit": asked.limit}
                if name == "tasks-long" and asked.limit is None:
                    options["limit"] = RULER_EXAMPLES
                measures = f"{len(expand(tasks))} tasks or groups"
                parts.append(Part(name, measures, evaluate, "eval.json", options))
