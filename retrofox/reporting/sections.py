"""The parts of a report: the evaluation behind each one, its options, and those that are kept on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import try_to_load_from_cache

from retrofox.config import Source
from retrofox.data.files import Digests
from retrofox.data.sources import resolve
from retrofox.evaluation.evaluate import evaluate
from retrofox.evaluation.gates import inspect
from retrofox.evaluation.lm_eval import expand, match_tasks
from retrofox.evaluation.needle import needle
from retrofox.evaluation.panel import LENGTH as PANEL_ROW
from retrofox.evaluation.panel import panel
from retrofox.loading.adapter import base_of
from retrofox.loading.device import resolve_device
from retrofox.loading.source import holds_converted, read_config
from retrofox.loading.tokenizers import open_tokenizer
from retrofox.reporting.suites import Suite
from retrofox.support.files import stamps, write_json_result
from retrofox.support.plots import tokens_label
from retrofox.version import __version__

TASK_LENGTH = 4096
"""Tokens of context of short tasks."""
MADE_FOR_A_LENGTH = ("ruler", "niah", "longbench")
RULER_EXAMPLES = 50
"""Examples of each long task where no limit was asked for: lm-eval makes 500, each as long as the suite."""


@dataclass(frozen=True)
class ReportPart:
    """One evaluation of a report.

    Attributes:
        name: of its folder and in the report's JSON, such as "needle-easy".
        measures: the amount of texts or tasks, in words.
        run: the evaluation; called with `options`, `out` and where it runs (dtype, device).
        options: all that decides its result besides the models' and texts' contents.
        tokens: about how many it reads, for the estimate of the time left; 0 = unknown.
    """

    name: str
    measures: str
    run: Callable[..., dict[str, Any]]
    options: dict[str, Any]
    tokens: int = 0


@dataclass
class ReportRequest:
    """The request of a report: models, texts and further options of the parts."""

    model: str
    against: list[str]
    data: list[str]
    text_field: str = "text"
    min_tokens: int = 2
    include_path: str | None = None
    limit: int | None = None


def plan_parts(request: ReportRequest, suite: Suite) -> tuple[list[ReportPart], dict[str, str]]:
    """(parts to run in their order, name -> why not of what the suite or the user asks for and can't be measured)."""
    planned = {**_needles(request, suite), "loss": _loss(request, suite)}
    if not request.data:
        planned = dict.fromkeys(planned, "it needs texts: give --data")
    planned |= {"panel": _panel(request, suite), "heads": _heads(request, suite), **_tasks(request, suite)}
    parts = [part for part in planned.values() if isinstance(part, ReportPart)]
    missing = {name: why for name, why in planned.items() if isinstance(why, str)}
    if "panel" not in missing and not _chat(request, suite):
        missing["instructions"] = f"{request.model} has no chat template: it is no instruct model's"
    return parts, missing


def _models_and_texts(request: ReportRequest) -> dict[str, Any]:
    names = ("model", "against", "data", "text_field")
    return {name: getattr(request, name) for name in names}


def _needles(request: ReportRequest, suite: Suite) -> dict[str, ReportPart | str]:
    columns, parts = 1 + len(request.against), {}
    for mode, trials in suite.trials.items():
        count = suite.depths * trials
        options = {"lengths": list(suite.lengths), "depths": suite.depths, "mode": [mode], "trials": trials}
        measures = f"{count} prompt{'s' * (count > 1)} of {', '.join(map(tokens_label, suite.lengths))} tokens"
        tokens = count * sum(suite.lengths) * columns
        options |= _models_and_texts(request)
        parts[f"needle-{mode}"] = ReportPart(f"needle-{mode}", measures, needle, options, tokens)
    return parts


def _loss(request: ReportRequest, suite: Suite) -> ReportPart:
    options = {"length": suite.length, "max_documents": suite.documents, "min_tokens": request.min_tokens}
    measures = _documents(suite.documents, suite.length)
    tokens = suite.documents * suite.length * (3 + len(request.against))
    return ReportPart("loss", measures, evaluate, options | _models_and_texts(request), tokens)


def _documents(count: int, length: int) -> str:
    return f"{count} document{'s' * (count > 1)} of up to {tokens_label(length)} tokens"


def _panel(request: ReportRequest, suite: Suite) -> ReportPart | str:
    if not request.against:
        return "it compares with a base: give --against"
    options: dict[str, Any] = {"model": request.model, "against": request.against[0], "chat": _chat(request, suite)}
    options |= {"length": min(PANEL_ROW, suite.length, suite.panel_tokens), "tokens": suite.panel_tokens}
    options["quick"] = suite.panel_tokens < PANEL_ROW
    measures = f"11 kinds of text, {options['chat']} prompts answered"
    return ReportPart("panel", measures, panel, options, 22 * suite.panel_tokens)


def _chat(request: ReportRequest, suite: Suite) -> int:
    """Prompts to answer: none without a chat template."""
    return suite.chat if getattr(open_tokenizer(request.model), "chat_template", None) else 0


def _heads(request: ReportRequest, suite: Suite) -> ReportPart | str:
    if not holds_converted(request.model):
        return f"{request.model} has no forget gates: `retrofox inspect` looks at converted models"
    documents = max(1, suite.documents // 4)
    options: dict[str, Any] = {"model": request.model, "data": request.data, "length": suite.heads_length}
    options |= {"max_documents": documents, "text_field": request.text_field}
    measures = _documents(documents, suite.heads_length) if request.data else "the gates' parameters"
    tokens = 2 * suite.heads_length * documents if request.data else 0
    return ReportPart("heads", measures, inspect, options, tokens)


def _tasks(request: ReportRequest, suite: Suite) -> dict[str, ReportPart | str]:
    """Short tasks at TASK_LENGTH, long ones at the suite's length; an unknown one is an error before anything runs."""
    if not suite.tasks:
        return {"tasks": "none were asked for: --tasks short adds the paper's list, --tasks ruler, longbench or names"}
    if find_spec("lm_eval") is None:
        names = ", ".join(suite.tasks)
        return {"tasks": f"{names} need lm-eval, which is not installed: pip install '.[eval]' in a clone"}
    match_tasks(suite.tasks, request.include_path)
    long = [name for name in suite.tasks if name.split("_")[0] in MADE_FOR_A_LENGTH]
    short = [name for name in suite.tasks if name not in long]
    parts: dict[str, ReportPart | str] = {}
    for name, tasks, length, limit in (
        ("tasks", short, TASK_LENGTH, request.limit),
        ("tasks-long", long, suite.length, request.limit or RULER_EXAMPLES),
    ):
        if tasks:
            options: dict[str, Any] = {"model": request.model, "against": request.against, "tasks": tasks}
            options |= {"length": length, "include_path": request.include_path, "limit": limit}
            parts[name] = ReportPart(name, f"{len(expand(tasks))} tasks or groups", evaluate, options)
    return parts


def files_of(model: str) -> list[Any]:
    """Name, size and time of the files of a model, and of an adapter's base; of a Hub id the place of its commit."""
    path = Path(model)
    if not path.exists():
        read_config(model)  # fetches it
        return [str(try_to_load_from_cache(model, "config.json"))]
    return stamps(path) + (files_of(base_of(path)) if (path / "adapter_config.json").is_file() else [])


@dataclass
class PartStore:
    """Finished parts in OUT/parts, one folder each, whose part.json names the model, data and options behind it."""

    folder: Path
    request: ReportRequest
    dtype: str | None
    given_device: str | None

    def __post_init__(self) -> None:
        digests = Digests()
        self.models = [files_of(source) for source in (self.request.model, *self.request.against)]
        units = [unit for path in self.request.data for unit in resolve(Source(path=path))]
        self.texts = [unit.identity(digests) for unit in units]
        place = self.request.include_path
        files = sorted(file for file in Path(place).rglob("*") if file.is_file()) if place else []
        self.task_files = [[str(file.relative_to(str(place))), digests.of(file)] for file in files]

    def identity(self, part: ReportPart) -> dict[str, Any]:
        """All that decides a part's numbers, as JSON has it; of files not where they lie."""
        paths = ("model", "against", "data", "include_path")
        identity = {
            "part": part.name,
            "options": {name: value for name, value in part.options.items() if name not in paths},
            "models": self.models[: {"panel": 2, "heads": 1}.get(part.name)],
            "device": resolve_device(self.given_device).type,
            "dtype": self.dtype,
            "texts": self.texts if "data" in part.options else None,
            "task_files": self.task_files if "tasks" in part.options else None,
            "versions": [__version__, torch.__version__, transformers.__version__],
        }
        return json.loads(json.dumps(identity, default=os.fspath))

    def place(self, part: ReportPart) -> Path:
        return self.folder / "parts" / part.name

    def read(self, part: ReportPart) -> dict[str, Any] | None:
        """A part's entry, if it is the result of just this; None where there is none, or one of something else."""
        try:
            entry = json.loads((self.place(part) / "part.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return entry if isinstance(entry, dict) and entry.get("identity") == self.identity(part) else None

    def write(self, part: ReportPart, result: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Keeps a part's result, whole or not at all; returns its entry as `read` will."""
        entry = {
            "identity": self.identity(part),
            "measures": part.measures,
            "seconds": seconds,
            "tokens": part.tokens,
            "result": result,
        }
        file = write_json_result(self.place(part) / "part.json", entry)
        return json.loads(Path(file).read_text(encoding="utf-8"))
