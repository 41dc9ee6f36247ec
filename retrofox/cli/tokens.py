"""Options that take tokens: 512Ki, 20M and 65536 alike. Importing it imports no torch."""

from __future__ import annotations

import typer

from retrofox.support.counts import ALLOWED, parse_count, parse_tokens

METAVAR = "TOKENS"


def count(text: str | int) -> int:
    """A whole number of tokens from the command line, 0 or more."""
    number = parse_count(text)
    if isinstance(number, int):
        return number
    try:
        return int(str(number))  # a number below 0: the command says what it allows
    except ValueError:
        raise typer.BadParameter(f"got {text!r}: give {ALLOWED}") from None


def length(text: str | float) -> float:
    """A number of tokens from the command line, inf allowed."""
    try:
        return float(str(parse_tokens(text)))
    except ValueError:
        raise typer.BadParameter(f"got {text!r}: give {ALLOWED}, or inf") from None
