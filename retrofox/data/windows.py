"""Documents and the windows of them that evaluations read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from retrofox.data.encode import Encoder, Reading
from retrofox.data.read import batches
from retrofox.data.sources import Text, as_source, listed, resolve


def documents(sources: Sequence[Text], tokenizer: Any, *, text_field: str = "text") -> Iterator[tuple[str, np.ndarray]]:
    """Whole documents for evaluation, one after the other: (name, tokens int32), as training sees them (EOS last).

    Args:
        sources: paths as in `data.sources.resolve`, or sources.

    Raises:
        FileNotFoundError, ValueError: as `prepare_sources`.
    """
    for source in sources:
        given = as_source(source)
        reading = Reading.of(given, text_field)
        encode = Encoder(tokenizer, reading)
        for unit in resolve(given):
            for batch in batches(unit.records(reading.field, reading.chat)):
                for record, encoded in zip(batch, encode(batch), strict=True):
                    if len(encoded.tokens):
                        # reports have the file's name, and not its folders
                        yield record.name.rpartition("/")[2], encoded.tokens.astype(np.int32)


def choose_windows(
    data: str | os.PathLike | Sequence[str | os.PathLike],
    tokenizer: Any,
    length: int,
    *,
    windows: int | None = 1,
    min_tokens: int = 2,
    max_documents: int | None = None,
    text_field: str = "text",
) -> list[Window]:
    """Up to `windows` stretches of `length` tokens from the start of each document of at least `min_tokens` tokens.

    Raises:
        FileNotFoundError: a file that is not there.
        ValueError: no text, or no document that is long enough.
    """
    sources = listed(data)
    require_files(sources)
    longest = taken = 0
    chosen: list[Window] = []
    for name, ids in documents(sources, tokenizer, text_field=text_field):
        longest = max(longest, len(ids))
        if len(ids) < min_tokens:
            continue
        stop = len(ids) if windows is None else min(len(ids), windows * length)
        for start in range(0, stop, length):
            piece = np.asarray(ids[start : min(start + length, stop)], np.int64)
            if len(piece) >= min(min_tokens, length):
                chosen.append(Window(taken, piece, name))
        taken += 1
        if taken == max_documents:
            break
    if taken:
        return chosen
    raise ValueError(
        f"no text of {min_tokens} tokens or more in {', '.join(sources)}: the longest document has {longest}"
    )


@dataclass
class Window:
    """A stretch of one document, from its start or from a later multiple of the length."""

    document: int
    token_ids: np.ndarray
    name: str = ""


def require_files(sources: Sequence[Text]) -> None:
    """Refuses texts that are not there, before a model is loaded; datasets on the Hub are not looked up."""
    for source in sources:
        given = as_source(source)
        if not given.path.startswith("hf:"):
            resolve(given)
