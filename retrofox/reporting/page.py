"""The page of a report: self-contained HTML with figures drawn from its own numbers."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from matplotlib.figure import Figure

from retrofox.evaluation import gates_report, loss_report, needle_report
from retrofox.reporting.summary import cell, difference
from retrofox.support.plots import svg

SECTIONS = {
    "needles": "Memory: needles in a haystack",
    "loss": "Loss by position",
    "panel": "Unlike texts and instructions",
    "heads": "Gates",
    "tasks": "Tasks",
    "missing": "Not measured",
    "method": "How it was measured",
}
"""Anchor -> title, in the page's order."""


def render(result: dict[str, Any]) -> str:
    """report.html of a report's result."""
    summary, parts = result["summary"], {name: entry["result"] for name, entry in result["parts"].items()}
    needles = [part for name, part in parts.items() if name.startswith("needle-")]
    there = {"method", *parts, *(["needles"] if needles else []), *(["missing"] if result["missing"] else [])}
    there |= {"tasks"} if "tasks-long" in parts else set()
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    environment.filters["breakable"] = breakable
    return environment.get_template("report.html.j2").render(
        result=result,
        summary=summary,
        parts=parts,
        needles=needles,
        modes=[f"needle {mode}" for part in needles for mode in part["modes"]],
        sections={anchor: title for anchor, title in SECTIONS.items() if anchor in there},
        tiles=_tiles(summary["rows"]),
        part_rows=[_part_row(name, entry) for name, entry in result["parts"].items()],
        cell=cell,
        difference=difference,
        image=_image,
        needle_report=needle_report,
        loss_report=loss_report,
        gates_report=gates_report,
    )


def breakable(text: str) -> Markup:
    """Escaped text whose long names may break behind a mark, such as the slashes of a path."""

    def parts(name: re.Match[str]) -> str:
        return re.sub(r"(?<=/)(?=\w)|(?<=[^\W\d][-_.:=])(?=\w)", "<wbr>", name[0])

    return Markup(re.sub(r"\S{20,}", parts, str(escape(text))))


def _image(figure: Figure) -> tuple[str, int]:
    """(a figure as base64, its width in pixels of CSS)."""
    return base64.b64encode(svg(figure)).decode(), round(96 * figure.get_figwidth())


def _tiles(rows: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """The farthest thing measured of each kind: easy needles, standard needles, loss."""
    tiles = []
    for topic, what in (
        ("needle easy", "easy needles found at {}"),
        ("needle standard", "standard needles found at {}"),
        ("loss", "loss at positions {}, nats per token"),
    ):
        own = [row for row in rows if row["topic"] == topic and row["values"]["model"]["interval"] is not None]
        tiles += [(what.format(row["what"]), row) for row in own[-1:]]
    return tiles


def _part_row(name: str, entry: dict[str, Any]) -> list[str]:
    """Each part may have been measured on another day, and elsewhere."""
    own = entry["result"]["environment"]
    where = own["gpu"]["name"] if own["gpu"] else own["cpu"]["name"]
    dtype = next(iter(entry["result"].get("lines", [{}])), {}).get("dtype", "")
    return [name, entry["measures"], f"{entry['seconds']:.0f}", own["time"][:16], where, dtype]
