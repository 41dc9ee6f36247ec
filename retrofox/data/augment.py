"""Changes of documents to train on: made-up facts, hard line breaks, another case; each for a share of them.

All are drawn by a hash of the text, so that a document changes alike each time it is read.
"""

from __future__ import annotations

import hashlib
import random
import re
from dataclasses import dataclass
from typing import Any

from retrofox.data import synthetic_facts

VERSION = 1
"""Part of a shard's identity: change it when `reflowed` or `recased` change."""
NARROWEST, WIDEST = 60, 80
"""Columns at which a document's long lines are broken."""
LONG_LINE = 100
"""Characters: shorter lines stay as they are, so documents with hard line breaks do, and most code."""


@dataclass(frozen=True)
class Augmentation:
    """Shares of the documents with made-up facts and of facts asked for, with hard line breaks, in one case."""

    fact_share: float = 0.0
    questions: float = 0.0
    reflow: float = 0.0
    recase: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.fact_share or self.reflow or self.recase)

    def __call__(self, text: str) -> str:
        """The text with all that it draws."""
        if self.fact_share:
            text = synthetic_facts.with_facts(text, self.fact_share, self.questions)
        return recased(reflowed(text, self.reflow), self.recase)

    def identity(self) -> list[Any]:
        """What decides which texts come out: part of a shard's key."""
        told = ["facts", synthetic_facts.VERSION, self.fact_share, *([self.questions] if self.questions else [])]
        form = ["form", VERSION, self.reflow, self.recase]
        return [*(told if self.fact_share else []), *(form if self.reflow or self.recase else [])]


def reflowed(text: str, share: float) -> str:
    """The text with its long lines broken at 60 to 80 columns, one width a document, for a share of the texts.

    Lines that begin with a space and lines of up to 100 characters stay as they are. Breaks take the place of spaces.
    """
    draw = _draw("reflow", text)
    if draw.random() >= share:
        return text
    line = re.compile(rf"(\S.{{0,{draw.randint(NARROWEST, WIDEST) - 1}}})(?: +|$)")
    return "\n".join(
        one if len(one) <= LONG_LINE or one[0].isspace() else line.sub(r"\1\n", one).rstrip("\n")
        for one in text.split("\n")
    )


def recased(text: str, share: float) -> str:
    """The text in lower or in upper case, as often, for a share of the texts."""
    draw = _draw("recase", text)
    if draw.random() >= share:
        return text
    return text.lower() if draw.random() < 0.5 else text.upper()


def _draw(what: str, text: str) -> random.Random:
    return random.Random(hashlib.sha256(f"{what}\n{text}".encode("utf-8", "replace")).digest())
