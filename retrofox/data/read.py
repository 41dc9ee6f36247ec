"""Reading one file: decompression by its suffix, then text, JSON lines or Parquet, in batches of raw documents."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import importlib
import io
import json
import lzma
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrofox.data.augment import Augmentation

UNCHANGED = Augmentation()
TEXT = (".txt", ".text")
JSON_LINES = (".jsonl", ".ndjson", ".json")
PARQUET = (".parquet",)
COMPRESSED = (".gz", ".xz", ".zst", ".bz2")
ARCHIVES = (".tar", ".tgz", ".tbz", ".tbz2", ".txz", ".tzst", ".zip", ".7z", ".rar")
BATCH_BYTES = 1 << 20


@dataclass
class Batch:
    """Raw documents on their way to the tokenizer: `kind` is the type of the items, `size` counts source bytes.

    `names` say where the items are, files with their folders, for errors.
    kind "text": str; "chat": a list of messages; "bytes": UTF-8 of one document; "json": one line holding the text or
    the messages in a field. `augment` changes the texts.
    """

    kind: str
    items: list[Any] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    size: int = 0
    augment: Augmentation = UNCHANGED


def compression(path: Path) -> str:
    """.gz, .xz, .zst, .bz2, or nothing, by the name."""
    suffix = path.suffix.lower()
    return suffix if suffix in COMPRESSED else ""


def inner_suffix(path: Path) -> str:
    """The suffix without that of compression, lower case: ".jsonl" of "a.JSONL.gz"."""
    return (Path(path.stem) if compression(path) else path).suffix.lower()


def form_of(path: Path) -> str:
    """text, json or parquet, by the name.

    Raises:
        ValueError: an archive of files.
    """
    suffix = inner_suffix(path)
    if suffix in ARCHIVES:
        raise ValueError(f"{path}: is an archive of files: unpack it and give the directory")
    return "json" if suffix in JSON_LINES else "parquet" if suffix in PARQUET else "text"


class _Zstandard(io.RawIOBase):
    """Decompresses frame after frame; the package's own reader takes a file that breaks off for a whole one."""

    def __init__(self, raw: Any):
        import zstandard

        self.raw = raw
        # 2^31 bytes of history, the most a frame may ask for: published dumps are made with zstd --long=31.
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self.frame: Any = None
        self.ready = self.rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.ready:
            data = self.rest or self.raw.read(1 << 16)
            if not data:
                if self.frame is not None:
                    raise EOFError("it ends inside a frame")
                return 0
            self.frame = self.frame or self.decompressor.decompressobj()
            self.ready, self.rest = self.frame.decompress(data), b""
            if self.frame.eof:
                self.rest, self.frame = self.frame.unused_data, None
        count = min(len(buffer), len(self.ready))
        buffer[:count], self.ready = self.ready[:count], self.ready[count:]
        return count


def _decompressed(raw: Any, path: Path) -> Any:
    """Wraps an open file by the suffix of its name; others are returned as they are.

    Raises:
        ValueError: .zst without the package zstandard.
    """
    suffix = compression(path)
    if suffix == ".gz":
        return gzip.open(raw, "rb")
    if suffix == ".xz":
        return lzma.open(raw, "rb")
    if suffix == ".bz2":
        return bz2.open(raw, "rb")
    if suffix == ".zst":
        needed(str(path), "zstandard")
        return io.BufferedReader(_Zstandard(raw), 1 << 20)
    return raw


@contextlib.contextmanager
def reading(path: Path) -> Iterator[tuple[Any, Any]]:
    """The file and its decompressed stream; what reading raises on damage becomes a ValueError."""
    errors: tuple[type[Exception], ...] = (OSError, lzma.LZMAError, zlib.error, EOFError)
    with open(path, "rb") as raw:
        stream = _decompressed(raw, path)
        if compression(path) == ".zst":
            import zstandard

            errors = (*errors, zstandard.ZstdError)
        try:
            yield raw, stream
        except errors as error:
            raise damaged(path, error) from error


def needed(what: str, package: str) -> Any:
    """An optional package.

    Raises:
        ValueError: it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ValueError(f"{what} needs the package {package}: pip install '.[data]' in a clone") from None


def damaged(path: Path, error: Exception) -> ValueError:
    """The error about a file of the wrong format or content."""
    return ValueError(f"{path}: can't be read ({error}): the file is damaged, or not what its suffix says")


def json_lines(path: Path) -> Iterator[Batch]:
    """Lines of a JSON-lines file, or the members of a file that is one JSON array."""
    done = held = 0
    batch = Batch("json")
    with reading(path) as (raw, stream):
        first = stream.peek(64).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
        for number, line in enumerate(_array(stream.read(), path) if first == b"[" else stream, 1):
            if not line.strip(b"\xef\xbb\xbf \t\r\n"):  # empty, or nothing but a byte order mark
                continue
            batch.items.append(line)
            batch.names.append(f"{path}:{number}")
            held += len(line)
            if held >= BATCH_BYTES:
                batch.size, done, held = raw.tell() - done, raw.tell(), 0
                yield batch
                batch = Batch("json")
        batch.size = raw.tell() - done
    yield batch


def _array(data: bytes, path: Path) -> list[bytes]:
    try:
        values = json.loads(data.decode("utf-8-sig"))
    except ValueError as error:
        raise damaged(path, error) from None
    return [json.dumps(value).encode() for value in values]


def parquet(path: Path, text_field: str, chat: bool = False) -> Iterator[Batch]:
    """One column of a Parquet file: texts, or lists of messages."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with reading(path) as (_, stream):
        try:
            table = pq.ParquetFile(pa.BufferReader(stream.read()) if compression(path) else stream)
            schema = table.schema_arrow
            kind: Any = schema.field(text_field).type if text_field in schema.names else None
            values = kind.value_type if isinstance(kind, pa.DictionaryType) else kind
            fits = is_list(values) if chat else values in (pa.string(), pa.large_string(), pa.string_view())
            require_column(str(path), text_field, schema.names, str(kind), fits, chat)
            chunks = table.iter_batches(batch_size=256, columns=[text_field])
            items = (item for chunk in chunks for item in chunk.column(0).to_pylist())
            yield from row_batches(str(path), items, 1, path.stat().st_size // max(1, table.metadata.num_rows), chat)
        except (pa.ArrowException, UnicodeDecodeError) as error:
            raise damaged(path, error) from error


def row_batches(name: str, values: Iterable[Any], first: int, size: int, chat: bool) -> Iterator[Batch]:
    """Batches of about a megabyte of the texts, or lists of messages, in the rows of a table; None: an empty one.

    Args:
        first: number of the first row; names are "name:number".
        size: source bytes of a row.
    """
    kind, empty = ("chat", []) if chat else ("text", "")
    batch, held = Batch(kind), 0
    for number, value in enumerate(values, first):
        batch.items.append(value or empty)
        batch.names.append(f"{name}:{number}")
        batch.size += size
        held += len(str(value or ""))
        if held >= BATCH_BYTES:
            yield batch
            batch, held = Batch(kind), 0
    if batch.items:
        yield batch


def is_list(kind: Any) -> bool:
    """Whether a type of pyarrow is one of lists."""
    import pyarrow as pa

    return kind is not None and (pa.types.is_list(kind) or pa.types.is_large_list(kind))


def require_column(where: str, text_field: str, columns: list[str], kind: str, fits: bool, chat: bool) -> None:
    """Raises ValueError unless there is such a column and it holds texts, or conversations."""
    if text_field in columns and fits:
        return
    holds = f"; {text_field!r} holds {kind}" if text_field in columns else ""
    wanted = "lists of messages" if chat else "text"
    raise ValueError(
        f"{where}: no column {text_field!r} of {wanted}{holds}; there are {', '.join(columns)}: set text_field"
    )
