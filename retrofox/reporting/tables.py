"""Tables of a report's page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from retrofox.reporting.format_numbers import cell, difference


def chip(state: str | None) -> str:
    """A coloured word for what a difference says; nothing without one."""
    if state is None:
        return ""
    return f'<span class="chip {escape(state) if " " not in state else "unclear"}">{escape(state)}</span>'


def summary_table(result: dict[str, Any], topic: str) -> str:
    """The summary's rows of one topic: a column for each model, then the difference to the base."""
    labels = result["summary"]["labels"]
    rows = [row for row in result["summary"]["rows"] if row["topic"].split()[0] == topic]
    with_base = "base" in labels and any(row["difference"] for row in rows)
    first = {"needle": "length", "loss": "positions", "panel": "text", "tasks": "task, metric"}[topic]
    header = [first, *labels.values(), *(["difference to the base", ""] if with_base else [])]
    body, group = [], None
    for row in rows:
        if topic == "needle" and row["topic"] != group:
            group = row["topic"]
            body.append(f'<tr class="group"><td colspan="{len(header)}">{escape(group.split(maxsplit=1)[1])}</td></tr>')
        cells = [f"<td>{escape(row['what'])}</td>"]
        cells += [_value(row, key) if key in row["values"] else "<td>-</td>" for key in labels]
        if with_base:
            cells += [f"<td>{_small(difference(row))}</td>", f"<td>{chip(row['state'])}</td>"]
        body.append(f"<tr>{''.join(cells)}</tr>")
    return _framed(header, "".join(body))


def _value(row: dict[str, Any], key: str) -> str:
    value = row["values"][key]
    text = _small(cell(value, row["unit"]))
    if row["unit"] != "share" or value["value"] is None:
        return f"<td>{text}</td>"
    return f'<td class="bar" style="--v:{value["value"]:.3f}">{text}</td>'


def _small(text: str) -> str:
    """A number, what follows it in small print."""
    for mark in (" (", " ±", ", p "):
        value, found, rest = text.partition(mark)
        if found:
            return f'{escape(value)} <span class="low">{escape((found + rest).strip(" ,"))}</span>'
    return escape(text)


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A plain table: the first column to the left, the others to the right."""
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(value))}</td>' for value in row)}</tr>" for row in rows)
    return _framed(header, body)


def _framed(header: Sequence[str], body: str) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
