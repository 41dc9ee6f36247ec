"""The first screen of a report: memory, then loss, then tasks, each beside the base with its interval."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retrofox.evaluation.gates_report import open_heads_sentence
from retrofox.evaluation.loss_report import CONTROLS
from retrofox.evaluation.loss_report import verdicts as gate_verdicts
from retrofox.evaluation.panel import headline as worst_kind
from retrofox.evaluation.panel import instruction_sentence
from retrofox.evaluation.statistics import paired_difference, side
from retrofox.support.plots import span_label, tokens_label

SIGNIFICANT = 0.05
FEW_DOCUMENTS, FEW_PROMPTS = 8, 50
"""Below so many documents of the loss, or needle prompts at a length, little can be shown."""
LOWER_IS_BETTER = ("perplexity", "bits_per_byte", "brier")
BETTER, WORSE, UNCLEAR = "better", "worse", "no clear difference"


def summarise(results: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """{"labels": names by column, "rows", "sentences"} of the parts that were measured.

    A row is {"topic", "what", "unit" ("share" or "nats" or "score"), "values": by column {"value", "interval"},
    "difference": {"value", "interval" or "standard_error", "p"} of the model to the base, "state"}. States are
    BETTER or WORSE only where the 95 % interval leaves out 0 (p below 0.05), else UNCLEAR; None without a base.
    """
    needles = [result for name, result in results.items() if name.startswith("needle-")]
    rows = [row for result in needles for row in _needle_rows(result)]
    rows += [*_loss_rows(results), *_panel_rows(results), *_task_rows(results)]
    few = too_few(results)
    return {
        "labels": {key: label for result in results.values() for key, label in result["names"].items()},
        "headline": headline(rows, few),
        "few": few,
        "rows": rows,
        "sentences": _sentences(results),
    }


def too_few(results: Mapping[str, dict[str, Any]]) -> list[str]:
    """Warnings about small samples: documents of the loss, prompts at a length."""
    few = []
    documents = results.get("loss", {}).get("documents")
    if documents is not None and documents < FEW_DOCUMENTS:
        few.append(f"{documents} document{'s' * (documents != 1)}")
    for name, result in results.items():
        if name.startswith("needle-"):
            prompts = len(result["depths"]) * result["trials"]
            if prompts < FEW_PROMPTS:
                few.append(f"{prompts} {name.removeprefix('needle-')} needle prompt{'s' * (prompts != 1)} a length")
    return few


def headline(rows: list[dict[str, Any]], few: list[str]) -> str:
    """The report in one sentence: how many rows are better and worse than the base, or that none is shown to be."""
    judged = [row for row in rows if row["state"] is not None]
    if not judged:
        return "Measured alone: no base to compare with"
    better, worse = (sum(row["state"] == state for row in judged) for state in (BETTER, WORSE))
    if better or worse:
        return f"Of {len(judged)} comparisons with the base, {better} are better and {worse} worse"
    return "No difference to the base shown" + (f"; too few: {', '.join(few)}" if few else "")


def _row(topic: str, what: str, unit: str, values: Any, difference: Any, state: str | None) -> dict[str, Any]:
    row = {"topic": topic, "what": what, "unit": unit, "values": values}
    return {**row, "difference": difference, "state": state}


def _judged(change: dict[str, Any] | None, better: int = 1) -> tuple[dict[str, Any] | None, str | None]:
    """A paired difference as a row has it, and what its test says; `better`: -1 where less is better."""
    if change is None:
        return None, None
    sign = better * change["difference"]
    state = UNCLEAR if change["p"] >= SIGNIFICANT or sign == 0 else BETTER if sign > 0 else WORSE
    return {**change, "value": change["difference"]}, state


def _needle_rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for mode in result["modes"]:
        by_length = {values["role"]: values["modes"][mode]["by_length"] for values in result["models"].values()}
        for number, length in enumerate(result["lengths"]):
            values = {
                role: {"value": found[number]["found"], "interval": found[number]["interval"]}
                for role, found in by_length.items()
            }
            ours, theirs = (_found(result, result["names"].get(role), mode, length) for role in ("model", "base"))
            judged = _judged(paired_difference(ours, theirs))
            rows.append(_row(f"needle {mode}", tokens_label(length), "share", values, *judged))
    return rows


def _found(result: dict[str, Any], name: str | None, mode: str, length: int) -> dict[str, float]:
    """1 or 0 by prompt, in the order in which all models read them."""
    own = [a for a in result["answers"] if (a["model"], a["mode"], a["length"]) == (name, mode, length)]
    return {str(n): float(answer["found"]) for n, answer in enumerate(own)}


def _loss_rows(results: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for bucket in results.get("loss", {}).get("buckets", ()):
        if bucket["tokens"]:
            losses = {key: loss for key, loss in bucket["loss"].items() if key not in CONTROLS}
            rows.append(_in_nats("loss", span_label(bucket), losses, bucket["difference"].get("model-base")))
    return rows


def _panel_rows(results: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for kind, found in results.get("panel", {}).get("kinds", {}).items():
        for span in found["spans"]:
            if span["tokens"]:
                losses = {"model": span["loss"], "base": span["base"]}
                rows.append(_in_nats("panel", f"{kind}, {span_label(span)}", losses, span["difference"]))
    return rows


def _in_nats(topic: str, what: str, losses: Mapping[str, Any], change: Mapping[str, Any] | None) -> dict[str, Any]:
    """A row of losses, their intervals cut at 0, and their difference, which has no such end."""
    values = {}
    for key, found in losses.items():
        interval = found["interval"]
        values[key] = {"value": found["mean"], "interval": interval and [max(0.0, interval[0]), interval[1]]}
    if change is None:
        return _row(topic, what, "nats", values, None, None)
    state = (UNCLEAR, WORSE, BETTER)[side(change["interval"])]
    return _row(topic, what, "nats", values, {"value": change["mean"], "interval": change["interval"]}, state)


def _task_rows(results: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for result in (results[name] for name in ("tasks", "tasks-long") if name in results):
        for task, metrics in result["tasks"]["model"].items():
            for metric in (name for name, value in metrics.items() if isinstance(value, float)):
                if "_stderr" in metric:
                    continue
                values = {}
                for key, tasks in result["tasks"].items():
                    error = tasks[task].get(metric.replace(",", "_stderr,"))
                    error = error if isinstance(error, float) else None
                    values[key] = {"value": tasks[task].get(metric), "standard_error": error}
                change = result["task_differences"].get("model", {}).get(task, {}).get(metric)
                judged = _judged(change, -1 if any(word in metric for word in LOWER_IS_BETTER) else 1)
                rows.append(_row("tasks", f"{task}, {metric.removesuffix(',none')}", "score", values, *judged))
    return rows


def _sentences(results: Mapping[str, dict[str, Any]]) -> dict[str, list[str]]:
    """By topic, what its table does not say: of the loss, the panel and the heads."""
    sentences: dict[str, list[str]] = {
        "loss": gate_verdicts(results.get("loss", {"lines": []})),
        "panel": [],
        "heads": [],
    }
    live = results.get("heads", {}).get("live_share")
    if live:
        row = live["lengths"][-1]
        sentences["heads"].append(
            f"after {tokens_label(row['length'])} tokens the gates leave {100 * row['ops']:.0f} % of attention and "
            f"{100 * row['cache']:.0f} % of the cache alive, at a horizon of {live['horizon']:g} nats"
        )
        sentences["heads"].append(open_heads_sentence(live, results["heads"]["heads"]))
    if "panel" in results:
        sentences["panel"].append(worst_kind(results["panel"]))
        if results["panel"]["instructions"] is not None:
            sentences["panel"].append(instruction_sentence(results["panel"]["instructions"]))
    return sentences


def cell(value: Mapping[str, Any] | None, unit: str) -> tuple[str, str]:
    """A value with its 95 % interval, or with its standard error where it has only that."""
    if value is None or value["value"] is None:
        return "-", ""
    text = _number(value["value"], unit) + (" %" if unit == "share" else "")
    if value.get("interval") is not None:
        return text, "({} to {})".format(*(_number(end, unit) for end in value["interval"]))
    return text, "" if value.get("standard_error") is None else f"±{value['standard_error']:.3f}"


def difference(row: Mapping[str, Any]) -> tuple[str, str]:
    """A row's difference to the base: percentage points, nats or the score's own unit."""
    change, unit = row["difference"], row["unit"]
    if change is None:
        return "-", ""
    text = _signed(change["value"], unit) + (" pp" if unit == "share" else "")
    if change.get("interval") is not None:
        return text, "({} to {})".format(*(_signed(end, unit) for end in change["interval"]))
    error, notes = change.get("standard_error"), []
    if error is not None:
        notes.append(f"±{100 * error:.0f}" if unit == "share" else f"±{error:.4f}")
    if change.get("p") is not None:
        notes.append(f"p {change['p']:.2g}")
    return text, ", ".join(notes)


def _number(value: float, unit: str) -> str:
    """A share in per cent, a loss with three digits after the point, a score with four digits."""
    return f"{100 * value:.0f}" if unit == "share" else f"{value:.3f}" if unit == "nats" else f"{value:.4g}"


def _signed(value: float, unit: str) -> str:
    """With its sign, and none where all digits are 0."""
    text = f"{100 * value:+.0f}" if unit == "share" else f"{value:+.3f}" if unit == "nats" else f"{value:+.4f}"
    return text if float(text) else text[1:]
