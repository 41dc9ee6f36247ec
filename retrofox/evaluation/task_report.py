"""The report of lm-eval tasks: scores of every model, and paired differences to the base."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from retrofox.evaluation.lm_eval import Scores
from retrofox.evaluation.statistics import paired_difference


def differences(scores: Mapping[str, Scores], reference: str) -> dict[str, dict[str, dict[str, Any]]]:
    """{model: {task: {metric: paired difference to `reference`}}} of metrics that are means over documents."""
    if reference not in scores:
        return {}
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
    """A table of metrics, and one of their differences with standard error and p.

    Args:
        tasks: {model: {task: {metric: value}}}.
        changes: the result of `differences`; names: the models' names.
    """
    table = Table(title="lm-eval tasks (± standard error)", title_justify="left")
    for column in ("task", "metric", *(names[key] for key in tasks)):
        table.add_column(column, justify="left" if column in ("task", "metric") else "right", overflow="fold")
    for task, metrics in next(iter(tasks.values())).items():
        for metric, value in metrics.items():
            if isinstance(value, float | None) and "_stderr" not in metric:
                table.add_row(task, metric, *(_cell(results[task], metric) for results in tasks.values()))
    console.print(table)
    rows = [
        (task, metric, names[key], change)
        for key, found in changes.items()
        for task, metrics in found.items()
        for metric, change in metrics.items()
    ]
    if not rows:
        return
    title = f"Differences to {names[reference]}, paired by document (± standard error; p: two-sided)"
    table = Table(title=title, title_justify="left")
    for column in ("task", "metric", "model", "difference", "p"):
        table.add_column(column, justify="right" if column in ("difference", "p") else "left", overflow="fold")
    for task, metric, name, change in rows:
        error = "" if change["standard_error"] is None else f" ±{change['standard_error']:.4f}"
        table.add_row(task, metric, name, f"{change['difference']:+.4f}{error}", f"{change['p']:.3g}")
    console.print(table)


def _cell(metrics: Mapping[str, Any], metric: str) -> str:
    value, error = metrics.get(metric), metrics.get(metric.replace(",", "_stderr,"))
    spread = f" ±{error:.3f}" if isinstance(error, float) else ""
    return "-" if value is None else f"{value:.4f}{spread}"
