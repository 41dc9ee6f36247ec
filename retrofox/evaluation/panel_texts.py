"""The texts of a panel: kinds of text unlike each other, cut into rows of like length."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from retrofox.config import Source
from retrofox.data.sources import resolve
from retrofox.data.windows import documents

SHIPPED = Path(__file__).with_name("panel-texts")
SHORTEST_ROW = 32
"""Tokens of the shortest row: what is left over after the last full row is dropped if it has fewer."""


@dataclass(frozen=True)
class Row:
    """Tokens (T,) int64 of one kind, and for each the number of the document it is from, (T,) int64."""

    token_ids: np.ndarray
    document: np.ndarray


def shipped_kinds() -> dict[str, list[str]]:
    """Kind -> files, of the texts that come with the package: small, and free to use (`panel-texts/LICENCE.md`)."""
    return {file.stem: [str(file)] for file in sorted(SHIPPED.glob("*.txt"))}


def parse_kinds(data: Mapping[str, Any] | Sequence[str]) -> dict[str, list[str]]:
    """Kind -> paths, of KIND=PATH words, directories of kinds, or a mapping; a kind given often has several paths.

    Raises:
        FileNotFoundError: a path that is not there.
        ValueError: a word without a kind that is no directory.
    """
    kinds: dict[str, list[str]] = {}
    if isinstance(data, Mapping):
        kinds = {kind: [paths] if isinstance(paths, str) else list(paths) for kind, paths in data.items()}
    else:
        for word in data:
            kind, given, path = word.partition("=")
            if is_panel(word):
                for inner in sorted(Path(word).iterdir()):
                    if not inner.name.startswith((".", "_")):
                        kinds.setdefault(inner.name.split(".")[0], []).append(str(inner))
                continue
            if not (kind and given and path):
                raise ValueError(
                    f"texts of a panel are KIND=PATH, such as verse=poems/, or a directory with a file or folder for "
                    f"each kind; got {word!r}"
                )
            kinds.setdefault(kind, []).append(path)
    for path in (path for paths in kinds.values() for path in paths):
        resolve(Source(path=path))
    return kinds


def is_panel(word: str) -> bool:
    """Whether a word names a directory of kinds."""
    return "=" not in word and Path(word).is_dir()


def choose_kinds(data: Mapping[str, Any] | Sequence[str], only: Sequence[str] = ()) -> dict[str, list[str]]:
    """The user's kinds and, unless there is a directory of kinds, the shipped ones that the user has no texts of.

    Args:
        only: names of kinds to keep; all if empty.

    Raises:
        ValueError: `only` names a kind that there is not.
    """
    whole = not isinstance(data, Mapping) and any(is_panel(word) for word in data)
    kinds = {**({} if whole else shipped_kinds()), **parse_kinds(data)}
    for name in only:
        if name not in (*kinds, "chat"):
            near = difflib.get_close_matches(name, kinds, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(f"no kind {name!r}{hint}: there are {', '.join([*kinds, 'chat'])}")
    return {kind: paths for kind, paths in kinds.items() if not only or kind in only}


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


def read_rows(paths: Sequence[str], tokenizer: Any, length: int, tokens: int, text_field: str) -> list[Row]:
    """The rows of one kind's files."""
    return rows_of((ids for _, ids in documents(paths, tokenizer, text_field=text_field)), length, tokens)
