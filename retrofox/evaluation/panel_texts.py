"""The texts of a panel: kinds of text unlike each other, cut into rows of like length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SHIPPED = Path(__file__).with_name("panel-texts")
SHORTEST_ROW = 32
"""Tokens of the shortest row: a shorter remainder behind the last full row is dropped."""


@dataclass(frozen=True)
class Row:
    """Tokens (T,) int64 of one kind, and for each the number of the document it is from, (T,) int64."""

    token_ids: np.ndarray
    document: np.ndarray


def choose_kinds(data: Sequence[str]) -> dict[str, list[str]]:
    """Kind -> paths: the user's, and the shipped ones (`panel-texts/LICENCE.md`) that the user has no texts of.

    Args:
        data: KIND=PATH words, a kind given often having several paths; or directories in each of which a file or folder
            is a kind, which then leave the shipped texts out.
    """
    kinds: dict[str, list[str]] = {}
    given: dict[str, list[str]] = {}
    for word in data:
        kind, _, path = word.partition("=")
        folder = Path(word).expanduser()
        if folder.is_dir():  # before KIND=PATH: it may be called lang=de
            inner = [place for place in sorted(folder.iterdir()) if not place.name.startswith((".", "_"))]
            if not inner:
                raise ValueError(f"{word} is an empty directory: give one with a file or folder for each kind")
            for place in inner:  # two files may be of one kind: news.de.txt and news.en.txt
                kinds.setdefault(place.name.split(".")[0], []).append(str(place))
        elif kind and path:
            given.setdefault(kind, []).append(path)
        else:
            raise ValueError(
                "texts of a panel are KIND=PATH, such as verse=poems/, or a directory with a file or folder for each "
                f"kind; got {word!r}"
            )
    if not kinds:
        kinds = {file.stem: [str(file)] for file in sorted(SHIPPED.glob("*.txt"))}
    return kinds | given


def rows_of(texts: Iterable[np.ndarray], length: int, tokens: int) -> list[Row]:
    """Documents one after the other, cut into rows of `length` tokens, at most `tokens` in all."""
    ids: list[np.ndarray] = []
    owners: list[np.ndarray] = []
    left = tokens
    for number, text in enumerate(texts):
        ids.append(np.asarray(text[:left], np.int64))
        owners.append(np.full(len(ids[-1]), number))
        left -= len(ids[-1])
        if not left:
            break
    if not ids:
        return []
    whole, document = np.concatenate(ids), np.concatenate(owners)
    rows = [Row(whole[at : at + length], document[at : at + length]) for at in range(0, len(whole), length)]
    return [row for row in rows if len(row.token_ids) >= SHORTEST_ROW]
