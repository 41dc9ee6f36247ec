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
    """Whole documents for evaluation, one after the other: (name, tokens int32), as training sees them (EOS last)."""
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
    min_tokens: int = 2,
    max_documents: int | None = None,
    text_field: str = "text",
) -> list[Window]:
    """The first `length` tokens of each document of at least `min_tokens` tokens.

    Raises:
        FileNotFoundError: a file that is not there.
        ValueError: no text, or no document that is long enough.
    """
    sources = listed(data)
    require_files(sources)
    longest = 0
    chosen: list[Window] = []
    for name, ids in documents(sources, tokenizer, text_field=text_field):
        longest = max(longest, len(ids))
        if len(ids) >= min_tokens:
            chosen.append(Window(np.asarray(ids[:length], np.int64), name))
        if len(chosen) == max_documents:
            break
    if chosen:
        return chosen
    raise ValueError(
        f"no text of {min_tokens} tokens or more in {', '.join(sources)}: the longest document has {longest}"
    )


@dataclass
class Window:
    """The first tokens of one document."""

    token_ids: np.ndarray
    name: str = ""


def require_files(sources: Sequence[Text]) -> None:
    """Refuses texts that are not there, before a model is loaded; datasets on the Hub are not looked up."""
    for source in sources:
        given = as_source(source)
        if not given.path.startswith("hf:"):
            resolve(given)
