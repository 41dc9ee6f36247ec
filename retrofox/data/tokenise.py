"""Writing token shards: documents are encoded in batches that span units, and each shard lands whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from retrofox.data.encode import Encoded, Encoder, Reading
from retrofox.data.files import FORMAT, Shard
from retrofox.data.read import BATCH_BYTES, END, Record, batches
from retrofox.data.source_units import Unit
from retrofox.support.files import sync, temporary, write_json, write_whole
from retrofox.support.report import progress_bar

PARALLELISM = "TOKENIZERS_PARALLELISM"
"""Environment variable by which tokenizers use all cores, or one."""


class PendingShard(NamedTuple):
    """A shard to write: the unit it is read from, how, the shard's file stem, and the stem that the unit has by now."""

    unit: Unit
    reading: Reading
    key: str
    key_now: Callable[[], str]


def tokenise(todo: list[PendingShard], tokenizer: Any, folder: Path, progress: bool) -> None:
    """Writes shards. Those with the same `Reading` share one stream of documents, so no core waits between units.

    Raises:
        ValueError, OSError: a unit can't be read; the shards before it are written.
    """
    todo = list({shard.key: shard for shard in todo}.values())  # the same content twice: once
    total = sum(shard.unit.size for shard in todo)
    os.environ.pop(PARALLELISM, None)
    try:
        with progress_bar("MB", progress and bool(todo)) as bar:
            task = bar.add_task("tokenising", total=total / 1e6)
            for reading, alike in itertools.groupby(todo, key=lambda shard: shard.reading):
                _write_all(list(alike), Encoder(tokenizer, reading), folder, lambda size: bar.advance(task, size / 1e6))
    finally:
        os.environ[PARALLELISM] = "false"  # else each process that is forked later prints a warning


def _write_all(todo: list[PendingShard], encoder: Encoder, folder: Path, advance: Callable[[int], None]) -> None:
    waiting = iter(todo)
    writer: _ShardWriter | None = None
    try:
        for batch in batches(_documents(todo, encoder.reading), BATCH_BYTES * min(32, os.cpu_count() or 1)):
            for record, encoded in zip(batch, encoder(batch), strict=True):
                writer = writer or _ShardWriter(folder, next(waiting), encoder.dtype)
                if record is END:
                    writer.finish()
                    writer = None
                else:
                    writer.add(encoded)
            advance(sum(record.size for record in batch))
    finally:
        if writer is not None:
            writer.files.close()


def _documents(todo: list[PendingShard], reading: Reading) -> Iterator[Record]:
    """The documents of all units in order, with END after each unit."""
    for shard in todo:
        yield from shard.unit.records(reading.field, reading.chat)
        yield END


class _ShardWriter:
    """Writes one shard, under temporary names until it is complete; closing `files` removes an incomplete one."""

    def __init__(self, folder: Path, shard: PendingShard, dtype: np.dtype):
        self.folder, self.shard, self.key, self.dtype = folder, shard, shard.key, dtype
        self.digest = hashlib.sha256()
        self.lengths: list[int] = []
        self.learnt: list[np.ndarray] = []
        self.empty, self.literals, self.untold = 0, 0, 0
        self.files = contextlib.ExitStack()
        self.tokens = self.files.enter_context(temporary(folder, f"{self.key}.tokens"))
        self.stream = self.files.enter_context(self.tokens.open("wb"))

    def add(self, document: Encoded) -> None:
        """Appends a document; one without tokens is counted, not kept."""
        self.literals += document.literals
        self.untold += document.untold
        if not len(document.tokens):
            self.empty += 1
            return
        data = document.tokens.tobytes()
        self.stream.write(data)
        self.digest.update(data)
        self.lengths.append(len(document.tokens))
        if document.learnt is not None:
            self.learnt.append(document.learnt)

    def finish(self) -> None:
        """Moves the files into place, the note that makes them a shard last; raises ValueError for a changed unit."""
        if self.shard.key_now() != self.key:
            raise ValueError(f"{self.shard.unit.name} changed while it was read: run it again when it is complete")
        self.stream.close()
        sync(self.tokens)
        ends = np.cumsum([0, *self.lengths], dtype="<i8").tobytes()
        self.digest.update(ends)
        if self.learnt:
            marks = np.concatenate(self.learnt).tobytes()
            self.digest.update(marks)
            write_whole(self.folder / f"{self.key}.learnt", marks)
        write_whole(self.folder / f"{self.key}.bounds", ends)
        os.replace(self.tokens, self.folder / f"{self.key}.tokens")
        shard = Shard(
            self.key,
            self.shard.unit.name,
            documents=len(self.lengths),
            tokens=sum(self.lengths),
            empty=self.empty,
            dtype=self.dtype.str,
            sha256=self.digest.hexdigest(),
            literals=self.literals,
            chat=bool(self.learnt),
            untold=self.untold,
        )
        write_json(self.folder / f"{self.key}.json", {"format": FORMAT, "shard": asdict(shard)})
        self.files.close()
