"""The text that needles are hidden in: the user's files as tokens, and where its sentences end."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from retrofox.data.windows import documents

LEAST_TOKENS = 1 << 21
"""Reading stops here, or at eight times the longest prompt: more than enough for different stretches."""


class Haystack:
    """Token ids (N,) int32 without special tokens, N at least twice the longest prompt, and their tokenizer."""

    def __init__(self, tokenizer: Any, token_ids: np.ndarray):
        self.tokenizer = tokenizer
        self.token_ids = token_ids
        self._ends: dict[int, bool] = {}

    @cached_property
    def start(self) -> list[int]:
        """What the tokenizer puts before every text, such as <s>."""
        return list(self.tokenizer("")["input_ids"])

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def stretch(self, length: int, place: float) -> np.ndarray:
        """`length` tokens from `place` in [0, 1): of the positions where such a stretch can start."""
        at = int(place * (len(self.token_ids) - length + 1))
        return self.token_ids[at : at + length]

    def sentence_end(self, text: np.ndarray, at: int, reach: int = 64) -> int:
        """The last position within `reach` tokens before `at` that follows a full stop, else `at` itself."""
        if at in (0, len(text)):
            return at
        for position in range(at, max(0, at - reach), -1):
            if self._ends_sentence(int(text[position - 1])):
                return position
        return at

    def _ends_sentence(self, token: int) -> bool:
        if token not in self._ends:
            self._ends[token] = self.tokenizer.decode([token]).rstrip().endswith((".", "!", "?"))
        return self._ends[token]


def read_haystack(tokenizer: Any, data: Sequence[str], longest: int, text_field: str) -> Haystack:
    """The files' text from their start, repeated where it is shorter than twice the longest prompt.

    Raises:
        FileNotFoundError: a file that is not there.
        ValueError: no text.
    """
    special = np.array(sorted(set(tokenizer.all_special_ids)), np.int32)
    enough, tokens, pieces = max(LEAST_TOKENS, 8 * longest), 0, []
    for _, ids in documents(data, tokenizer, text_field=text_field):
        kept = ids[~np.isin(ids, special)]
        tokens += len(kept)
        pieces.append(kept)
        if tokens >= enough:
            break
    if not tokens:
        raise ValueError(f"no text in {', '.join(data)}")
    hay = np.concatenate(pieces)
    return Haystack(tokenizer, np.tile(hay, -(-2 * longest // len(hay))) if len(hay) < 2 * longest else hay)
