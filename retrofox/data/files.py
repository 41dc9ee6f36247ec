"""One token shard on disk, and checksums of files, remembered."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from retrofox.support.files import sha256_of

FORMAT = 1
DIGESTS = "digests.json"


@dataclass(frozen=True)
class Shard:
    """One unit's tokens: file stem, counts and checksum.

    `literals`: special tokens spelled out. `chat`: KEY.learnt marks what to learn. `untold`: documents without facts.
    """

    key: str
    name: str
    documents: int
    tokens: int
    empty: int
    dtype: str
    sha256: str
    literals: int = 0
    chat: bool = False
    untold: int = 0

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


def is_complete(folder: Path, key: str) -> bool:
    """Whether a shard is there, with files of the sizes that were written."""
    try:
        read_shard(folder, key).check(folder)
        return True
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # no note, a damaged one, or other files
        return False


def read_shard(folder: Path, key: str) -> Shard:
    """The shard that KEY.json describes."""
    return Shard(**json.loads((folder / f"{key}.json").read_text(encoding="utf-8"))["shard"])


class Digests:
    """sha256 of files, remembered by size, modification and change time, so that unchanged files are hashed once."""

    def __init__(self, kept: Path | None = None):
        """Begins with those that a file holds; where there is none, or a damaged one, files are hashed again."""
        self.known: dict[str, Any] = {}
        if kept is not None:
            with contextlib.suppress(FileNotFoundError, TypeError, ValueError):
                self.known = dict(json.loads(kept.read_text(encoding="utf-8")))

    def of(self, path: Path) -> str:
        """The sha256 of a file, hex."""
        key, status = str(path.resolve()), path.stat()
        stamp = [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
        if self.known.get(key, [None])[0] != stamp:
            self.known[key] = [stamp, sha256_of(path)]
        return self.known[key][1]
