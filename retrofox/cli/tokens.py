"""Numbers of options: tokens, 512Ki, 20M and 65536 alike. Importing it imports no torch."""

from __future__ import annotations

import typer

from retrofox.support.counts import ALLOWED, parse_count

METAVAR = "TOKENS"


def count(text: str | int) -> int:
    """A whole number of tokens from the command line, 1 or more."""
    number = parse_count(text)
    if not isinstance(number, int) or number < 1:
        raise typer.BadParameter(f"got {str(text)!r}: give {ALLOWED}, 1 or more")
    return number
