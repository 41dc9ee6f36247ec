"""What of a report goes to the Hub with its model: the page, the JSON, and a section of the card."""

from __future__ import annotations

import json
import re
from pathlib import Path

from retrofox.conversion.fingerprint import model_fingerprint

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
