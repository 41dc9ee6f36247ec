"""Writing token shards: units are read ahead, encoded by threads, and each lands whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from retrofox.data.encode import Encoded, Encoder, Reading
from retrofox.data.files import Shard, write_note
from retrofox.data.read import Batch
from retrofox.data.source_shards import Unit
from retrofox.support.files import temporary, to_disk, write_whole

PARALLELISM = "TOKENIZERS_PARALLELISM"
"""Environment variable by which tokenizers start threads of their own."""


def tokenise(
    units: list[tuple[Unit, Reading, str]], tokenizer: Any, folder: Path, workers: int, progress: bool
) -> None:
    """Writes the shards that are missing; those that are read alike share threads."""
    units = list({key: (unit, reading, key) for unit, reading, key in units}.values())  # the same content twice: once
    total = sum(unit.size for unit, *_ in units)
    with _bar(total, progress and bool(units)) as advance, _no_threads_of_tokenizers():
        for reading in dict.fromkeys(reading for _, reading, _ in units):
            mine = [(unit, key) for unit, read_as, key in units if read_as == reading]
            encoder = Encoder(tokenizer, reading)
            _write_all(mine, encoder, folder, workers if encoder.fast is not None else 1, advance)


@contextlib.contextmanager
def _no_threads_of_tokenizers() -> Iterator[None]:
    """Ours are as many as asked for; and after theirs, each process that a loader forks would print a warning."""
    before, os.environ[PARALLELISM] = os.environ.get(PARALLELISM), "false"
    try:
        yield
    finally:
        del os.environ[PARALLELISM]
        if before is not None:
            os.environ[PARALLELISM] = before


def _write_all(units: list[tuple[Unit, str]], encoder: Encoder, folder: Path, workers: int, advance: Any) -> None:
    """Writes shards one after the other, from one stream of batches: no thread waits at the end of a unit."""
    with ThreadPoolExecutor(workers) as threads:
        try:
            stream = _encoded([unit for unit, _ in units], encoder, threads, ahead=2 * workers)
            for unit, key in units:
                with _ShardWriter(folder, key, unit.name, encoder.dtype) as writer:
                    for encoded, is_last in stream:
                        writer.add(encoded)
                        advance(encoded.size, len(encoded.tokens))
                        if is_last:
                            break
                    writer.finish()
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def _encoded(
    units: list[Unit], encoder: Encoder, threads: ThreadPoolExecutor, ahead: int
) -> Iterator[tuple[Encoded, bool]]:
    """The encoded batches of all units in order, each with whether it is its unit's last.

    Threads are enough: the tokenizer, which runs without the interpreter's lock, takes 97 % of the time.

    Raises:
        ValueError, OSError: a unit can't be read; after all before it were given.
    """
    waiting: deque[tuple[Future[Encoded], bool]] = deque()
    for batch, is_last in _batches(units, encoder):
        waiting.append((threads.submit(_encode, encoder, batch), is_last))
        if len(waiting) > ahead:
            future, last = waiting.popleft()
            yield future.result(), last
    for future, last in waiting:
        yield future.result(), last


def _encode(encoder: Encoder, batch: Batch | Exception) -> Encoded:
    if isinstance(batch, Exception):
        raise batch
    return encoder(batch)


def _batches(units: list[Unit], encoder: Encoder) -> Iterator[tuple[Batch | Exception, bool]]:
    """The batches of all units in order, long texts divided, each with whether it is its unit's last.

    An error ends them, in the place of the batch that can't be read.
    """
    reading = encoder.reading
    for unit in units:
        waiting = Batch("text")  # a unit without any batch is one without documents
        try:
            parts = (part for batch in unit.batches(reading.field, reading.chat) for part in encoder.divide(batch))
            for number, part in enumerate(parts):
                if number:
                    yield waiting, False
                waiting = part
        except (ValueError, OSError) as error:
            yield error, True
            return
        yield waiting, True


class _ShardWriter:
    """One shard, under temporary names until it is complete and on disk."""

    def __init__(self, folder: Path, key: str, name: str, dtype: np.dtype):
        self.folder, self.key, self.name, self.dtype = folder, key, name, dtype
        self.digest = hashlib.sha256()
        self.lengths: list[np.ndarray] = []
        self.learnt: list[np.ndarray] = []
        self.empty, self.wordless, self.literals, self.unfinished = 0, 0, 0, False

    def __enter__(self) -> _ShardWriter:
        self.files = contextlib.ExitStack()
        self.tokens = self.files.enter_context(temporary(self.folder, f"{self.key}.tokens"))
        self.bounds = self.files.enter_context(temporary(self.folder, f"{self.key}.bounds"))
        self.stream = self.files.enter_context(open(self.tokens, "wb"))
        return self

    def __exit__(self, *error: object) -> None:
        self.files.close()

    def add(self, part: Encoded) -> None:
        """Appends the documents of a batch; the first may be the rest of the last batch's last."""
        data, lengths = part.tokens.tobytes(), part.lengths
        self.stream.write(data)
        if part.learnt is not None:
            self.learnt.append(part.learnt)
        self.digest.update(data)
        if self.unfinished:
            self.lengths[-1][-1] += lengths[0]
            lengths = lengths[1:]
        if len(lengths):
            self.lengths.append(lengths)
        self.unfinished = part.unfinished
        self.empty += part.empty
        self.wordless += part.wordless
        self.literals += part.literals

    def finish(self) -> None:
        """Moves the files into place, the note that makes them a shard last."""
        to_disk(self.stream)
        ends = np.cumsum(np.concatenate([np.zeros(1, dtype=np.int64), *self.lengths]), dtype="<i8")
        self.digest.update(ends.tobytes())
        with open(self.bounds, "wb") as stream:
            stream.write(ends.tobytes())
            to_disk(stream)
        if self.learnt:
            marks = np.concatenate(self.learnt).tobytes()
            self.digest.update(marks)
            write_whole(self.folder / f"{self.key}.learnt", marks)
        counts = (len(ends) - 1, int(ends[-1]), self.empty)
        digest = self.digest.hexdigest()
        shard = Shard(
            self.key, self.name, *counts, self.dtype.str, digest, self.wordless, self.literals, bool(self.learnt)
        )
        os.replace(self.tokens, self.folder / f"{self.key}.tokens")
        os.replace(self.bounds, self.folder / f"{self.key}.bounds")
        write_note(self.folder, shard)


@contextlib.contextmanager
def _bar(total: int, shown: bool) -> Iterator[Any]:
    """Yields advance(source bytes, tokens)."""
    columns = (
        SpinnerColumn(),
        TextColumn("tokenising"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TextColumn("{task.fields[counts]}"),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    started, tokens = time.perf_counter(), 0
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as progress:
        task = progress.add_task("tokenising", total=total, counts="")

        def advance(size: int, count: int) -> None:
            nonlocal tokens
            tokens += count
            rate = tokens / (time.perf_counter() - started)
            progress.update(task, advance=size, counts=f"{tokens / 1e6:.1f}M tokens, {rate / 1e6:.2f}M/s")

        yield advance
        progress.update(task, completed=total)
