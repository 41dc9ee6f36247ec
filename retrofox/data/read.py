"""Reading one file: decompression by its suffix, then text, JSON lines or Parquet, document by document."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

TEXT = (".txt", ".text")
JSON_LINES = (".jsonl", ".ndjson", ".json")
PARQUET = (".parquet",)
COMPRESSED = (".gz", ".xz", ".zst", ".bz2")
ARCHIVES = (".tar", ".tgz", ".tbz", ".tbz2", ".txz", ".tzst", ".zip", ".7z", ".rar")
BATCH_BYTES = 1 << 20

Messages = list[dict[str, Any]]
"""A conversation: {"role": ..., "content": ...} each."""


class Record(NamedTuple):
    """A document: `name` says where it is, for errors; `value` is a text or a conversation; `size` its source bytes."""

    name: str
    value: Any
    size: int


END = Record("", "", 0)
"""Stands behind the last document of a unit."""


def batches(records: Iterable[Record], size: int = BATCH_BYTES) -> Iterator[list[Record]]:
    """Records in lists of about `size` characters of text; where reading fails, those read before come first."""
    batch: list[Record] = []
    held = 0
    try:
        for record in records:
            batch.append(record)
            held += len(record.value) if isinstance(record.value, str) else len(str(record.value))
            if held >= size:
                yield batch
                batch, held = [], 0
    except (ValueError, OSError):
        yield batch
        raise
    yield batch


def compression(path: Path) -> str:
    """.gz, .xz, .zst, .bz2, or nothing, by the name."""
    suffix = path.suffix.lower()
    return suffix if suffix in COMPRESSED else ""


def inner_suffix(path: Path) -> str:
    """The suffix without that of compression, lower case: ".jsonl" of "a.JSONL.gz"."""
    return (Path(path.stem) if compression(path) else path).suffix.lower()


def form_of(path: Path) -> str:
    """text, json or parquet, by the name; ValueError for an archive of files."""
    suffix = inner_suffix(path)
    if suffix in ARCHIVES:
        raise ValueError(f"{path}: is an archive of files: unpack it and give the directory")
    return "json" if suffix in JSON_LINES else "parquet" if suffix in PARQUET else "text"


def read_file(path: Path, field: str, chat: bool) -> Iterator[Record]:
    """The documents of a file; a text file is one. ValueError where it is damaged, or lacks the field."""
    form = form_of(path)
    with _reading(path) as (raw, stream):
        if form == "text":
            text = _utf8(stream.read(), path)
            yield Record(str(path), value_of({field: text}, str(path), field, chat), path.stat().st_size)
        elif form == "json":
            done = 0
            for number, record in _json_records(stream, path):
                name = f"{path}:{number}"
                yield Record(name, value_of(record, name, field, chat), raw.tell() - done)
                done = raw.tell()
        else:
            yield from _parquet(stream, path, field, chat)


def value_of(record: Any, name: str, field: str, chat: bool) -> str | Messages:
    """The text, or the messages, in a field of a record, empty where it holds null; ValueError where it has neither."""
    if not isinstance(record, dict) or field not in record:
        has = ", ".join(map(repr, record)) if isinstance(record, dict) and record else type(record).__name__
        chats = not chat and isinstance(record, dict) and "messages" in record
        way = "chats are read by a recipe, where the source says `chat: true`" if chats else "set text_field"
        raise ValueError(f"{name}: no field {field!r}; the record has {has}: {way}")
    if chat and record.get("tools"):
        raise ValueError(
            f"{name}: has `tools`, which the chat template is not given: write them into a system message, or leave "
            "such conversations out"
        )
    value = record[field]
    if value is None:
        return [] if chat else ""
    if chat and not (isinstance(value, list) and all(map(_is_message, value))):
        raise ValueError(f"{name}: field {field!r} must hold a list of {{role, content}}, got {repr(value)[:100]}")
    if not chat and not isinstance(value, str):
        raise ValueError(f"{name}: field {field!r} must hold text, got {type(value).__name__}: set text_field")
    return value


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message


def _json_records(stream: Any, path: Path) -> Iterator[tuple[int, Any]]:
    """(number, value) of the lines of a JSON-lines file, or of the members of a file that is one JSON array."""
    if stream.peek(64).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"[":
        yield from enumerate(_parsed(stream.read(), str(path)), 1)
        return
    for number, line in enumerate(stream, 1):
        if line.strip(b"\xef\xbb\xbf \t\r\n"):  # else empty, or nothing but a byte order mark
            yield number, _parsed(line, f"{path}:{number}")


def _parsed(data: bytes, name: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:  # RecursionError: thousands of brackets in one another
        raise ValueError(f"{name}: not a line of JSON: {error} (one value a line, or one array)") from None


def _parquet(stream: Any, path: Path, field: str, chat: bool) -> Iterator[Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(pa.BufferReader(stream.read()) if compression(path) else stream)
        names = table.schema_arrow.names
        if field not in names:
            value_of(dict.fromkeys(names), str(path), field, chat)
        size = path.stat().st_size // max(1, table.metadata.num_rows)
        number = 0
        columns = [field, *(["tools"] if chat and "tools" in names else [])]
        for chunk in table.iter_batches(batch_size=256, columns=columns):
            for row in chunk.to_pylist():
                number += 1
                name = f"{path}:{number}"
                yield Record(name, value_of(row, name, field, chat), size)
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise _damaged(path, error) from error


def _utf8(data: bytes, path: Path) -> str:
    """Decodes a text, its byte order mark left out."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        why = f"{error.reason} at byte {error.start}"
        raise ValueError(f"{path}: not UTF-8 text ({why}): make it text, .jsonl or .parquet, or remove it") from None


def _zstandard(raw: Any) -> io.BufferedReader:
    """Frame after frame, each of at most 128 MB of history (zstd --long=27)."""
    import pyarrow as pa

    return io.BufferedReader(pa.CompressedInputStream(raw, "zstd"), 1 << 20)


OPENERS: dict[str, Callable[[Any], Any]] = {
    "": lambda raw: raw,
    ".gz": gzip.open,
    ".xz": lzma.open,
    ".bz2": bz2.open,
    ".zst": _zstandard,
}


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[tuple[Any, Any]]:
    """The file and its decompressed stream; errors of reading damaged data become a ValueError."""
    with open(path, "rb") as raw:
        try:
            yield raw, OPENERS[compression(path)](raw)
        except (OSError, lzma.LZMAError, zlib.error, EOFError) as error:
            raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> ValueError:
    """The error about a file of the wrong format or content."""
    return ValueError(f"{path}: can't be read ({error}): the file is damaged, or not what its suffix says")
