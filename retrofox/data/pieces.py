"""Where a long text may be cut so that its pieces, encoded apart, give the tokens of the whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

PIECE = 1 << 20
"""Characters: longer texts are encoded in pieces of about this length, on all threads."""
NEIGHBOURHOOD = 512
TRIES = 64
_BETWEEN_WORDS = re.compile(r"(?<=\w)(?=[ \n]\w)|(?<=\n)(?=\w)")


def cuts(text: str, encode: Callable[[str], list[int]]) -> Iterator[int]:
    """Places between words, about PIECE characters apart, where neither side's tokens depend on the other."""
    start = 0
    while len(text) - start > 2 * PIECE:
        for number, match in enumerate(_BETWEEN_WORDS.finditer(text, start + PIECE)):
            at = match.start()
            left, right = text[at - NEIGHBOURHOOD : at], text[at : at + NEIGHBOURHOOD]
            both, one, other = (encode(part) for part in (left + right, left, right))
            if both == one + other:
                break
            if number == TRIES:
                return
        else:
            return
        yield at
        start = at
