"""Rows of a data set on the Hub, read as they are needed: "hf:org/name:train[:500]" fetches the files of 500 rows.

Without a slice of rows, `datasets` downloads a set whole, all its splits, before the first row can be read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from retrofox.data.files import Digests
from retrofox.data.read import Batch, require_column, row_batches

UNIT_ROWS = 256
"""Rows that are tokenised, kept and reused as one: about 100 MB of books."""
ROW_BYTES = 1 << 16
"""Guess of a row's size where the set's card doesn't say: only the progress bar shows it."""
_ROWS = re.compile(r"(\w+)\[([\d_]*):([\d_]+)\]")


def sliced(split: str | None) -> tuple[str, int, int] | None:
    """("train", 0, 500) of "train[:500]"; None where no slice with an end in rows is asked for."""
    match = _ROWS.fullmatch(split or "")
    return None if match is None else (match[1], int(match[2] or 0), int(match[3]))


@dataclass
class _Cursor:
    """One pass over the rows of a split, shared by its units: each goes on where the one before ended."""

    builder: Any
    split: str
    rows: Iterator[dict[str, Any]] | None = None
    at: int = -1

    def take(self, start: int, stop: int) -> Iterator[dict[str, Any]]:
        """Rows start .. stop, or as many as there are; reading anew only where another part was read before."""
        if self.rows is None or self.at != start:
            dataset = self.builder.as_streaming_dataset(split=self.split)
            self.rows, self.at = iter(dataset.skip(start)), start
        while self.at < stop:
            row = next(self.rows, None)
            if row is None:
                return
            self.at += 1
            yield row


@dataclass
class StreamedUnit:
    """A range of rows, fetched while they are tokenised."""

    name: str
    size: int
    files: list[Any]
    split: str
    start: int
    stop: int
    cursor: _Cursor = field(repr=False)

    def identity(self, digests: Digests) -> str:
        """The set's files, with the commit of the Hub that their addresses hold, and the range of rows."""
        return json.dumps(["streamed", self.files, self.split, self.start, self.stop])

    def batches(self, text_field: str, chat: bool = False) -> Iterator[Batch]:
        """Batches of about a megabyte, one column.

        Raises:
            ValueError: no such column, one that holds no text (or messages), or the Hub can't be reached.
        """
        share = self.size // max(1, self.stop - self.start)
        yield from row_batches(self.name, self._values(text_field, chat), self.start + 1, share, chat)

    def _values(self, text_field: str, chat: bool) -> Iterator[Any]:
        for row in self._rows():
            value = row.get(text_field)
            fits = value is None or isinstance(value, list if chat else str)
            require_column(f"hf:{self.name}", text_field, list(row), type(value).__name__, fits, chat)
            yield value

    def _rows(self) -> Iterator[dict[str, Any]]:
        from datasets.exceptions import DatasetsError  # an optional extra

        try:
            yield from self.cursor.take(self.start, self.stop)
        except (OSError, ValueError, DatasetsError) as error:  # ValueError: no Parquet, no JSON
            self.cursor.rows = None
            raise ValueError(
                f"hf:{self.name}: can't be read on: {error}; run it again, finished shards are kept"
            ) from error


def units(builder: Any, name: str, split: str, start: int, stop: int) -> list[StreamedUnit]:
    """The units of rows start .. stop of a split.

    Args:
        builder: what `datasets.load_dataset_builder` gives: the set's files are known, none is read.

    Raises:
        ValueError: no such split, or an empty range.
    """
    files = builder.config.data_files or {}
    if split not in files or start >= stop:
        raise ValueError(f"no rows {start} to {stop} of a split {split!r}; there are: {', '.join(files)}")
    known = (builder.info.splits or {}).get(split)
    row_bytes = known.num_bytes // known.num_examples if known and known.num_examples else ROW_BYTES
    found = [list(map(str, files[split])), [list(origin) for origin in files[split].origin_metadata]]
    cursor = _Cursor(builder, split)
    return [
        StreamedUnit(f"{name}:{split}", row_bytes * (end - begin), found, split, begin, end, cursor)
        for begin in range(start, stop, UNIT_ROWS)
        for end in (min(begin + UNIT_ROWS, stop),)
    ]
