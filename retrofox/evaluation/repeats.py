"""Where a text repeats itself: tokens that complete an n-gram seen before, and how far back it was last seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

SPACES = ("Ġ", "▁", "Ċ", "ĉ", "č", " ", "\n", "\t", "\r")
"""First characters of a token after a space, a line break or a tab: byte-level BPE, SentencePiece, plain text."""
UNSPACED = ((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x30FF), (0x3400, 0x9FFF))
"""Scripts written without spaces, where every token counts as a word: Thai, Lao, Burmese, Khmer, kana, Han."""
UNITS = ("words", "tokens")


@dataclass(frozen=True)
class Repeats:
    """The context before every position of one text.

    Attributes:
        start: (T,) int64, the first token of the n-gram that ends at a position; -1 where too few words precede it.
        previous: (T,) int64, where the same n-gram last ended before; -1 where it never did.
        times: (T,) int64, how often it occurred before.
    """

    start: np.ndarray
    previous: np.ndarray
    times: np.ndarray

    @property
    def distance(self) -> np.ndarray:
        """(T,) int64: tokens back to the last earlier occurrence, 0 where there is none."""
        return np.where(self.previous < 0, 0, np.arange(len(self.previous)) - self.previous)

    def earlier(self, position: int) -> list[tuple[int, int]]:
        """(first, last) token of every earlier occurrence of the n-gram that ends at `position`, the nearest first."""
        size = position - int(self.start[position])
        found, end = [], int(self.previous[position])
        while end >= 0:
            found.append((end - size, end))
            end = int(self.previous[end])
        return found


def find_repeats(token_ids: np.ndarray, starts_word: np.ndarray, n: int) -> Repeats:
    """Finds, for every token, the last earlier occurrence of the n-gram that the token completes.

    The n-gram of position i is x_s .. x_i, s the first token of the (n-1)-th word before the word that x_i belongs to:
    n - 1 whole words and the part of the next word up to x_i. It occurs at j < i if x_{j-(i-s)} .. x_j are the same
    tokens. Whether a token starts a word depends on the token alone, so the same tokens are the same words.

    Args:
        token_ids: (T,) integers.
        starts_word: (T,) bool, whether a token is the first of its word; all True makes tokens the words.
        n: words in an n-gram, at least 2.

    Raises:
        ValueError: n below 2.
    """
    if n < 2:
        raise ValueError(f"an n-gram has at least 2 words, got {n}: a word alone says nothing about what follows it")
    text = np.ascontiguousarray(token_ids, np.int64)
    words = np.flatnonzero(starts_word)
    place = np.cumsum(starts_word) - n  # index into words of the n-gram's first word
    start = np.where(place >= 0, words[np.maximum(place, 0)], -1) if len(words) else np.full(len(text), -1)
    previous = np.full(len(text), -1, np.int64)
    times = np.zeros(len(text), np.int64)
    last: dict[bytes, int] = {}
    for position in np.flatnonzero(start >= 0).tolist():
        key = text[start[position] : position + 1].tobytes()
        if key in last:
            previous[position], times[position] = last[key], times[last[key]] + 1
        last[key] = position
    return Repeats(start.astype(np.int64), previous, times)


class WordStarts:
    """Tells which tokens of a tokenizer start a word.

    A token does if its text begins with a space, a line break or a tab, if it is a special token, or if it is written
    in a script without spaces. So punctuation belongs to the word before it, and a line break is a word of its own.
    """

    def __init__(self, tokenizer: Any, unit: str = "words"):
        self.tokenizer, self.unit = tokenizer, unit
        self.special = set(getattr(tokenizer, "all_special_ids", ()))
        self.known: dict[int, bool] = {}

    def __call__(self, token_ids: np.ndarray) -> np.ndarray:
        """(T,) bool for tokens (T,)."""
        if self.unit == "tokens":
            return np.ones(len(token_ids), bool)
        distinct, place = np.unique(token_ids, return_inverse=True)
        self._learn([token for token in distinct.tolist() if token not in self.known])
        return np.array([self.known[token] for token in distinct.tolist()], bool)[place]

    def _learn(self, tokens: Sequence[int]) -> None:
        for token, piece in zip(tokens, self.tokenizer.convert_ids_to_tokens(list(tokens)), strict=True):
            self.known[token] = token in self.special or piece is None or self._starts(token, piece)

    def _starts(self, token: int, piece: str) -> bool:
        if piece.startswith(SPACES):
            return True
        first = ord((self.tokenizer.decode([token]) or " ")[0])
        return any(low <= first <= high for low, high in UNSPACED)
