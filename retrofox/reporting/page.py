"""The page of a report: self-contained HTML, figures as data, nothing fetched from a network."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from retrofox.evaluation.gates_report import decoding_note
from retrofox.reporting.details import gates_table, live_share_table, slopes_table
from retrofox.reporting.format_numbers import number
from retrofox.reporting.style import CSS
from retrofox.reporting.tables import chip, summary_table, table

WIDTH = re.compile(rb'<svg[^>]* width="([0-9.]+)pt"')
POINT = 4 / 3
"""Pixels of CSS in a point."""
MEMORY = "A loss that does not rise is no memory. So memory comes first: facts asked for at the end of a long text."


def render(result: dict[str, Any], folder: Path) -> str:
    """report.html of a report's result, its figures read from the parts' folders in `folder`."""
    sections = [*_sections(result, folder)]
    links = "".join(f'<a href="#{name}">{escape(title)}</a>' for name, title, _ in sections)
    bodies = "".join(f'<section id="{name}"><h2>{escape(title)}</h2>{body}</section>' for name, title, body in sections)
    title = escape(result["summary"]["labels"]["model"])
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}: retrofox report</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{CSS}</style></head>\n<body><header><div>{_head(result)}<nav>{links}</nav></div></header>\n"
        f"<main>{_banner(result['summary']['few'])}{_tiles(result)}{bodies}{_foot(result)}</main></body></html>\n"
    )


def _head(result: dict[str, Any]) -> str:
    labels = list(result["summary"]["labels"].values())
    beside = f"beside {', '.join(labels[1:])}" if len(labels) > 1 else "measured alone"
    environment = result["environment"]
    where = environment["gpu"]["name"] if environment["gpu"] else f"CPU, {environment['cpu']['name']}"
    facts = f"{beside} · suite {result['suite']} · {environment['time'][:10]} · {where}"
    said = f'<p class="headline">{escape(result["summary"]["headline"])}</p>'
    return f'<p class="eyebrow">retrofox report</p><h1>{escape(labels[0])}</h1>{said}<p>{escape(facts)}</p>'


def _banner(few: list[str]) -> str:
    """A warning above everything else where the sample is small."""
    if not few:
        return ""
    return f'<p class="banner">Too little to show much: {escape(", ".join(few))}. Intervals are wide.</p>'


def _tiles(result: dict[str, Any]) -> str:
    """The farthest thing measured of each kind: easy needles, standard needles, loss."""
    rows = result["summary"]["rows"]
    tiles = []
    for topic, what in (
        ("needle easy", "easy needles found at {}"),
        ("needle standard", "standard needles found at {}"),
        ("loss", "loss at positions {}, nats per token"),
    ):
        own = [row for row in rows if row["topic"] == topic and row["values"]["model"]["interval"] is not None]
        if own:
            tiles.append(_tile(own[-1], what.format(own[-1]["what"])))
    return f'<div class="tiles">{"".join(tiles)}</div>' if tiles else ""


def _tile(row: dict[str, Any], what: str) -> str:
    value, unit = row["values"]["model"], row["unit"]
    low, high = (number(end, unit).removesuffix(" %") for end in value["interval"])
    beside = f"95 %: {low} to {high}"
    base = row["values"].get("base")
    if base is not None and base["value"] is not None:
        beside += f" · base {number(base['value'], unit)}"
    return (
        f'<div class="tile"><div class="what">{escape(what)}</div><div class="big">{number(value["value"], unit)}</div>'
        f'<div class="beside">{escape(beside)}</div>{chip(row["state"])}</div>'
    )


def _sections(result: dict[str, Any], folder: Path) -> Iterator[tuple[str, str, str]]:
    """(anchor, title, HTML) of each section, those of parts that were not measured left out."""
    summary, parts = result["summary"], {name: entry["result"] for name, entry in result["parts"].items()}
    needles = {name: part for name, part in parts.items() if name.startswith("needle-")}
    memory = _list(summary["sentences"]["memory"])
    if not needles:
        memory += _lead("Needles were not measured: this page says nothing about memory.")
    yield "memory", "Memory", f'<p class="lead">{MEMORY}</p>{memory}'
    if needles:
        rows = summary_table(result, "needle")
        figures = "".join(_needle_figure(name, part, folder) for name, part in needles.items())
        grids = "".join(_needle_grids(name, part, folder) for name, part in needles.items())
        figures = f'<div class="pair">{figures}</div>' + _details("By depth", f'<div class="pair">{grids}</div>')
        yield "needles", "Needles in a haystack", _needle_lead(needles) + rows + figures
    if "loss" in parts:
        yield "loss", "Loss by position", _loss(result, parts["loss"], folder)
    if "panel" in parts:
        yield "panel", "Unlike texts and instructions", _panel(result, parts["panel"])
    if "heads" in parts:
        yield "heads", "Gates", _heads(summary, parts["heads"], folder)
    if any(name in parts for name in ("tasks", "tasks-long")):
        lead = "lm-eval's scores; differences paired by document, with their standard error and a two-sided test."
        yield "tasks", "Tasks", _lead(lead) + _list(summary["sentences"]["tasks"]) + summary_table(result, "tasks")
    if result["missing"]:
        items = [f"{name}: {why}" for name, why in result["missing"].items()]
        yield "missing", "Not measured", _list(items)
    yield "method", "How it was measured", _method(result)


def _needle_lead(needles: dict[str, dict[str, Any]]) -> str:
    counts = ", ".join(
        f"{_prompts(len(part['depths']) * part['trials'])} a length in {' and '.join(part['modes'])}"
        for part in needles.values()
    )
    return _lead(f"Share of needles found, with 95 % Wilson intervals: {counts}. All models read the same.")


def _prompts(count: int) -> str:
    return f"{count} prompt{'s' * (count > 1)}"


def _needle_figure(name: str, part: dict[str, Any], folder: Path) -> str:
    return _figure(folder, name, part, "svg", f"{', '.join(part['modes'])}: share found at each length")


def _needle_grids(name: str, part: dict[str, Any], folder: Path) -> str:
    """A heat-map for each model and mode."""
    grids = []
    for label, values in part["models"].items():
        for mode in part["modes"]:
            key = values["role"] if len(part["modes"]) == 1 else f"{values['role']}_{mode}"
            grids.append(_figure(folder, name, part, f"{key}_svg", f"{mode}: {label}"))
    return "".join(grids)


def _loss(result: dict[str, Any], part: dict[str, Any], folder: Path) -> str:
    sentences = _list(result["summary"]["sentences"]["loss"])
    documents = f"{part['documents']} document{'s' * (part['documents'] > 1)}, {part['tokens']:,} tokens"
    lead = f"L(i), nats per token at each position of a text; {documents}. Intervals are over documents."
    figure = _figure(folder, "loss", part, "svg", "Above L(i); below, paired differences at the same tokens.")
    slopes = _details("Slopes", slopes_table(part))
    return _lead(lead) + sentences + summary_table(result, "loss") + figure + slopes


def _panel(result: dict[str, Any], part: dict[str, Any]) -> str:
    lead = (
        f"Kinds of text that no recipe was tuned to, up to {part['tokens']:,} tokens each, in rows of "
        f"{part['length']:,} tokens; greedy answers to the same prompts. Losses in nats per token."
    )
    return _lead(lead) + _list(result["summary"]["sentences"]["panel"]) + summary_table(result, "panel")


def _heads(summary: dict[str, Any], part: dict[str, Any], folder: Path) -> str:
    counts = part["summary"]
    measured = f"measured over {part['tokens']:,} tokens" if part["tokens"] else "from the gates' biases alone"
    lead = (
        f"{counts['heads']} gates: {counts['local']} local, {counts['medium']} between, {counts['global']} global, "
        f"{counts['dead']} dead, {counts['saturated']} saturated; {measured}."
    )
    figure = _figure(folder, "heads", part, "svg", "One mark per head: its half-life in tokens.")
    live = ""
    if "live_share" in part:
        live = live_share_table(part["live_share"]) + _lead(decoding_note(part["live_share"]))
    return _lead(lead) + _list(summary["sentences"]["heads"]) + live + figure + gates_table(part)


def _method(result: dict[str, Any]) -> str:
    """Commands, versions, hardware: each part may have been measured on another day."""
    environment = result["environment"]
    report = f"<h3>The report</h3><pre>{escape(environment['command'])}</pre>"
    rows, commands = [], []
    for name, entry in result["parts"].items():
        own = entry["result"]["environment"]
        where = own["gpu"]["name"] if own["gpu"] else own["cpu"]["name"]
        line = next(iter(entry["result"].get("lines", [{}])), {})
        rows.append(
            [name, entry["measures"], f"{entry['seconds']:.0f}", own["time"][:16], where, line.get("dtype", "")]
        )
        commands.append(f"<h3>{escape(name)}</h3><pre>{escape(entry['command'])}</pre>")
    header = ["part", "measured", "seconds", "begun", "on", "dtype"]
    facts = {
        "model": result["model"],
        "fingerprint": result["model_fingerprint"],
        "against": ", ".join(result["against"]) or "nothing",
        "texts": ", ".join(result["data"]) or "none",
        "versions": ", ".join(f"{name} {version}" for name, version in environment["versions"].items() if version),
        "Python": f"{environment['python']}, {environment['platform']}",
        "processor": f"{environment['cpu']['name']}, {environment['cpu']['cores']} cores",
        "GPU": _gpu(environment["gpu"]),
    }
    listed = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in facts.items())
    said = "Intervals are 95 %, each for itself: of twenty differences that are none, one is called clear on average."
    return (
        _lead(said)
        + f"<dl>{listed}</dl>"
        + table(header, rows)
        + report
        + _details("The same parts alone", "".join(commands))
    )


def _gpu(gpu: dict[str, Any] | None) -> str:
    return "none" if gpu is None else f"{gpu['count']} x {gpu['name']}, {gpu['memory_bytes'] / 2**30:.0f} GiB"


def _figure(folder: Path, name: str, part: dict[str, Any], key: str, caption: str) -> str:
    """A figure that an evaluation wrote, as data inside the page."""
    file = folder / name / Path(part["files"][key]).name  # the folder may have moved since
    drawn = file.read_bytes()
    width = float(WIDTH.search(drawn).group(1)) * POINT  # type: ignore[union-attr]
    data = base64.b64encode(drawn).decode()
    under = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    alt = escape(caption or f"{name}, {key.removesuffix('_svg')}", quote=True)
    style = f'style="max-width:{width:.0f}px"'
    return f'<figure><img alt="{alt}" {style} src="data:image/svg+xml;base64,{data}">{under}</figure>'


def _foot(result: dict[str, Any]) -> str:
    version = result["environment"]["versions"]["retrofox"]
    return f"<footer>Made by retrofox {escape(str(version))}. All numbers of this page are in report.json.</footer>"


def _lead(text: str) -> str:
    return f'<p class="lead">{escape(text)}</p>'


def _list(items: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>" if items else ""


def _details(title: str, body: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{body}</details>"
