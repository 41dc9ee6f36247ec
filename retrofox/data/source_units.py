"""The parts of a source that are tokenised, kept and reused as one: files, or rows of a dataset."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrofox.data.files import Digests
from retrofox.data.read import Record, compression, form_of, read_file, value_of


class FileUnit:
    """One file, or a run of small ones."""

    def __init__(self, paths: list[Path]):
        self.paths = paths
        self.name = paths[0].name if len(paths) == 1 else f"{paths[0].name}...{paths[-1].name}"
        self.size = sum(path.stat().st_size for path in paths)

    def identity(self, digests: Digests) -> str:
        """Depends on the contents and on how they are read, not on where the files lie."""
        return json.dumps([[form_of(path) + compression(path), digests.of(path)] for path in self.paths])

    def records(self, text_field: str, chat: bool = False) -> Iterator[Record]:
        """The files' documents."""
        for path in self.paths:
            yield from read_file(path, text_field, chat)


@dataclass
class RowReader:
    """One pass over the rows of a dataset, shared by its units: each goes on where the one before ended."""

    open: Callable[[int, str], Iterator[dict[str, Any]]]
    """open(start, column) -> the rows from there on, with that column at least if there is one."""
    rows: Iterator[dict[str, Any]] | None = None
    at: int = -1

    def take(self, start: int, stop: int, column: str) -> Iterator[dict[str, Any]]:
        """Rows start .. stop, or as many as there are; reading anew only where another part was read before."""
        if self.rows is None or self.at != start:
            self.rows, self.at = self.open(start, column), start
        while self.at < stop:
            row = next(self.rows, None)
            if row is None:
                return
            self.at += 1
            yield row


@dataclass
class RowsUnit:
    """A range of rows of a Hugging Face dataset: one on this disk, or one whose rows are fetched as they are read.

    Attributes:
        origin: tells the dataset and its version, plain values.
        files: those it lies in on this disk.
    """

    name: str
    size: int
    origin: list[Any]
    start: int
    stop: int
    reader: RowReader = field(repr=False)
    files: list[Path] = field(default_factory=list)

    def identity(self, digests: Digests) -> str:
        """The dataset's origin, the contents of its files, and the range."""
        files = [[digests.of(file) for file in self.files]] if self.files else []
        return json.dumps([*self.origin, *files, self.start, self.stop])

    def records(self, text_field: str, chat: bool = False) -> Iterator[Record]:
        """The rows' documents, from one column; ValueError where it holds no text, or the Hub can't be reached."""
        import pyarrow as pa
        from datasets.exceptions import DatasetsError  # an optional extra

        share = self.size // max(1, self.stop - self.start)
        try:
            for number, row in enumerate(self.reader.take(self.start, self.stop, text_field), self.start + 1):
                name = f"{self.name}:{number}"
                yield Record(name, value_of(row, name, text_field, chat), share)
        except (OSError, DatasetsError, pa.ArrowException) as error:
            raise ValueError(
                f"hf:{self.name}: can't be read on: {error}; run it again, finished shards are kept"
            ) from error


Unit = FileUnit | RowsUnit
