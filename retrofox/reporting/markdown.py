"""The part of a report that goes into the model's card."""

from __future__ import annotations

from typing import Any

from retrofox.reporting.format_numbers import cell, difference
from retrofox.reporting.pushed import FOLDER, HEADING, PAGE


def card_section(result: dict[str, Any]) -> str:
    """A Markdown section: the summary's table and sentences, what is missing, and what it was measured with."""
    summary = result["summary"]
    labels = summary["labels"]
    with_base = "base" in labels
    header = ["", *labels.values(), *(["difference", ""] if with_base else [])]
    lines = [
        HEADING,
        "",
        _plain(summary["headline"]) + ".",
        "",
        _row(header),
        _row(["---", *["---:"] * (len(header) - 1)]),
    ]
    for row in summary["rows"]:
        name = row["what"] if row["topic"] == "tasks" else f"{row['topic']} at {row['what']}"
        cells = [name, *(_joined(cell(row["values"].get(key), row["unit"])) for key in labels)]
        lines.append(_row([*cells, *([_joined(difference(row)), row["state"] or ""] if with_base else [])]))
    lines.append("")
    told = [text for topic in ("memory", "loss", "tasks") for text in summary["sentences"][topic]]
    lines += [f"* {_plain(text)}" for text in told]
    lines += [f"* not measured: {_plain(name)} ({_plain(why)})" for name, why in result["missing"].items()]
    environment = result["environment"]
    gpu = environment["gpu"]
    where = gpu["name"] if gpu else environment["cpu"]["name"]
    versions = ", ".join(f"{name} {environment['versions'][name]}" for name in ("retrofox", "torch", "transformers"))
    lines += ["", f"Suite `{result['suite']}`, {environment['time'][:10]}, {where}, {versions}. Shares with Wilson"]
    lines += ["intervals, other intervals over documents, all 95 %."]
    lines += [f"Plots and all tables: [{FOLDER}/{PAGE}]({FOLDER}/{PAGE})."]
    return "\n".join(lines) + "\n"


def _joined(pair: tuple[str, str]) -> str:
    return " ".join(pair).strip()


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(_plain(cell) for cell in cells) + " |"


def _plain(text: str) -> str:
    """Text that makes no Markdown: names of models may hold bars, stars or brackets."""
    for mark in "\\|*_<>[]`":
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())
