"""Token shards on disk: written once per unit of a source, whole or not at all, opened as memory maps.

A shard is KEY.tokens (little-endian uint16 or uint32, documents in a row), KEY.bounds (int64, where each begins, and
the end) and KEY.json (counts, checksum), renamed into place last: a shard without it does not exist.
KEY covers the contents read, the text field, the tokenizer and the format, so a changed file gets another shard.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from retrofox.data.encode import Encoded, Encoder, Pool, fingerprint
from retrofox.data.files import (
    DIGESTS,
    FORMAT,
    Digests,
    Shard,
    cache_folder,
    clear_disk_errors,
    is_complete,
    read_shard,
    sweep,
    write_note,
)
from retrofox.data.read import Batch
from retrofox.data.sources import SourceLike, Unit, resolve
from retrofox.support.files import temporary, to_disk, write_whole

IN_PROCESS_BYTES = 4 << 20
"""Below this starting processes costs more than it gains."""


@dataclass(frozen=True)
class PreparedSource:
    """The shards of one source, in order."""

    path: str
    weight: float
    text_field: str
    files: list[dict[str, Any]]
    shards: list[Shard]

    @property
    def tokens(self) -> int:
        """Tokens of all shards."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        """Documents of all shards."""
        return sum(shard.documents for shard in self.shards)

    @property
    def fingerprint(self) -> str:
        """sha256 of the tokens and boundaries, wherever the files lie."""
        content = [[shard.sha256, shard.documents, shard.tokens] for shard in self.shards if shard.tokens]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()


@dataclass
class Manifest:
    """Prepared data: the sources with their shards, the tokenizer's fingerprint, this call's counts."""

    folder: Path
    tokenizer: str
    eos: int | None
    sources: list[PreparedSource]
    made: int = 0
    reused: int = 0
    seconds: float = 0.0
    path: Path = field(default_factory=Path)

    @property
    def tokens(self) -> int:
        """Tokens of all sources."""
        return sum(source.tokens for source in self.sources)

    @property
    def documents(self) -> int:
        """Documents of all sources."""
        return sum(source.documents for source in self.sources)

    def summary(self) -> dict[str, Any]:
        """Counts for a report, plain values."""
        return {
            "manifest": str(self.path),
            "tokens": self.tokens,
            "documents": self.documents,
            "shards_written": self.made,
            "shards_reused": self.reused,
            "seconds": round(self.seconds, 3),
            "sources": [
                {
                    "path": source.path,
                    "weight": source.weight,
                    "documents": source.documents,
                    "empty_documents": sum(shard.empty for shard in source.shards),
                    "tokens": source.tokens,
                }
                for source in self.sources
            ],
        }

    def save(self) -> None:
        """Writes manifest-KEY.json into the folder; KEY depends on its content."""
        content = {
            "format": FORMAT,
            "tokenizer": self.tokenizer,
            "eos": self.eos,
            "documents": self.documents,
            "tokens": self.tokens,
            "sources": [asdict(source) for source in self.sources],
        }
        text = json.dumps(content, indent=1)
        self.path = self.folder / f"manifest-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
        write_whole(self.path, text.encode() + b"\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Manifest:
        """Reads a manifest written by `save`.

        Raises:
            FileNotFoundError: no such file.
            ValueError: not a manifest, or of another format.
        """
        path = Path(path)
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ValueError(f"{path}: not a manifest of token shards of format {FORMAT}: run `retrofox prepare` again")
        sources = [
            PreparedSource(**{**source, "shards": [Shard(**shard) for shard in source["shards"]]})
            for source in values["sources"]
        ]
        return cls(path.parent, values["tokenizer"], values["eos"], sources, path=path)


def prepare_sources(
    sources: Sequence[SourceLike],
    tokenizer: Any,
    out_dir: str | os.PathLike[str],
    *,
    workers: int | None = None,
    progress: bool = True,
    text_field: str = "text",
) -> Manifest:
    """Tokenises sources into shards, keeping those that exist; interrupted, the next call goes on.

    Every document is what `tokenizer(text)` gives, with the tokenizer's EOS (if it has one) as last token.

    Args:
        sources: see `retrofox.data.sources.resolve`; a source's own text_field goes before `text_field`.
        out_dir: where shards are kept; several recipes may share it.
        workers: tokenising processes; None = one per core.
        progress: a bar with tokens per second and the remaining time, on stderr.

    Raises:
        FileNotFoundError: nothing at a source's path.
        ValueError: a source can't be read, holds no text, or the disk is full; the text says which and what to do.
    """
    started = time.perf_counter()
    folder = Path(out_dir).expanduser()
    workers = workers or _cores()
    with clear_disk_errors(folder), cache_folder(folder):
        sweep(folder)
        memory = folder / DIGESTS
        digests = Digests.load(memory)
        made_from = fingerprint(tokenizer)
        plan = [(source, source.text_field or text_field, resolve(source, leave_out=folder)) for source in sources]
        keys = {id(unit): _key(unit, name, made_from, digests) for _, name, units in plan for unit in units}
        write_whole(memory, json.dumps(digests.known).encode())
        missing = [
            (unit, name, keys[id(unit)])
            for _, name, units in plan
            for unit in units
            if not is_complete(folder, keys[id(unit)])
        ]
        total = sum(len(units) for *_, units in plan)
        if progress and len(missing) < total:
            there, todo = total - len(missing), f"{len(missing)} to make" if missing else "nothing to tokenise"
            Console(stderr=True, soft_wrap=True, emoji=False).print(
                f"{there} of {total} token shards are in {folder}, {todo}", highlight=False, markup=False
            )
        _tokenise(missing, tokenizer, folder, workers, progress)
        for unit, name, key in missing:
            if _key(unit, name, made_from, digests) != key:
                (folder / f"{key}.json").unlink(missing_ok=True)
                raise ValueError(f"{unit.name} changed while it was read: run it again when it is complete")
        prepared = [
            PreparedSource(
                source.path,
                source.weight,
                name,
                [file for unit in units for file in _files(unit, digests)],
                [read_shard(folder, keys[id(unit)]) for unit in units],
            )
            for source, name, units in plan
        ]
        for source in prepared:
            if not source.tokens:
                raise ValueError(f"{source.path}: no text in it, {sum(s.empty for s in source.shards)} empty documents")
        manifest = Manifest(folder, made_from, tokenizer.eos_token_id, prepared, len(missing), total - len(missing))
        manifest.save()
    manifest.seconds = time.perf_counter() - started
    return manifest


def _cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _key(unit: Unit, text_field: str, tokenizer: str, digests: Digests) -> str:
    content = json.dumps([FORMAT, unit.identity(digests), text_field, tokenizer])
    return hashlib.sha256(content.encode()).hexdigest()[:24]


def _files(unit: Unit, digests: Digests) -> list[dict[str, Any]]:
    """The origin of a unit: path, bytes, sha256 (of its identity, where it is no file)."""
    paths: list[Path] = getattr(unit, "paths", [])
    if not paths:
        digest = hashlib.sha256(unit.identity(digests).encode()).hexdigest()
        return [{"path": unit.name, "bytes": unit.size, "sha256": digest}]
    return [{"path": str(path), "bytes": path.stat().st_size, "sha256": digests.of(path)} for path in paths]


def _tokenise(units: list[tuple[Unit, str, str]], tokenizer: Any, folder: Path, workers: int, progress: bool) -> None:
    """Writes the shards that are missing; those of one text field share a pool of processes."""
    units = list({key: (unit, name, key) for unit, name, key in units}.values())  # the same content twice: once
    total = sum(unit.size for unit, *_ in units)
    with _bar(total, progress and bool(units)) as advance:
        for name in dict.fromkeys(name for _, name, _ in units):
            mine = [(unit, key) for unit, field_name, key in units if field_name == name]
            small = sum(unit.size for unit, _ in mine) < IN_PROCESS_BYTES
            with Pool(Encoder(tokenizer, name), 1 if small else workers) as pool:
                _write_all(mine, name, pool, folder, advance)


def _write_all(units: list[tuple[Unit, str]], text_field: str, pool: Pool, folder: Path, advance: Any) -> None:
    """Writes shards one after the other, from one stream of batches: no process waits at the end of a unit."""
    stream = _encoded([unit for unit, _ in units], text_field, pool)
    for unit, key in units:
        with _ShardWriter(folder, key, unit.name, pool.encoder.dtype) as writer:
            for encoded, is_last in stream:
                writer.add(encoded)
                advance(encoded.size, len(encoded.tokens))
                if is_last:
                    break
            writer.finish()


def _encoded(units: list[Unit], text_field: str, pool: Pool) -> Iterator[tuple[Encoded, bool]]:
    """The encoded batches of all units in order, each with whether it is its unit's last.

    Reading runs ahead of tokenising; its error is raised after all units before it were given.
    """
    lasts: deque[bool] = deque()  # of the batches on their way
    broken: list[Exception] = []

    def batches() -> Iterator[Batch]:
        for unit in units:
            waiting = Batch("text")  # a unit without any batch is one without documents
            try:
                parts = (part for batch in unit.batches(text_field) for part in pool.encoder.divide(batch))
                for number, part in enumerate(parts):
                    if number:
                        lasts.append(False)
                        yield waiting
                    waiting = part
            except (ValueError, OSError) as error:
                broken.append(error)
                return
            lasts.append(True)
            yield waiting

    for encoded in pool.map(batches()):
        yield encoded, lasts.popleft()
    if broken:
        raise broken[0]


class _ShardWriter:
    """One shard, under temporary names until it is complete and on disk."""

    def __init__(self, folder: Path, key: str, name: str, dtype: np.dtype):
        self.folder, self.key, self.name, self.dtype = folder, key, name, dtype
        self.digest = hashlib.sha256()
        self.lengths: list[np.ndarray] = []
        self.empty, self.unfinished = 0, False

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
        self.digest.update(data)
        if self.unfinished:
            self.lengths[-1][-1] += lengths[0]
            lengths = lengths[1:]
        if len(lengths):
            self.lengths.append(lengths)
        self.unfinished = part.unfinished
        self.empty += part.empty

    def finish(self) -> None:
        """Moves the files into place, the note that makes them a shard last."""
        to_disk(self.stream)
        ends = np.cumsum(np.concatenate([np.zeros(1, dtype=np.int64), *self.lengths]), dtype="<i8")
        self.digest.update(ends.tobytes())
        with open(self.bounds, "wb") as stream:
            stream.write(ends.tobytes())
            to_disk(stream)
        counts = (len(ends) - 1, int(ends[-1]), self.empty)
        shard = Shard(self.key, self.name, *counts, self.dtype.str, self.digest.hexdigest())
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
