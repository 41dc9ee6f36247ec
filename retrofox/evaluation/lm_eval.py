"""Short tasks through EleutherAI's lm-evaluation-harness, its context length always given, never guessed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from retrofox.loading.opened import Opened

LABELS = ("alias", "name", "sample_len")
"""What lm-eval puts among the metrics."""


def run_tasks(
    opened: Opened,
    tasks: Sequence[str],
    manager: Any,
    *,
    max_length: int,
    limit: int | None = None,
    batch: int = 1,
) -> dict[str, dict[str, Any]]:
    """Runs lm-eval tasks on an open model and returns {task: {metric: value}}, None where a value is no finite number.

    lm-eval cuts contexts to `config.max_position_embeddings` or 2048 tokens unless told otherwise, so `max_length`
    (tokens) is always passed.

    Args:
        tasks: names of tasks, groups and tags, or patterns such as "arc_*".
        manager: what `find_tasks` gave for them.
        limit: examples per task, None = all.
    """
    lm_eval = require_harness()
    lm = import_module("lm_eval.models.huggingface").HFLM(
        pretrained=opened.model,
        tokenizer=opened.tokenizer,
        backend="causal",
        max_length=max_length,
        batch_size=batch,
        device=str(opened.device),
    )
    names = manager.match_tasks(list(tasks))
    output = lm_eval.simple_evaluate(
        model=lm, tasks=names, limit=limit, task_manager=manager, bootstrap_iters=1000, log_samples=False
    )
    return {
        task: {metric: _plain(value) for metric, value in values.items() if metric not in LABELS}
        for task, values in output["results"].items()
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


def find_tasks(tasks: Sequence[str], include_path: str | None = None) -> Any:
    """An lm-eval TaskManager that knows all the tasks; lm-eval's own are indexed only where they are needed.

    Args:
        include_path: a directory with further task files.

    Raises:
        FileNotFoundError: `include_path` is not a directory.
        ValueError: lm-eval is not installed, or a task is unknown.
    """
    require_harness()
    if include_path is not None and not Path(include_path).is_dir():
        raise FileNotFoundError(f"include_path is not a directory: {include_path}")
    task_manager = import_module("lm_eval.tasks").TaskManager
    unknown = list(tasks)
    for defaults in (False, True):  # indexing all of lm-eval's own tasks takes seconds
        if defaults or include_path is not None:
            manager = task_manager(include_path=include_path, include_defaults=defaults)
            unknown = [task for task in tasks if not manager.match_tasks([task])]
            if not unknown:
                return manager
    raise ValueError(
        f"unknown task {', '.join(unknown)}; `lm_eval ls tasks` lists lm-eval's own, include_path adds a directory"
    )


def require_harness() -> Any:
    """The lm_eval module; raises ValueError with the remedy if it is not installed."""
    try:
        return import_module("lm_eval")
    except ImportError as error:
        raise ValueError("tasks need lm-eval: pip install 'retrofox[eval]'") from error
