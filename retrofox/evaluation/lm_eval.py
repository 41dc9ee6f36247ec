"""Short tasks through EleutherAI's lm-evaluation-harness, its context length always given, never guessed."""

from __future__ import annotations

import functools
import math
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from unittest import mock

import numpy as np
from rich.console import Console

from retrofox.evaluation.statistics import paired_difference
from retrofox.loading.errors import first_line
from retrofox.loading.loaded_model import LoadedModel
from retrofox.support.report import print_table

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
LABELS = ("alias", "name", "sample_len")
"""Entries that lm-eval puts among the metrics and that are none."""
RULER_LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
"""Lengths for which lm-eval's RULER has a metric."""
BOOTSTRAP = 200
"""Resamplings for the standard errors of metrics that are no means, such as perplexity."""


@dataclass
class Scores:
    """A model's scores: {task or group: {metric: value}}, and by task, metric and document the single scores.

    Values are None where they are no finite number. `documents` has the metrics that are means over documents.
    """

    metrics: dict[str, dict[str, Any]]
    documents: dict[str, dict[str, dict[str, float]]]


def run_tasks(
    opened: LoadedModel, tasks: dict[str, Any], *, max_length: int, limit: int | None = None, progress: bool = True
) -> Scores:
    """Runs lm-eval tasks on an open model.

    lm-eval cuts contexts to `config.max_position_embeddings` or 2048 tokens unless told otherwise, so `max_length`
    (tokens) is always passed.

    Args:
        tasks: what `find_tasks` gave.
        limit: examples per task, None = all.
    """
    harness_model = import_module("retrofox.evaluation.harness_model")  # imports lm-eval's models, an optional extra
    templates = import_module("lm_eval.utils").env
    with (
        # lm-eval compiles a template anew for every document: most of a task's time
        mock.patch.object(templates, "from_string", functools.cache(templates.from_string)),
        # lm-eval's bootstrap without its pool: a fork of a process whose threads hold locks may wait for ever
        mock.patch.dict(os.environ, {"DISABLE_MULTIPROC": "1"}),
    ):
        output = import_module("lm_eval.evaluator").evaluate(
            lm=harness_model.BatchedModel(opened, max_length, progress),
            task_dict=tasks,
            limit=limit,
            bootstrap_iters=BOOTSTRAP,
            log_samples=True,
        )
    metrics = {task: _metrics(values) for task, values in {**output["results"], **output.get("groups", {})}.items()}
    return Scores(metrics, {task: _means(own, metrics[task]) for task, own in output["samples"].items()})


def _metrics(values: dict[str, Any]) -> dict[str, Any]:
    """A task's metrics as JSON holds them, without RULER's at the lengths that were not asked for, which are -1."""
    plain = {metric: _plain(value) for metric, value in values.items() if metric not in LABELS}
    return {metric: value for metric, value in plain.items() if value != -1 or not metric.split(",")[0].isdigit()}


def _means(samples: Sequence[dict[str, Any]], metrics: dict[str, Any]) -> dict[str, dict[str, float]]:
    """{metric: {document: score}} of a task's metrics that are means over documents."""
    documents: dict[str, dict[str, float]] = {}
    for sample in samples:
        for metric in sample["metrics"]:
            value = sample[metric]
            if isinstance(value, (bool, int, float)) and math.isfinite(value):
                documents.setdefault(f"{metric},{sample['filter']}", {})[str(sample["doc_id"])] = float(value)
    return {
        metric: scores
        for metric, scores in documents.items()
        if isinstance(metrics.get(metric), float)
        and math.isclose(math.fsum(scores.values()) / len(scores), metrics[metric], rel_tol=1e-6, abs_tol=1e-9)
    }


def _plain(value: Any) -> Any:
    """A metric as JSON holds it: lm-eval gives numpy's numbers, NaN and text, too."""
    if isinstance(value, (str, int)):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    return number if math.isfinite(number) else None


def expand(tasks: Sequence[str]) -> list[str]:
    """Presets replaced by their tasks, each name once."""
    return list(dict.fromkeys(name for task in tasks for name in PRESETS.get(task, (task,))))


def refuse_without_tasks(tasks: Sequence[str], **options: object) -> None:
    """Raises ValueError where options say how tasks run, and there are none."""
    given = ", ".join(name for name, value in options.items() if value is not None)
    if given and not tasks:
        raise ValueError(f"{given} says how lm-eval tasks run: name tasks, or drop it")


def match_tasks(
    tasks: Sequence[str], include_path: str | None = None, metadata: dict[str, Any] | None = None
) -> tuple[Any, list[str]]:
    """lm-eval's TaskManager, and its names of the tasks. Errors are those of `find_tasks`."""
    if include_path is not None and not os.path.isdir(include_path):
        raise FileNotFoundError(f"include_path is not a directory: {include_path}")
    try:
        task_manager = import_module("lm_eval.tasks").TaskManager
    except ImportError as error:
        raise ValueError("tasks need lm-eval: pip install '.[eval]' in a clone") from error
    unknown: list[str] = []
    for defaults in (False, True):  # indexing all of lm-eval's own tasks takes seconds
        manager = task_manager(include_path=include_path, include_defaults=defaults, metadata=metadata)
        unknown = [task for task in expand(tasks) if not manager.match_tasks([task])]
        if not unknown:
            return manager, manager.match_tasks(expand(tasks))
    raise ValueError(
        f"unknown task {', '.join(unknown)}; `lm_eval ls tasks` lists lm-eval's own, include_path adds a directory, "
        f"presets are {', '.join(PRESETS)}"
    )


def find_tasks(
    tasks: Sequence[str], include_path: str | None = None, *, length: int = 4096, tokenizer: str | None = None
) -> dict[str, Any]:
    """lm-eval's tasks of these names, loaded, as its `TaskManager.load` gives them.

    Args:
        tasks: names of tasks, groups and tags, patterns such as "arc_*", or presets: short, ruler, longbench.
        include_path: a directory with further task files.
        length: tokens of the prompts of tasks that are made for a length: RULER's, one of RULER_LENGTHS.
        tokenizer: Hub id or directory of the tokenizer that such tasks count with.

    Raises:
        FileNotFoundError: `include_path` is not a directory.
        ValueError: lm-eval is not installed, or a task is unknown.
    """
    if length not in RULER_LENGTHS and any(name.startswith(("niah_", "ruler")) for name in expand(tasks)):
        raise ValueError(f"RULER's lengths are {', '.join(map(str, RULER_LENGTHS))} tokens; got length {length}")
    metadata = {"max_seq_lengths": [length], "tokenizer": tokenizer}
    manager, names = match_tasks(tasks, include_path, metadata)
    random.seed(0)  # as lm-eval's own command seeds what its tasks draw from
    np.random.seed(1234)  # noqa: NPY002
    try:
        loaded = manager.load(names)
    except (OSError, ValueError, KeyError, ImportError, AssertionError) as error:  # no network, a broken task file
        raise ValueError(f"the tasks {', '.join(names)} can't be loaded: {first_line(error)}") from error
    for task in loaded["tasks"].values():  # as lm-eval's own command does
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=1234)
    return loaded


def differences(scores: Mapping[str, Scores], reference: str) -> dict[str, dict[str, dict[str, Any]]]:
    """{model: {task: {metric: paired difference to `reference`}}} of metrics that are means over documents."""
    base = scores[reference].documents
    return {
        key: {
            task: {
                metric: found
                for metric, values in metrics.items()
                if (found := paired_difference(values, base.get(task, {}).get(metric, {}))) is not None
            }
            for task, metrics in one.documents.items()
        }
        for key, one in scores.items()
        if key != reference
    }


def print_tasks(
    tasks: Mapping[str, Mapping[str, Mapping[str, Any]]],
    changes: Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]],
    names: Mapping[str, str],
    reference: str,
    console: Console,
) -> None:
    """A table of metrics, and one of their `differences` with standard error and p, under the models' names."""
    rows = [
        [task, metric, *(_cell(results[task], metric) for results in tasks.values())]
        for task, metrics in next(iter(tasks.values())).items()
        for metric, value in metrics.items()
        if isinstance(value, float | None) and "_stderr" not in metric
    ]
    columns = ["task", "metric", *(names[key] for key in tasks)]
    print_table(console, columns, rows, "lm-eval tasks (± standard error)", left="task metric")
    rows = []
    for key, found in changes.items():
        for task, metrics in found.items():
            for metric, change in metrics.items():
                error = "" if change["standard_error"] is None else f" ±{change['standard_error']:.4f}"
                rows.append([task, metric, names[key], f"{change['difference']:+.4f}{error}", f"{change['p']:.3g}"])
    if rows:
        title = f"Differences to {names[reference]}, paired by document (± standard error; p: two-sided)"
        print_table(console, ("task", "metric", "model", "difference", "p"), rows, title, left="task metric model")


def _cell(metrics: Mapping[str, Any], metric: str) -> str:
    value, error = metrics.get(metric), metrics.get(metric.replace(",", "_stderr,"))
    spread = f" ±{error:.3f}" if isinstance(error, float) else ""
    return "-" if value is None else f"{value:.4f}{spread}"
