"""Numbers as a report prints them, each with its interval."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def cell(value: Mapping[str, Any] | None, unit: str) -> str:
    """A value with its 95 % interval, or with its standard error where it has only that."""
    if value is None or value["value"] is None:
        return "-"
    text = number(value["value"], unit)
    if value.get("interval") is not None:
        low, high = value["interval"]
        return f"{text} ({_end(low, unit)} to {_end(high, unit)})"
    return text if value.get("standard_error") is None else f"{text} ±{value['standard_error']:.3f}"


def number(value: float, unit: str) -> str:
    """A share in per cent, a loss with three digits after the point, a score with four digits."""
    return f"{100 * value:.0f} %" if unit == "share" else f"{value:.3f}" if unit == "nats" else f"{value:.4g}"


def difference(row: Mapping[str, Any]) -> str:
    """A row's difference to the base: percentage points, nats or the score's own unit."""
    change = row["difference"]
    if change is None:
        return "-"
    value, unit = change["value"], row["unit"]
    text = _signed(value, unit) + (" pp" if unit == "share" else "")
    if change.get("interval") is not None:
        low, high = (_signed(end, unit) for end in change["interval"])
        return f"{text} ({low} to {high})"
    error = change.get("standard_error")
    if error is not None:
        text += f" ±{100 * error:.0f}" if unit == "share" else f" ±{error:.4f}"
    return text if change.get("p") is None else f"{text}, p {change['p']:.2g}"


def _end(value: float, unit: str) -> str:
    return f"{100 * value:.0f}" if unit == "share" else f"{value:.3f}"


def _signed(value: float, unit: str) -> str:
    """With its sign, and none where all digits are 0."""
    text = f"{100 * value:+.0f}" if unit == "share" else f"{value:+.3f}" if unit == "nats" else f"{value:+.4f}"
    return text if float(text) else text[1:]
