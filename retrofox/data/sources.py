"""Where documents come from: files, directories, globs and Hugging Face datasets.

`resolve(source)` lists the units of a source. A unit is tokenised, kept and reused as one: a file (or a run of
small files), a range of rows of a dataset. `unit.records()` reads it once, in order, without holding it in memory.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from retrofox.config import Source
from retrofox.data.read import COMPRESSED, JSON_LINES, PARQUET, TEXT, inner_suffix
from retrofox.data.source_units import FileUnit, RowReader, RowsUnit, Unit

GROUP_FILES = 256
"""Above this many files in one source, neighbours are joined into units of about GROUP_BYTES."""
GROUP_BYTES = 32 << 20
UNIT_BYTES = 256 << 20
"""Bytes of a dataset's text in a unit."""
STREAMED_ROWS = 256
"""Rows of a unit where they are fetched as they are read: about 100 MB of books."""
ROW_BYTES = 1 << 16
"""Guess of a row's size before it is fetched: only the progress bar shows it."""
SAVED = ("state.json", "dataset_dict.json")
"""Files that tell a directory written by `datasets`' save_to_disk."""
Text = str | os.PathLike[str] | Source
"""Where text comes from: a file, directory or glob, "hf:...", or a source of them."""
_SLICE = re.compile(r"(\w+)\[([\d_]*):([\d_]+)\]")


def listed(data: str | os.PathLike | Iterable[str | os.PathLike] | None) -> list[str]:
    """One path or several, as a list of strings."""
    if isinstance(data, (str, os.PathLike)):
        return [str(data)]
    return [str(path) for path in data or ()]


def as_source(text: Text) -> Source:
    """A source, of its path where that is given."""
    return text if isinstance(text, Source) else Source(path=os.fspath(text))


def resolve(source: Source) -> list[Unit]:
    """The units of a source, in a fixed order.

    Args:
        source: its path is a file, a directory (searched, through links too, for .txt, .jsonl, .json, .ndjson and
            .parquet, each also .gz, .xz, .zst, .bz2; names that begin with . or _ are left out), a glob,
            "hf:org/name[:config][:split]", or "hf:DIRECTORY[:config][:split]". A split of a set on the Hub with a
            range of rows, "train[:500]", is streamed: only the files of those rows are fetched.

    Raises:
        FileNotFoundError: nothing at that path.
        ValueError: nothing readable in that directory, a missing optional package, no such dataset.
    """
    scheme, _, rest = source.path.partition(":")
    if scheme == "hf":
        return _hugging_face(rest)
    path = Path(source.path).expanduser()
    if path.is_dir():
        if any((path / mark).is_file() for mark in SAVED):
            return _hugging_face(str(path))
        files = _readable(path)
        if not files:
            known = f"{', '.join((*TEXT, *JSON_LINES, *PARQUET))}, each also with {', '.join(COMPRESSED)}"
            raise ValueError(f"{path}: no readable file in this directory; read are {known}; a glob reads any as text")
    elif path.is_file():
        files = [path]
    else:
        files = sorted(Path(hit) for hit in glob.glob(str(path), recursive=True) if os.path.isfile(hit))
        if not files:
            raise FileNotFoundError(f"no data at {source.path}: give a file, a directory, a glob or hf:org/name")
    return _grouped(files)


def _readable(folder: Path) -> list[Path]:
    """Files below a folder with a known suffix: there may be a README or a licence beside the texts."""
    found: list[Path] = []
    seen: set[str] = set()
    for here, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(here)
        if real in seen:  # links may lead in circles
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith((".", "_")))
        files = [Path(here, name) for name in names if not name.startswith((".", "_"))]
        found += [file for file in files if inner_suffix(file) in (*TEXT, *JSON_LINES, *PARQUET) and file.is_file()]
    return sorted(found)


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
        from datasets.exceptions import DatasetsError  # an optional extra
    except ImportError:
        raise ValueError(f"hf:{reference} needs the package datasets: pip install '.[data]' in a clone") from None
    # A split may hold a colon in brackets, train[:10%], and so may the name of a directory.
    name, *parts = [reference] if Path(reference).expanduser().is_dir() else re.split(r":(?![^\[]*\])", reference)
    if len(parts) > 2 or not name:
        raise ValueError(f"hf:{reference}: expected hf:org/name[:config][:split] or hf:DIRECTORY[:config][:split]")
    if len(parts) == 1 and parts[0].split("[")[0] in ("train", "validation", "test"):
        parts = ["", *parts]
    config, split = (part or None for part in [*parts, "", ""][:2])
    local = Path(name).expanduser()
    rows_wanted = None if local.is_dir() else sliced(split)
    try:
        if rows_wanted is not None:
            return _streamed(datasets.load_dataset_builder(name, config), local.name, *rows_wanted)
        if any((local / mark).is_file() for mark in SAVED):
            data = _saved(datasets.load_from_disk(str(local)), config, split)
        else:
            data = datasets.load_dataset(str(local) if local.is_dir() else name, config, split=split or "train")
    except (OSError, ValueError, IndexError, DatasetsError) as error:  # IndexError: one saved without any rows
        raise ValueError(f"hf:{reference}: can't be loaded: {error}") from error
    return _mapped(data, f"{local.name}:{split or 'train'}")


def sliced(split: str | None) -> tuple[str, int, int] | None:
    """("train", 0, 500) of "train[:500]"; None where no slice with an end in rows is asked for."""
    match = _SLICE.fullmatch(split or "")
    return None if match is None else (match[1], int(match[2] or 0), int(match[3]))


def _saved(data: Any, config: str | None, split: str | None) -> Any:
    """The rows of a config and split in a folder saved to disk: one dataset, or several by the name of a split."""
    splits: dict[str | None, Any] = dict(data) if isinstance(data, dict) else {None: data}
    wanted = (split or "train") if isinstance(data, dict) else split
    if config is not None or wanted not in splits:
        raise ValueError(
            f"it was saved to disk with splits {', '.join(map(str, splits))} and no configs; asked for: "
            f"{':'.join(part for part in (config, split or 'train') if part)}"
        )
    return splits[wanted]


def _mapped(data: Any, name: str) -> list[Unit]:
    """The units of a dataset on this disk."""
    count, size = len(data), int(data.data.nbytes)
    step = max(256, min(count, 1 + UNIT_BYTES * count // max(1, size)))

    def read(start: int, column: str) -> Iterator[dict[str, Any]]:
        known = data.select_columns([column]) if column in data.column_names else data
        return iter(known.select(range(start, count)))

    reader = RowReader(read)
    files = [Path(file["filename"]) for file in data.cache_files]
    return [
        RowsUnit(name, size * (stop - start) // count, [data._fingerprint], start, stop, reader, files)
        for start, stop in _ranges(0, count, step)
    ]


def _streamed(builder: Any, name: str, split: str, start: int, stop: int) -> list[Unit]:
    """The units of rows start .. stop of a split, fetched while they are tokenised; `datasets` has read no file yet."""
    files = builder.config.data_files or {}
    if split not in files or start >= stop:
        raise ValueError(f"no rows {start} to {stop} of a split {split!r}; there are: {', '.join(files)}")
    # Addresses on the Hub hold the commit: another version of the set is another origin.
    found = [list(map(str, files[split])), [list(origin) for origin in files[split].origin_metadata]]
    reader = RowReader(lambda start, column: iter(builder.as_streaming_dataset(split=split).skip(start)))
    return [
        RowsUnit(f"{name}:{split}", ROW_BYTES * (end - begin), ["streamed", found, split], begin, end, reader)
        for begin, end in _ranges(start, stop, STREAMED_ROWS)
    ]


def _ranges(start: int, stop: int, step: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + step, stop)) for begin in range(start, stop, step)]
