"""The weight files of a checkpoint: read without loading, copied in the background, written a tensor at a time.

Standard library only, so that copying can begin while torch is still being imported (three to five seconds, the time in
which a fast disk copies as many gigabytes).

Durability is that of cp: nothing is synced to disk one by one. The promise is that OUT appears whole or not at all
when the *process* dies (rename is last); after a power cut within seconds of a conversion, convert again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrofox.support.counts import size

INDEX = "model.safetensors.index.json"
BIN_INDEX = "pytorch_model.bin.index.json"
SINGLE = "model-00001-of-00001.safetensors"
"""Name in OUT of the base's model.safetensors: transformers would take that name for the whole checkpoint."""
COPY_STEP = 256 << 20
"""Bytes copied in one go: each costs a wait of up to 5 ms for Python's lock while torch is being imported."""
_CANT_COPY = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)

NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""What file systems without locks answer."""

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) while weights are copied."""


@dataclass
class Shards:
    """The weight files of a directory.

    Attributes:
        files: file name in OUT -> file of the source.
        weight_map: tensor name -> file name in OUT; empty for .bin files, whose names only torch can read.
        tensors: tensor name -> its safetensors header entry (dtype, shape, data_offsets); empty for .bin files.
    """

    files: dict[str, Path]
    weight_map: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def pickled(self) -> bool:
        return any(file.suffix == ".bin" for file in self.files.values())

    @property
    def bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files.values())


def find(directory: Path) -> Shards:
    """The shards of a model directory, their headers read and checked against the index and the files' sizes.

    Raises:
        FileNotFoundError: there are no weights, or a file that the index names is missing.
        ValueError: a file is truncated or not a safetensors file, or lacks a tensor that the index says it has.
    """
    if (directory / "model.safetensors").is_file():  # in the order in which transformers looks
        shards = Shards({SINGLE: directory / "model.safetensors"})
    elif (directory / INDEX).is_file():
        weight_map = _index(directory / INDEX)
        shards = Shards({name: directory / name for name in sorted(set(weight_map.values()))}, weight_map)
    elif (directory / "pytorch_model.bin").is_file():
        shards = Shards({SINGLE: directory / "pytorch_model.bin"})
    elif (directory / BIN_INDEX).is_file():
        names = sorted(set(_index(directory / BIN_INDEX).values()))
        shards = Shards({f"{Path(name).stem}.safetensors": directory / name for name in names})
    else:
        raise FileNotFoundError(
            f"{directory} holds no weights: looked for model.safetensors, {INDEX}, pytorch_model.bin, {BIN_INDEX}"
        )
    missing = [file.name for file in shards.files.values() if not file.is_file()]
    if missing:
        raise FileNotFoundError(
            f"{directory} lacks {', '.join(missing[:5])}, named in its index: download the model again"
        )
    if not shards.pickled:
        _read_headers(shards)
    return shards


def read(directory: Path, names: list[str]) -> Shards:
    """The safetensors files of these names in a directory, their headers read."""
    shards = Shards({name: directory / name for name in names})
    _read_headers(shards)
    return shards


def _index(file: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} is not an index of shards ({error}): download the model again") from error
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(
            f"{file} is not an index of shards (weight_map must give each tensor the name of a file): download the "
            "model again"
        )
    inside = [name for name in weight_map.values() if Path(name).name != name]
    if inside:
        raise ValueError(f"{file} names {inside[0]!r}, which is not a file beside it")
    return weight_map


def _read_headers(shards: Shards) -> None:
    single = not shards.weight_map
    for name, file in shards.files.items():
        entries = header(file)
        if single:
            shards.weight_map.update(dict.fromkeys(entries, name))
        shards.tensors |= {key: entry for key, entry in entries.items() if shards.weight_map.get(key) == name}
    lost = [key for key in shards.weight_map if key not in shards.tensors]
    if lost:
        where = shards.files[shards.weight_map[lost[0]]]
        raise ValueError(f"{where} lacks {lost[0]}, which the index says it has: download the model again")


def header(file: Path) -> dict[str, Any]:
    """The tensors in a safetensors file: name -> dtype, shape, data_offsets.

    Raises:
        ValueError: the file is cut short or not a safetensors file.
    """
    size = file.stat().st_size
    with open(file, "rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > size:
            raise ValueError(f"{file} is cut short or not a safetensors file: download it again")
        try:
            entries = json.loads(stream.read(length))
            if not isinstance(entries, dict):
                raise ValueError("its header is no mapping of tensors")
            entries.pop("__metadata__", None)
            end = 0
            for name, entry in entries.items():
                end = max(end, _end(name, entry))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{file} is not a safetensors file ({error}): download it again") from error
    if 8 + length + end != size:
        raise ValueError(f"{file} has {size} bytes where its header says {8 + length + end}: download it again")
    return entries


def _end(name: str, entry: Mapping[str, Any]) -> int:
    """Where a tensor's bytes end; raises ValueError for a header entry that describes no tensor."""
    if not isinstance(entry, dict) or len(entry["data_offsets"]) != 2:
        raise ValueError(f"{name} has {str(entry)[:60]} where a dtype, a shape and two offsets belong")
    start, end = entry["data_offsets"]
    counts = [start, end, *entry["shape"]]
    if not all(type(n) is int and n >= 0 for n in counts) or start > end or not isinstance(entry["dtype"], str):
        raise ValueError(f"{name} has the shape {entry['shape']!r:.60} and the offsets {entry['data_offsets']!r:.60}")
    return end


_LAYER = re.compile(r"\.layers\.(\d+)\.")


def check_layers(where: Path, asked: int, names: Iterable[str]) -> None:
    """Raises ValueError where weight files hold more or fewer decoder layers than the `asked` of their config.json."""
    layers = {int(match[1]) for match in map(_LAYER.search, names) if match}
    if layers and asked != max(layers) + 1:
        raise ValueError(
            f"{where} holds the weights of {max(layers) + 1} layers and its config.json asks for {asked}: download "
            "both again, or load it with AutoModelForCausalLM and save_pretrained what you mean to use"
        )


def nbytes(entries: Iterable[Mapping[str, Any]]) -> int:
    """Bytes of the tensors with these header entries."""
    return sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in entries)


def write_tensors(file: Path, entries: Mapping[str, tuple[str, list[int], int]], data: Iterator[memoryview]) -> None:
    """Writes a safetensors file one tensor at a time.

    Args:
        entries: tensor name -> (safetensors dtype, shape, bytes), in the order that `data` yields them.
        data: the bytes of each.
    """
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape, nbytes) in entries.items():
        described[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(file, "wb") as stream:
        stream.write(struct.pack("<Q", len(text)))
        stream.write(text)
        for block in data:
            stream.write(block)


class Appearing:
    """A directory beside OUT that becomes OUT at `commit` and vanishes if the block ends before.

        with Appearing(out) as appearing:
            appearing.place(shards, link=False)     # in the background
            ...                                     # write other files into appearing.partial
            appearing.wait(progress)
            appearing.commit()

    Raises:
        ValueError: OUT exists, another process is writing it, or files can't be linked.
    """

    def __init__(self, out: Path):
        refuse_existing(out)
        self.out, self.partial = out, out.parent / f".{out.name}.partial"
        self.placed: Shards | None = None
        self._done, self._stop, self._committed = 0, threading.Event(), False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Appearing:
        self._made = [folder for folder in self.out.absolute().parents if not folder.exists()]
        try:
            self.partial.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"can't write {self.out}: {error.strerror}; choose another OUT") from error
        self._lock = os.open(self.partial, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise ValueError(f"another conversion is writing {self.out}: wait for it or choose another OUT") from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
        for left in self.partial.iterdir():  # by a run that was killed
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if not self._committed:
            shutil.rmtree(self.partial, ignore_errors=True)
            with contextlib.suppress(OSError):  # something else is in them
                for folder in self._made:
                    folder.rmdir()
        os.close(self._lock)

    def place(self, shards: Shards, link: bool) -> None:
        """Puts safetensors shards into the directory: linked at once, or copied in the background."""
        self.placed = shards
        if link:
            for name, file in shards.files.items():
                _link(file, self.partial / name)
        else:
            refuse_full_disk(self.out, shards.bytes)
            self._thread = threading.Thread(target=self._copy, args=(shards,), name="copying weights", daemon=True)
            self._thread.start()

    def _copy(self, shards: Shards) -> None:
        try:
            for name, file in shards.files.items():
                for step in copy(file, self.partial / name):
                    self._done += step
                    if self._stop.is_set():
                        return
        except OSError as error:
            self._error = error

    def wait(self, progress: Progress | None = None) -> None:
        """Returns when the shards are there."""
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(0.1)
            if progress is not None and self.placed is not None:
                progress(self._done, self.placed.bytes)
        if self._error is not None:
            raise self._error

    def commit(self) -> None:
        """The directory becomes OUT."""
        if self.out.exists():
            self.out.rmdir()  # empty, or this fails
        self.partial.rename(self.out)
        self._committed = True


def refuse_existing(out: Path) -> None:
    """Raises ValueError where `out` is a file, a directory with something in it, or has no name of its own."""
    if out.name in ("", ".."):
        raise ValueError(f"{out} names no new directory: give OUT a name")
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise ValueError(f"{out} exists: remove it or choose another OUT")


def refuse_full_disk(out: Path, needed: int) -> None:
    """Raises ValueError where the file system of `out` has fewer than `needed` bytes left."""
    there = next(folder for folder in out.absolute().parents if folder.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise ValueError(
            f"{out} needs {size(needed)} and {there} has {size(free)} free: choose another disk, or "
            "--link on the disk of the source"
        )


def _link(file: Path, target: Path) -> None:
    try:
        os.link(file.resolve(), target)  # resolved: in the Hub cache a shard is a symlink to its blob
    except OSError as error:
        raise ValueError(
            f"can't hard-link {file} to {target.parent} ({error.strerror}): drop --link to copy"
        ) from error


def copy(file: Path, target: Path) -> Iterator[int]:
    """Copies a file in the kernel (sharing blocks where the file system can), yielding the bytes of each step."""
    try:
        with open(file, "rb", buffering=0) as src, open(target, "wb", buffering=0) as dst:
            left = os.fstat(src.fileno()).st_size
            in_kernel = True
            while left:
                step = 0
                if in_kernel:
                    try:
                        step = os.copy_file_range(src.fileno(), dst.fileno(), min(left, COPY_STEP))
                    except OSError as error:
                        if error.errno not in _CANT_COPY:
                            raise
                    in_kernel = step > 0
                if not in_kernel:  # between file systems that can't: through user space
                    block = memoryview(src.read(min(left, COPY_STEP)))
                    step = len(block)
                    while block:
                        block = block[dst.write(block) :]
                if not step:
                    raise ValueError(f"{file} became shorter while it was copied")
                left -= step
                yield step
    except OSError as error:
        if error.filename is None:  # a write's errors don't name their file
            raise OSError(error.errno, error.strerror, str(target)) from error
        raise
