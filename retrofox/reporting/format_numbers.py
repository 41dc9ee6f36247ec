"""Numbers as a report prints them: each as (value, note), the note its interval, error or test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


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
