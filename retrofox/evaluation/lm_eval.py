"""Short tasks through EleutherAI's lm-evaluation-harness, its context length always given, never guessed."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers

from retrofox.evaluation import task_cache
from retrofox.evaluation.task_names import expand, unknown_tasks
from retrofox.loading.loaded_model import LoadedModel
from retrofox.version import __version__

LABELS = ("alias", "name", "sample_len")
"""What lm-eval puts among the metrics."""
RULER_LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
"""Lengths for which lm-eval's RULER has a metric."""
BOOTSTRAP = 200
"""Resamplings for the standard errors of metrics that are no means, such as perplexity."""


@dataclass
class Tasks:
    """lm-eval tasks ready to run: tasks and groups by name, and what their prompts hash to, filled in on first use."""

    tasks: dict[str, Any]
    groups: dict[str, Any]
    limit: int | None
    digests: dict[str, str] = field(default_factory=dict)

    def digest(self, name: str) -> str:
        if name not in self.digests:
            task = self.tasks[name]
            size = import_module("lm_eval.evaluator_utils").get_sample_size(task, self.limit)
            with _templates_compiled_once():
                task.build_all_requests(limit=size, rank=0, world_size=1)
            self.digests[name] = task_cache.prompts_digest(task)
        return self.digests[name]


@dataclass
class Scores:
    """A model's scores: {task or group: {metric: value}}, and by task, metric and document the single scores.

    Values are None where they are no finite number. `documents` has the metrics that are means over documents.
    """

    metrics: dict[str, dict[str, Any]]
    documents: dict[str, dict[str, dict[str, float]]]


def run_tasks(
    opened: LoadedModel,
    tasks: Tasks,
    *,
    max_length: int,
    batch: int | str = "auto",
    cache: Path | None = None,
    progress: bool = True,
) -> Scores:
    """Runs lm-eval tasks on an open model, each one alone, reading from `cache` those it already holds.

    lm-eval cuts contexts to `config.max_position_embeddings` or 2048 tokens unless told otherwise, so `max_length`
    (tokens) is always passed. A task is kept as soon as it is done, so an interrupted run goes on after it.

    Args:
        tasks: what `find_tasks` gave.
        batch: requests per batch; "auto" = by tokens.
        cache: folder of results by model, prompts and versions; None = neither read nor write any.
    """
    harness = require_harness()
    model = None if cache is None else task_cache.model_fingerprint(opened)
    lm: Any = None
    raw: dict[str, dict[str, Any]] = {}
    documents = {}
    for name, task in tasks.tasks.items():
        identity = {
            "model": model,
            "prompts": None if cache is None else tasks.digest(name),
            "limit": tasks.limit,
            "max_length": max_length,
            "versions": {
                "lm_eval": getattr(harness, "__version__", None),
                "retrofox": __version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
            },
        }
        entry = task_cache.read(cache, name, identity)
        if entry is None:
            if lm is None:  # imports lm-eval's models, an optional extra
                module = import_module("retrofox.evaluation.harness_model")
                lm = module.BatchedModel(opened, max_length, batch, progress)
            entry = _run(lm, name, task, tasks.limit)
            task_cache.write(cache, name, identity, entry)
        raw[name], documents[name] = entry["metrics"], entry["documents"]
    for group in tasks.groups.values():
        raw[group.name] = group.aggregate(raw)
    metrics = {
        task: {metric: _plain(value) for metric, value in values.items() if metric not in LABELS}
        for task, values in raw.items()
    }
    return Scores(metrics, documents)


def _run(lm: Any, name: str, task: Any, limit: int | None) -> dict[str, Any]:
    """One task: {"metrics": as lm-eval gives them, "documents": {metric: {document: score}}, "seconds"}."""
    started = time.perf_counter()
    # lm-eval's bootstrap without its pool: a fork of a process whose threads hold locks may wait for ever
    with _templates_compiled_once(), mock.patch.dict(os.environ, {"DISABLE_MULTIPROC": "1"}):
        output = import_module("lm_eval.evaluator").evaluate(
            lm=lm,
            task_dict={"tasks": {name: task}, "groups": {}},
            limit=limit,
            bootstrap_iters=BOOTSTRAP,
            log_samples=True,
        )
    metrics = {metric: _plain(value) for metric, value in output["results"][name].items()}
    other_lengths = [metric for metric, value in metrics.items() if value == -1 and metric.split(",")[0].isdigit()]
    metrics = {metric: value for metric, value in metrics.items() if metric not in other_lengths}  # RULER's
    documents: dict[str, dict[str, float]] = {}
    for sample in output["samples"][name]:
        for metric in sample["metrics"]:
            value = sample[metric]
            if isinstance(value, (bool, int, float)) and math.isfinite(value):
                documents.setdefault(f"{metric},{sample['filter']}", {})[str(sample["doc_id"])] = float(value)
    means = {
        metric: scores
        for metric, scores in documents.items()
        if isinstance(metrics.get(metric), float)
        and math.isclose(math.fsum(scores.values()) / len(scores), metrics[metric], rel_tol=1e-6, abs_tol=1e-9)
    }
    return {"metrics": metrics, "documents": means, "seconds": time.perf_counter() - started}


def _plain(value: Any) -> Any:
    """A metric as JSON holds it: lm-eval gives numpy's numbers, NaN and text, too."""
    if isinstance(value, (str, int)):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    return number if math.isfinite(number) else None


@contextlib.contextmanager
def _templates_compiled_once() -> Iterator[None]:
    """Inside, lm-eval's templates are kept compiled: it compiles them for every document, most of a task's time."""
    environment = import_module("lm_eval.utils").env
    compile_template = environment.from_string
    environment.from_string = functools.lru_cache(maxsize=1024)(compile_template)
    try:
        yield
    finally:
        del environment.from_string  # the instance's, which hid the class's


def find_tasks(
    tasks: Sequence[str],
    include_path: str | None = None,
    *,
    limit: int | None = None,
    length: int = 4096,
    tokenizer: str | None = None,
) -> Tasks:
    """lm-eval's tasks of these names, loaded; its own are indexed only where they are needed.

    Args:
        tasks: names of tasks, groups and tags, patterns such as "arc_*", or presets: short, ruler, longbench.
        include_path: a directory with further task files.
        limit: examples per task, None = all.
        length: tokens of the prompts of tasks that are made for a length: RULER's, one of RULER_LENGTHS.
        tokenizer: Hub id or directory of the tokenizer that such tasks count with.

    Raises:
        FileNotFoundError: `include_path` is not a directory.
        ValueError: lm-eval is not installed, or a task is unknown.
    """
    require_harness()
    if length not in RULER_LENGTHS and any(name.startswith(("niah_", "ruler")) for name in expand(tasks)):
        raise ValueError(f"RULER's lengths are {', '.join(map(str, RULER_LENGTHS))} tokens; got length {length}")
    manager, names = _manager_of(expand(tasks), include_path, {"max_seq_lengths": [length], "tokenizer": tokenizer})
    states = random.getstate(), np.random.get_state()  # noqa: NPY002 - the stream that lm-eval's tasks draw from
    try:
        random.seed(0)
        np.random.seed(1234)  # noqa: NPY002
        loaded = manager.load(names)
    except (OSError, ValueError, KeyError, ImportError, AssertionError) as error:  # no network, a broken task file
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"the tasks {', '.join(names)} can't be loaded: {why}") from error
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
    for task in loaded["tasks"].values():  # as lm-eval's own command does
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=1234)
    return Tasks(loaded["tasks"], loaded["groups"], limit)


def check_names(tasks: Sequence[str], include_path: str | None) -> None:
    """Raises what `find_tasks` raises for names that lm-eval does not know, and loads nothing."""
    require_harness()
    _manager_of(expand(tasks), include_path, {})


def _manager_of(tasks: Sequence[str], include_path: str | None, metadata: dict[str, Any]) -> tuple[Any, list[str]]:
    if include_path is not None and not Path(include_path).is_dir():
        raise FileNotFoundError(f"include_path is not a directory: {include_path}")
    task_manager = import_module("lm_eval.tasks").TaskManager
    unknown = list(tasks)
    for defaults in (False, True):  # indexing all of lm-eval's own tasks takes seconds
        if defaults or include_path is not None:
            manager = task_manager(include_path=include_path, include_defaults=defaults, metadata=metadata)
            unknown = [task for task in tasks if not manager.match_tasks([task])]
            if not unknown:
                return manager, manager.match_tasks(list(tasks))
    raise unknown_tasks(unknown)


def require_harness() -> Any:
    """The lm_eval module; raises ValueError with the remedy if it is not installed."""
    try:
        return import_module("lm_eval")
    except ImportError as error:
        raise ValueError("tasks need lm-eval: pip install '.[eval]' in a clone") from error
