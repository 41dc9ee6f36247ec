"""One shard on disk; files that are there whole or not at all: written under a temporary name, flushed, renamed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from retrofox.support.files import missing, remove_empty, write_whole

FORMAT = 1
DIGESTS = "digests.json"


@dataclass(frozen=True)
class Shard:
    """One unit's tokens: file stem, counts and checksum.

    `wordless`: documents with too few words for the facts that were asked for. `literals`: special tokens spelled out
    in the texts. Shards from before these were counted say 0. `chat`: KEY.learnt marks the tokens to learn.
    """

    key: str
    name: str
    documents: int
    tokens: int
    empty: int
    dtype: str
    sha256: str
    wordless: int = 0
    literals: int = 0
    chat: bool = False

    def check(self, folder: Path) -> None:
        """Raises ValueError if a file is missing or has another size than was written."""
        sizes = {"tokens": self.tokens * np.dtype(self.dtype).itemsize, "bounds": (self.documents + 1) * 8}
        sizes |= {"learnt": self.tokens} if self.chat else {}
        for suffix, size in sizes.items():
            path = folder / f"{self.key}.{suffix}"
            found = path.stat().st_size if path.is_file() else None
            if found != size:
                state = "is missing" if found is None else f"has {found} bytes instead of {size}"
                raise ValueError(f"{path} {state}: run `retrofox prepare` again")

    def bounds(self, folder: Path) -> np.ndarray:
        """Where each document begins, and the end: (documents + 1,) int64; files checked."""
        self.check(folder)
        return np.fromfile(folder / f"{self.key}.bounds", dtype="<i8")

    def map(self, folder: Path) -> np.ndarray:
        """The tokens as a read-only memory map, (tokens,) uint16 or uint32."""
        return np.memmap(folder / f"{self.key}.tokens", dtype=self.dtype, mode="r")

    def map_learnt(self, folder: Path) -> np.ndarray:
        """Of conversations: 1 at the tokens to learn, (tokens,) uint8."""
        return np.memmap(folder / f"{self.key}.learnt", dtype=np.uint8, mode="r")


def sweep(folder: Path) -> None:
    """Removes temporary files of processes of this machine that are gone."""
    for path in folder.glob(f".*.{socket.gethostname()}.*.tmp"):
        pid = int(path.name.split(".")[-2])
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            path.unlink(missing_ok=True)
        except PermissionError:
            continue


@contextlib.contextmanager
def clear_disk_errors(folder: Path) -> Iterator[None]:
    """Turns OSError into ValueError that says which file, why, and what to do."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        why = f"{error.strerror or error}"
        if error.filename is None or Path(error.filename).is_relative_to(folder):
            why += f", writing token shards to {folder}: free space there or set data.cache; finished shards are kept"
        raise ValueError(f"{error.filename or folder}: {why}") from error


@contextlib.contextmanager
def cache_folder(folder: Path) -> Iterator[None]:
    """Makes a folder of shards; removes it again where an error leaves no token in it."""
    made = missing(folder)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        if made and not any(path.stat().st_size for path in folder.glob("*.tokens")):
            kinds = ("*.tokens", "*.bounds", "*.learnt", "*.json")
            for path in (folder / DIGESTS, *(path for kind in kinds for path in folder.glob(kind))):
                path.unlink(missing_ok=True)
            remove_empty(made)
        raise


def is_complete(folder: Path, key: str) -> bool:
    """Whether a shard is there with the contents it was written with."""
    if not (folder / f"{key}.json").is_file():
        return False
    try:
        shard = read_shard(folder, key)
        shard.check(folder)
        if _note(folder, key)["modified"] == _modified(folder, key):
            return True
        intact = _checksum(folder, shard) == shard.sha256  # copied, or changed: read again, as its time says nothing
    except (ValueError, KeyError, TypeError):  # a damaged note, or files that differ from it
        return False
    if intact:
        with contextlib.suppress(OSError):  # a cache that is only read: read again next time
            write_note(folder, shard)
    return intact


def read_shard(folder: Path, key: str) -> Shard:
    """The shard that KEY.json describes."""
    return Shard(**_note(folder, key)["shard"])


def _note(folder: Path, key: str) -> dict[str, Any]:
    return json.loads((folder / f"{key}.json").read_text(encoding="utf-8"))


def write_note(folder: Path, shard: Shard) -> None:
    """Writes KEY.json, which makes the files beside it a shard."""
    note = {"format": FORMAT, "shard": asdict(shard), "modified": _modified(folder, shard.key)}
    write_whole(folder / f"{shard.key}.json", json.dumps(note, indent=1).encode() + b"\n")


def _modified(folder: Path, key: str) -> list[int]:
    """When tokens and bounds were last written, in nanoseconds."""
    return [(folder / f"{key}.{kind}").stat().st_mtime_ns for kind in ("tokens", "bounds")]


def _checksum(folder: Path, shard: Shard) -> str:
    digest = hashlib.sha256()
    for kind in ("tokens", "bounds", *(["learnt"] if shard.chat else [])):
        with open(folder / f"{shard.key}.{kind}", "rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


class Digests:
    """sha256 of files, remembered by size, modification and change time, so that unchanged files are hashed once."""

    def __init__(self, known: dict[str, Any] | None = None):
        self.known: dict[str, Any] = dict(known or {})

    @classmethod
    def load(cls, path: Path) -> Digests:
        """Those kept in a file; none, if there is no such file or it is damaged: they are only a memory."""
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return cls()
        return cls(known if isinstance(known, dict) else None)

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
