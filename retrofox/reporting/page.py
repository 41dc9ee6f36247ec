"""The page of a report: self-contained HTML with figures drawn from its own numbers."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from matplotlib.figure import Figure

from retrofox.evaluation import gates_report, loss_report
from retrofox.evaluation.needle_report import depth_figure, length_figure
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
        facts=_facts(result),
        tiles=_tiles(summary["rows"]),
        method=_method(result),
        part_rows=[_part_row(name, entry) for name, entry in result["parts"].items()],
        cell=cell,
        difference=difference,
        image=_image,
        length_figure=length_figure,
        depth_figure=depth_figure,
        loss_figure=loss_report.figure,
        gates_figure=gates_report.figure,
        decoding_note=gates_report.decoding_note,
        live_columns=gates_report.LIVE_COLUMNS,
        live_rows=gates_report.live_rows,
    )


def breakable(text: str) -> Markup:
    """Escaped text whose long names may break behind a mark, such as the slashes of a path."""

    def parts(name: re.Match[str]) -> str:
        return re.sub(r"(?<=/)(?=\w)|(?<=[^\W\d][-_.:=])(?=\w)", "<wbr>", name[0])

    return Markup(re.sub(r"\S{20,}", parts, str(escape(text))))


def _image(figure: Figure) -> tuple[str, int]:
    """(a figure as base64, its width in pixels of CSS)."""
    return base64.b64encode(svg(figure)).decode(), round(96 * figure.get_figwidth())


def _facts(result: dict[str, Any]) -> str:
    labels, environment = [*result["summary"]["labels"].values()], result["environment"]
    beside = f"beside {', '.join(labels[1:])}" if len(labels) > 1 else "measured alone"
    where = environment["gpu"]["name"] if environment["gpu"] else f"CPU, {environment['cpu']['name']}"
    return f"{beside} · suite {result['suite']} · {environment['time'][:10]} · {where}"


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


def _method(result: dict[str, Any]) -> dict[str, str]:
    environment, gpu = result["environment"], result["environment"]["gpu"]
    return {
        "model": result["model"],
        "against": ", ".join(result["against"]) or "nothing",
        "texts": ", ".join(result["data"]) or "none",
        "versions": ", ".join(f"{name} {version}" for name, version in environment["versions"].items() if version),
        "Python": f"{environment['python']}, {environment['platform']}",
        "processor": f"{environment['cpu']['name']}, {environment['cpu']['cores']} cores",
        "GPU": "none" if gpu is None else f"{gpu['count']} x {gpu['name']}, {gpu['memory_bytes'] / 2**30:.0f} GiB",
    }


def _part_row(name: str, entry: dict[str, Any]) -> list[str]:
    """Each part may have been measured on another day, and elsewhere."""
    own = entry["result"]["environment"]
    where = own["gpu"]["name"] if own["gpu"] else own["cpu"]["name"]
    dtype = next(iter(entry["result"].get("lines", [{}])), {}).get("dtype", "")
    return [name, entry["measures"], f"{entry['seconds']:.0f}", own["time"][:16], where, dtype]
