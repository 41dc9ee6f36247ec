"""The same text and tokens for every proof."""

from __future__ import annotations

from typing import Any

import torch

TEXT = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, it "
    "was the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the season of "
    "Darkness, it was the spring of hope, it was the winter of despair, we had everything before us, we had nothing "
    "before us, we were all going direct to Heaven, we were all going direct the other way. There were a king with a "
    "large jaw and a queen with a plain face, on the throne of England; there were a king with a large jaw and a "
    "queen with a fair face, on the throne of France. In both countries it was clearer than crystal to the lords of "
    "the State preserves of loaves and fishes, that things in general were settled for ever.\n\n"
    "def gcd(a, b):\n    while b:\n        a, b = b, a % b\n    return a\n\n"
    "The area under y = x^2 from 0 to 3 is 9. Water boils at 100 degrees Celsius at sea level; in Denver it boils at "
    "about 95. Le temps des cerises. 1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144."
)


def fixed_tokens(tokenizer: Any, vocabulary: int, longest: int) -> tuple[Any, bool]:
    """(1, T <= longest) int64 tokens of a fixed text, and whether they were drawn at random instead.

    Drawn, 256 at most, where there is no tokenizer or it makes less than two tokens of the text.
    """
    ids = [] if tokenizer is None else tokenizer(TEXT).input_ids[:longest]
    if drawn := len(ids) < 2:
        ids = torch.randint(vocabulary, (min(256, longest),), generator=torch.Generator().manual_seed(0))
    return torch.as_tensor(ids)[None] % vocabulary, drawn
