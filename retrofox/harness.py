"""Short tasks through EleutherAI's lm-evaluation-harness, its context never cut by a guess."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retrofox.opening import Opened


def run_tasks(
    opened: Opened,
    tasks: Sequence[str],
    *,
    max_length: int,
    include_path: str | None = None,
    limit: int | None = None,
    batch: int = 1,
) -> dict[str, dict[str, Any]]:
    """Runs lm-eval tasks on an open model and returns {task: {metric: value}}.

    lm-eval cuts contexts to `config.max_position_embeddings` or 2048 tokens unless told otherwise, so `max_length`
    (tokens) is always passed.

    Args:
        include_path: a directory with further task files.
        limit: examples per task, None = all.

    Raises:
        ValueError: lm-eval is not installed, or a task is unknown.
    """
    require_harness()
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=include_path)
    unknown = [t for t in tasks if not manager.match_tasks([t])]
    if unknown:
        raise ValueError(
            f"unknown task {', '.join(unknown)}; `lm_eval ls tasks` lists lm-eval's own, include_path adds a directory"
        )
    lm = HFLM(
        pretrained=opened.model,
        tokenizer=opened.tokenizer,
        backend="causal",
        max_length=max_length,
        batch_size=batch,
        device=str(opened.device),
    )
    output = simple_evaluate(model=lm, tasks=list(tasks), limit=limit, task_manager=manager, bootstrap_iters=1000)
    assert output is not None, "only ranks other than 0 get None, and there is one rank"
    return {
        task: {metric: value for metric, value in values.items() if metric not in ("alias", "name", "sample_len")}
        for task, values in output["results"].items()
    }


def require_harness() -> None:
    """Raises ValueError with the remedy if lm-eval is missing."""
    try:
        import lm_eval  # noqa: F401  (only whether it is there matters)
    except ImportError as error:
        raise ValueError("tasks need lm-eval: pip install 'retrofox[eval]'") from error
