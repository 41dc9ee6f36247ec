"""Where documents come from: files, directories, globs, Hugging Face datasets and LongCrawl64, read unit by unit.

`resolve(source)` lists the units of a source. A unit is what is tokenised, kept and reused as one: a file (or a run of
small files), a range of rows of a dataset. `unit.batches()` reads it once, in order, without holding it in memory.
"""

from __future__ import annotations

import bz2
import contextlib
import glob
import gzip
import hashlib
import io
import json
import lzma
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

TEXT = (".txt", ".text")
JSON_LINES = (".jsonl", ".ndjson", ".json")
PARQUET = (".parquet",)
COMPRESSED = (".gz", ".xz", ".zst", ".bz2")
BATCH_BYTES = 1 << 20
GROUP_FILES = 256
"""Above this many files in one source, neighbours are joined into units of about GROUP_BYTES."""
GROUP_BYTES = 32 << 20


class SourceLike(Protocol):
    """What this module reads of a recipe's source; `retrofox.config.Source` is one."""

    @property
    def path(self) -> str: ...
    @property
    def weight(self) -> float: ...
    @property
    def text_field(self) -> str | None: ...


@dataclass(frozen=True)
class DataSource:
    """A source of documents: path (or "hf:...", "longcrawl64:..."), weight (share of tokens), field of the text."""

    path: str
    weight: float = 1.0
    text_field: str | None = None


@dataclass
class Batch:
    """Raw documents on their way to the tokenizer: `kind` says what an item of `items` is, `size` counts source bytes.

    kind "text": str; "bytes": UTF-8 of one document; "json": one line holding the text in a field; "gpt2:NAME": uint16
    tokens of that tokenizer, as bytes.
    """

    kind: str
    items: list[Any] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    size: int = 0


class Unit(Protocol):
    """A part of a source that is tokenised and kept as one."""

    name: str
    size: int

    def identity(self, digests: Digests) -> str: ...
    def batches(self, text_field: str) -> Iterator[Batch]: ...


class Digests:
    """sha256 of files, remembered by size, modification and change time, so that unchanged files are hashed once."""

    def __init__(self, known: dict[str, Any] | None = None):
        self.known: dict[str, Any] = dict(known or {})

    def of(self, path: Path) -> str:
        """The sha256 of a file, hex."""
        key, status = str(path.resolve()), path.stat()
        stamp = [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
        if self.known.get(key, [None])[0] != stamp:
            digest = hashlib.sha256()
            with open(path, "rb") as stream:
                while block := stream.read(1 << 20):
                    digest.update(block)
            self.known[key] = [stamp, digest.hexdigest()]
        return self.known[key][1]


class FileUnit:
    """One file, or a run of small ones."""

    def __init__(self, paths: list[Path]):
        self.paths = paths
        self.name = paths[0].name if len(paths) == 1 else f"{paths[0].name}...{paths[-1].name}"
        self.size = sum(path.stat().st_size for path in paths)

    def identity(self, digests: Digests) -> str:
        """Depends on the contents and on how they are read, not on where the files lie."""
        return json.dumps([[_form(path), digests.of(path)] for path in self.paths])

    def batches(self, text_field: str) -> Iterator[Batch]:
        """Batches of about a megabyte; a text file is one document."""
        waiting = Batch("bytes")
        for path in self.paths:
            form = _form(path)
            if waiting.items and (form != "text" or sum(map(len, waiting.items)) >= BATCH_BYTES):
                yield waiting
                waiting = Batch("bytes")
            if form == "text":
                with _reading(path) as (_, stream):
                    waiting.items.append(stream.read())
                waiting.names.append(path.name)
                waiting.size += path.stat().st_size
            else:
                yield from _json_lines(path) if form == "json" else _parquet(path, text_field)
        if waiting.items:
            yield waiting


def _form(path: Path) -> str:
    """text, json or parquet, by the name without its compression suffix."""
    suffixes = path.suffixes
    inner = suffixes[-2:-1] if suffixes and suffixes[-1].lower() in COMPRESSED else suffixes[-1:]
    suffix = inner[0].lower() if inner else ""
    return "json" if suffix in JSON_LINES else "parquet" if suffix in PARQUET else "text"


def decompressed(raw: Any, path: Path) -> Any:
    """Wraps an open file by the suffix of its name (.gz, .xz, .zst, .bz2); others are returned as they are.

    Raises:
        ValueError: .zst without the package zstandard.
    """
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return gzip.open(raw, "rb")
    if suffix == ".xz":
        return lzma.open(raw, "rb")
    if suffix == ".bz2":
        return bz2.open(raw, "rb")
    if suffix == ".zst":
        try:
            import zstandard
        except ImportError:
            raise ValueError(
                f"{path}: .zst needs the package zstandard: pip install 'retrofox[data]', or recompress the file"
            ) from None
        reader: Any = zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True, closefd=False)
        return io.BufferedReader(reader)
    return raw


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[tuple[Any, Any]]:
    """The file and its decompressed stream; what decompression raises on damage becomes a ValueError."""
    errors: tuple[type[Exception], ...] = (gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError)
    with open(path, "rb") as raw:
        stream = decompressed(raw, path)
        if path.suffix.lower() == ".zst":
            import zstandard

            errors = (*errors, zstandard.ZstdError)
        elif path.suffix.lower() == ".bz2":
            errors = (*errors, OSError)
        try:
            yield raw, stream
        except errors as error:
            raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path}: can't be read ({error}): the file is damaged, or not what its suffix says")


def _json_lines(path: Path) -> Iterator[Batch]:
    """Lines of a JSON-lines file, or the members of a file that is one JSON array."""
    done = held = 0
    batch = Batch("json")
    with _reading(path) as (raw, stream):
        first = stream.peek(64).lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
        for number, line in enumerate(_array(stream.read(), path) if first == b"[" else stream, 1):
            if not line.strip():
                continue
            batch.items.append(line)
            batch.names.append(f"{path.name}:{number}")
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
        raise ValueError(f"{path}: starts as a JSON array but does not parse as one: {error}") from None
    return [json.dumps(value).encode() for value in values]


def _parquet(path: Path, text_field: str) -> Iterator[Batch]:
    """One column of a Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with _reading(path) as (_, stream):
        try:
            table = pq.ParquetFile(stream if path.suffix.lower() not in COMPRESSED else pa.BufferReader(stream.read()))
        except pa.ArrowInvalid as error:
            raise _damaged(path, error) from error
        schema = table.schema_arrow
        column = schema.field(text_field).type if text_field in schema.names else None
        _require_text(str(path), text_field, schema.names, str(column), column in (pa.string(), pa.large_string()))
        size, rows, number = path.stat().st_size, max(1, table.metadata.num_rows), 0
        for chunk in table.iter_batches(batch_size=256, columns=[text_field]):
            texts = [text or "" for text in chunk.column(0).to_pylist()]
            names = [f"{path.name}:{number + row}" for row in range(1, len(texts) + 1)]
            number += len(texts)
            yield Batch("text", texts, names, size * len(texts) // rows)


def _require_text(where: str, text_field: str, columns: list[str], kind: str, is_text: bool) -> None:
    if text_field not in columns:
        raise ValueError(f"{where}: no column {text_field!r}; there are {', '.join(columns)}: set text_field")
    if not is_text:
        raise ValueError(f"{where}: column {text_field!r} must hold text, got {kind}")


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

    def batches(self, text_field: str) -> Iterator[Batch]:
        """256 rows at a time, one column."""
        feature = self.dataset.features.get(text_field)
        kind = getattr(feature, "dtype", type(feature).__name__)
        _require_text(f"hf:{self.name}", text_field, self.dataset.column_names, kind, "string" in kind)
        column = self.dataset.select_columns([text_field])
        for start in range(self.start, self.stop, 256):
            stop = min(start + 256, self.stop)
            texts = [text or "" for text in column[start:stop][text_field]]
            names = [f"{self.name}:{row}" for row in range(start + 1, stop + 1)]
            yield Batch("text", texts, names, self.size * (stop - start) // max(1, self.stop - self.start))


def resolve(source: SourceLike, leave_out: Path | None = None) -> list[Unit]:
    """The units of a source, in a fixed order.

    Args:
        source: its path is a file, a directory (searched for .txt, .jsonl, .json, .ndjson and .parquet, each also .gz,
            .xz, .zst, .bz2), a glob, "hf:org/name[:config][:split]", "hf:DIRECTORY", or "longcrawl64:DIRECTORY".

        leave_out: a folder that is not searched: token shards may lie inside the directory of their texts.

    Raises:
        FileNotFoundError: nothing at that path.
        ValueError: nothing readable in that directory, a missing optional package, an unknown scheme.
    """
    scheme, _, rest = source.path.partition(":")
    if scheme == "hf":
        return _hugging_face(rest)
    if scheme == "longcrawl64":
        from retrofox.data_longcrawl64 import blocks

        return list(blocks(Path(rest).expanduser()))
    path = Path(source.path).expanduser()
    if path.is_dir():
        if any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
            return _hugging_face(str(path))
        skipped = None if leave_out is None else leave_out.resolve()
        if skipped == path.resolve():
            raise ValueError(f"{path} is also where token shards are kept: set data.cache to another directory")
        found = sorted(inner for inner in path.rglob("*") if _visible(inner, path))
        files = _readable([inner for inner in found if skipped is None or skipped not in inner.resolve().parents])
        if not files:
            raise ValueError(f"{path}: no readable file in this directory; read are {_known()}")
    elif path.is_file():
        files = [path]
    elif glob.has_magic(source.path):
        files = sorted(Path(hit) for hit in glob.glob(str(path), recursive=True) if os.path.isfile(hit))
        if not files:
            raise FileNotFoundError(f"no file matches {source.path}")
    else:
        raise FileNotFoundError(
            f"no data at {source.path}: give a file, a directory, a glob, hf:org/name or longcrawl64:DIRECTORY"
        )
    return _grouped(files)


def _known() -> str:
    return f"{', '.join((*TEXT, *JSON_LINES, *PARQUET))}, each also with {', '.join(COMPRESSED)}"


def _visible(path: Path, root: Path) -> bool:
    return path.is_file() and not any(part.startswith((".", "_")) for part in path.relative_to(root).parts)


def _readable(files: list[Path]) -> list[Path]:
    """Those with a known suffix: a directory may hold a README or a licence beside its texts."""
    kept = []
    for path in files:
        suffixes = path.suffixes
        inner = suffixes[-2:-1] if suffixes and suffixes[-1].lower() in COMPRESSED else suffixes[-1:]
        if inner and inner[0].lower() in (*TEXT, *JSON_LINES, *PARQUET):
            kept.append(path)
    return kept


def _grouped(files: list[Path]) -> list[Unit]:
    if len(files) <= GROUP_FILES:
        return [FileUnit([path]) for path in files]
    groups: list[list[Path]] = [[]]
    held = 0
    for path in files:
        if held >= GROUP_BYTES:
            groups.append([])
            held = 0
        groups[-1].append(path)
        held += path.stat().st_size
    return [FileUnit(group) for group in groups]


def _hugging_face(reference: str) -> list[Unit]:
    """ "org/name[:config][:split]" or a local directory; one part alone is a split if it is called like one."""
    try:
        import datasets
        from datasets.exceptions import DatasetsError
    except ImportError:
        raise ValueError(
            f"hf:{reference} needs the package datasets: pip install 'retrofox[data]', or give files instead"
        ) from None
    name, *parts = reference.split(":")
    if len(parts) > 2:
        raise ValueError(f"hf:{reference}: expected hf:org/name[:config][:split], got {len(parts) + 1} parts")
    config, split = (parts[0] or None, parts[1] or None) if len(parts) == 2 else (None, None)
    if len(parts) == 1 and parts[0]:
        if parts[0].split("[")[0] in ("train", "validation", "test"):
            split = parts[0]
        else:
            config = parts[0]
    local = Path(name).expanduser()
    data: Any
    if local.is_dir() and (local / "state.json").is_file():
        data = datasets.load_from_disk(str(local))
    elif local.is_dir() and (local / "dataset_dict.json").is_file():
        both: Any = datasets.load_from_disk(str(local))
        if (split or "train") not in both:
            raise ValueError(f"hf:{reference}: no split {split or 'train'!r}; there are: {', '.join(both)}")
        data = both[split or "train"]
    else:
        try:
            data = datasets.load_dataset(str(local) if local.is_dir() else name, config, split=split or "train")
        except (OSError, ValueError, DatasetsError) as error:
            raise ValueError(f"hf:{reference}: can't be loaded: {error}") from error
    rows, size = len(data), int(data.data.nbytes)
    step = max(256, min(rows, 1 + (256 << 20) * rows // max(1, size)))  # about 256 MiB of text a unit
    label = f"{local.name}:{split or 'train'}"
    return [
        RowsUnit(
            label, size * (min(start + step, rows) - start) // rows, data, start, min(start + step, rows),
            data._fingerprint,
        )
        for start in range(0, rows, step)
    ]  # fmt: skip
