"""What of a report goes to the Hub with its model: the page, the JSON, and a section of the card."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from retrofox.conversion.fingerprint import model_fingerprint
from retrofox.reporting.format_numbers import cell, difference

FOLDER = "report"
"""Where a report goes inside a model's directory, and in its repository."""
PAGE, DATA = "report.html", "report.json"
FORMAT = 1
HEADING = "## Measured"


def report_of(directory: Path, folder: Path | None = None) -> tuple[str, dict[str, Path]] | None:
    """(section for the card, files by their path in the repository) of a model's report.

    Args:
        directory: the model's.
        folder: where `retrofox report` wrote; None = in the model's directory, and None is returned where it is not.

    Raises:
        FileNotFoundError: `folder` holds no report.
        ValueError: the report is damaged, or is one of other weights.
    """
    place = folder or directory / FOLDER
    if not (place / DATA).is_file():
        if folder is None:
            return None
        raise FileNotFoundError(f"no report in {folder}: `retrofox report {directory} --out {folder}` writes one")
    try:
        found = json.loads((place / DATA).read_text(encoding="utf-8"))
        section, measured = str(found["markdown"]), found["model_fingerprint"]
        (place / PAGE).stat()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the report in {place} is damaged ({error}): run `retrofox report` again") from error
    if measured != model_fingerprint(str(directory)):
        raise ValueError(
            f"the report in {place} is of other weights than those in {directory}: run `retrofox report` again, or "
            "remove it"
        )
    return section, {f"{FOLDER}/{name}": place / name for name in (PAGE, DATA)}


def with_section(card: str, section: str) -> str:
    """A card with the report's section at its end, or in the place of the one that it has."""
    old = re.compile(rf"^{HEADING}\n.*?(?=^## |\Z)", re.M | re.S)
    if old.search(card):
        return old.sub(lambda _: section + "\n", card, count=1)
    return card.rstrip("\n") + "\n\n" + section


def card_section(result: dict[str, Any]) -> str:
    """A Markdown section: the summary's table and sentences, what is missing, and what it was measured with."""
    summary = result["summary"]
    labels = summary["labels"]
    with_base = "base" in labels
    header = ["", *labels.values(), *(["difference", ""] if with_base else [])]
    lines = [HEADING, "", _plain(summary["headline"]) + ".", "", _row(header)]
    lines.append(_row(["---", *["---:"] * (len(header) - 1)]))
    for row in summary["rows"]:
        name = row["what"] if row["topic"] == "tasks" else f"{row['topic']} at {row['what']}"
        cells = [name, *(" ".join(cell(row["values"].get(key), row["unit"])).strip() for key in labels)]
        if with_base:
            cells += [" ".join(difference(row)).strip(), row["state"] or ""]
        lines.append(_row(cells))
    lines.append("")
    told = [text for topic in ("memory", "loss", "tasks") for text in summary["sentences"][topic]]
    lines += [f"* {_plain(text)}" for text in told]
    lines += [f"* not measured: {_plain(name)} ({_plain(why)})" for name, why in result["missing"].items()]
    environment = result["environment"]
    where = environment["gpu"]["name"] if environment["gpu"] else environment["cpu"]["name"]
    versions = ", ".join(f"{name} {environment['versions'][name]}" for name in ("retrofox", "torch", "transformers"))
    lines += ["", f"Suite `{result['suite']}`, {environment['time'][:10]}, {where}, {versions}. Shares with Wilson"]
    lines += ["intervals, other intervals over documents, all 95 %."]
    lines += [f"Plots and all tables: [{FOLDER}/{PAGE}]({FOLDER}/{PAGE})."]
    return "\n".join(lines) + "\n"


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(_plain(cell) for cell in cells) + " |"


def _plain(text: str) -> str:
    """Text that makes no Markdown: names of models may hold bars, stars or brackets."""
    for mark in "\\|*_<>[]`":
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split())
