"""The parts of a source that are tokenised, kept and reused as one: files, rows of a dataset, either augmented."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from retrofox.data import read as data_read
from retrofox.data.augment import Augmentation
from retrofox.data.files import Digests
from retrofox.data.read import Batch, compression, form_of, require_column, row_batches


class Unit(Protocol):
    """A part of a source that is tokenised and kept as one."""

    name: str
    size: int

    def identity(self, digests: Digests) -> str: ...
    def batches(self, text_field: str, chat: bool = False) -> Iterator[Batch]: ...


class FileUnit:
    """One file, or a run of small ones."""

    def __init__(self, paths: list[Path]):
        self.paths = paths
        self.name = paths[0].name if len(paths) == 1 else f"{paths[0].name}...{paths[-1].name}"
        self.size = sum(path.stat().st_size for path in paths)

    def identity(self, digests: Digests) -> str:
        """Depends on the contents and on how they are read, not on where the files lie."""
        return json.dumps([[form_of(path) + compression(path), digests.of(path)] for path in self.paths])

    def batches(self, text_field: str, chat: bool = False) -> Iterator[Batch]:
        """Batches of about a megabyte; a text file is one document."""
        waiting = Batch("bytes")
        for path in self.paths:
            form = form_of(path)
            if waiting.items and (form != "text" or sum(map(len, waiting.items)) >= data_read.BATCH_BYTES):
                yield waiting
                waiting = Batch("bytes")
            if form == "text":
                with data_read.reading(path) as (_, stream):
                    waiting.items.append(stream.read())
                waiting.names.append(str(path))
                waiting.size += path.stat().st_size
            else:
                yield from data_read.json_lines(path) if form == "json" else data_read.parquet(path, text_field, chat)
        if waiting.items:
            yield waiting


@dataclass
class RowsUnit:
    """A range of rows of a Hugging Face dataset."""

    name: str
    size: int
    dataset: Any
    start: int
    stop: int
    key: str

    def identity(self, digests: Digests) -> str:
        """The dataset's own fingerprint, the sizes and contents of its files, and the range."""
        files = [digests.of(Path(file["filename"])) for file in self.dataset.cache_files]
        return json.dumps([self.key, files, self.start, self.stop])

    def batches(self, text_field: str, chat: bool = False) -> Iterator[Batch]:
        """Batches of about a megabyte, one column, read 256 rows at a time."""
        feature = self.dataset.features.get(text_field)
        kind = getattr(feature, "dtype", type(feature).__name__)
        # A feature that is no value, such as a list of messages, has no dtype of text.
        fits = (feature is not None and "string" not in kind) if chat else "string" in kind
        require_column(f"hf:{self.name}", text_field, self.dataset.column_names, kind, fits, chat)
        column = self.dataset.select_columns([text_field])
        parts = (column[at : min(at + 256, self.stop)] for at in range(self.start, self.stop, 256))
        values = (value for part in parts for value in part[text_field])
        size = self.size // max(1, self.stop - self.start)
        yield from row_batches(self.name, values, self.start + 1, size, chat)


@dataclass
class AugmentedUnit:
    """A unit whose documents are changed as they are read."""

    unit: Unit
    augment: Augmentation

    def __post_init__(self) -> None:
        self.name, self.size = self.unit.name, self.unit.size

    def identity(self, digests: Digests) -> str:
        """The unit's own, and what decides on the changes."""
        return json.dumps([self.unit.identity(digests), *self.augment.identity()])

    def batches(self, text_field: str, chat: bool = False) -> Iterator[Batch]:
        """The unit's batches, marked: the encoder changes their texts."""
        for batch in self.unit.batches(text_field, chat):
            yield replace(batch, augment=self.augment)
