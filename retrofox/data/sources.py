"""Where documents come from: files, directories, globs and Hugging Face datasets, read unit by unit.

`resolve(source)` lists the units of a source. A unit is tokenised, kept and reused as one: a file (or a run of
small files), a range of rows of a dataset. `unit.batches()` reads it once, in order, without holding it in memory.
"""

from __future__ import annotations

import glob
import importlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from retrofox.config import Source
from retrofox.data import read as data_read
from retrofox.data.augment import Augmentation
from retrofox.data.read import COMPRESSED, JSON_LINES, PARQUET, TEXT, needed
from retrofox.data.source_shards import AugmentedUnit, FileUnit, RowsUnit, Unit
from retrofox.data.streamed import sliced
from retrofox.data.streamed import units as streamed_units

GROUP_FILES = 256
"""Above this many files in one source, neighbours are joined into units of about GROUP_BYTES."""
GROUP_BYTES = 32 << 20
MESSAGES = "messages"
"""The field of conversations where none is named."""
SAVED = ("state.json", "dataset_dict.json")
"""Files that tell a directory written by `datasets`' save_to_disk."""


def listed(data: str | os.PathLike | Iterable[str | os.PathLike] | None) -> list[str]:
    """One path or several, as a list of strings."""
    if isinstance(data, (str, os.PathLike)):
        return [str(data)]
    return [str(path) for path in data or ()]


def resolve(source: Source, leave_out: Path | None = None) -> list[Unit]:
    """The units of a source, in a fixed order, with its changes of their documents.

    Arguments and errors are those of `units_of`.
    """
    units = units_of(source, leave_out)
    augment = Augmentation(source.fact_share or 0.0, source.questions or 0.0, source.reflow, source.recase)
    return [AugmentedUnit(unit, augment) for unit in units] if augment else units


def units_of(source: Source, leave_out: Path | None = None) -> list[Unit]:
    """The units of a source as they lie on disk, in a fixed order.

    Args:
        source: its path is a file, a directory (searched, through links too, for .txt, .jsonl, .json, .ndjson and
            .parquet, each also .gz, .xz, .zst, .bz2; names that begin with . or _ are left out), a glob,
            "hf:org/name[:config][:split]", or "hf:DIRECTORY[:config][:split]". A split of a set on the Hub with a
            range of rows, "train[:500]", is streamed: only the files of those rows are fetched.
        leave_out: a folder that is not searched: token shards may lie inside the directory of their texts.

    Raises:
        FileNotFoundError: nothing at that path.
        ValueError: nothing readable in that directory, a missing optional package, an unknown scheme.
    """
    scheme, _, rest = source.path.partition(":")
    if scheme == "hf":
        return _hugging_face(rest)
    path = Path(source.path).expanduser()
    if path.is_dir():
        if any((path / mark).is_file() for mark in SAVED):
            return _hugging_face(str(path))
        skipped = None if leave_out is None else leave_out.resolve()
        if skipped == path.resolve():
            raise ValueError(f"{path} is also where token shards are kept: set data.cache to another directory")
        found = sorted(_visible(path, ()))
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
        raise FileNotFoundError(f"no data at {source.path}: give a file, a directory, a glob or hf:org/name")
    return _grouped(files)


def _known() -> str:
    return f"{', '.join((*TEXT, *JSON_LINES, *PARQUET))}, each also with {', '.join(COMPRESSED)}"


def _visible(folder: Path, above: tuple[Path, ...]) -> Iterator[Path]:
    """Files below a folder, through links too but not in circles; names that begin with . or _ are left out."""
    here = folder.resolve()
    if here in above:
        return
    for entry in folder.iterdir():
        if is_hidden(Path(entry.name)):
            continue
        if entry.is_dir():
            yield from _visible(entry, (*above, here))
        elif entry.is_file():
            yield entry


def is_hidden(path: Path) -> bool:
    """Whether a path below a directory of texts is left out when that is searched."""
    return any(part.startswith((".", "_")) for part in path.parts)


def read_with(folder: Path, paths: Iterable[str]) -> str | None:
    """Which of the sources' paths, if any, is a directory in which texts of this folder would be found."""
    inside = folder.resolve()
    for path in paths:
        texts = Path(path).expanduser().resolve()
        if texts.is_dir() and inside.is_relative_to(texts) and not is_hidden(inside.relative_to(texts)):
            return path
    return None


def check_results_outside(out: str | os.PathLike | None, paths: Iterable[str]) -> None:
    """Raises ValueError where results would be written among the texts they are measured on, and read as such later."""
    around = None if out is None else read_with(Path(out), paths)
    if around is not None:
        raise ValueError(
            f"results can't go to {out}: it lies inside the data, {around}, and would be read as texts next time; name "
            "a directory outside it"
        )


def _readable(files: list[Path]) -> list[Path]:
    """Those with a known suffix: a directory may hold a README or a licence beside its texts."""
    return [path for path in files if data_read.inner_suffix(path) in (*TEXT, *JSON_LINES, *PARQUET)]


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
    datasets = needed(f"hf:{reference}", "datasets")
    errors = importlib.import_module("datasets.exceptions").DatasetsError
    # A split may hold a colon in brackets, train[:10%], and so may the name of a directory.
    name, *parts = [reference] if Path(reference).expanduser().is_dir() else re.split(r":(?![^\[]*\])", reference)
    if len(parts) > 2 or not name:
        raise ValueError(f"hf:{reference}: expected hf:org/name[:config][:split] or hf:DIRECTORY[:config][:split]")
    config, split = (parts[0] or None, parts[1] or None) if len(parts) == 2 else (None, None)
    if len(parts) == 1 and parts[0]:
        if parts[0].split("[")[0] in ("train", "validation", "test"):
            split = parts[0]
        else:
            config = parts[0]
    local = Path(name).expanduser()
    data: Any
    rows_wanted = None if local.is_dir() else sliced(split)
    try:
        if rows_wanted is not None:
            builder = datasets.load_dataset_builder(name, config)
            return list(streamed_units(builder, local.name, *rows_wanted))
        if name and any((local / mark).is_file() for mark in SAVED):
            data = _saved(datasets.load_from_disk(str(local)), config, split)
        else:
            data = datasets.load_dataset(str(local) if local.is_dir() else name, config, split=split or "train")
    except (OSError, ValueError, IndexError, errors) as error:  # IndexError: one saved without any rows
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
