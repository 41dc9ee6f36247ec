"""A directory that is there whole or not at all: written beside its place, weights linked or copied, then renamed.

Durability is that of cp: after a power cut within seconds of a conversion, convert again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from retrofox.loading.shards import Shards

COPY_BYTES = 16 << 20
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""Errors of file systems without locks."""

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) while weights are copied."""


class AtomicDirectory:
    """A directory beside OUT that becomes OUT at `commit` and vanishes if the block ends before.

        with AtomicDirectory(out) as directory:
            ...                                     # write files into directory.partial
            directory.commit()

    Raises:
        ValueError: OUT exists, another process is writing it, or it can't be written, as where the disk is full.
    """

    def __init__(self, out: Path):
        refuse_existing(out)
        self.out, self.partial = out, out.parent / f".{out.name}.partial"

    def __enter__(self) -> AtomicDirectory:
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
        for left in self.partial.iterdir():  # by a process that was killed
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self.partial.exists():
            shutil.rmtree(self.partial, ignore_errors=True)
            with contextlib.suppress(OSError):  # something else is in them
                for folder in self._made:
                    folder.rmdir()
        os.close(self._lock)
        if isinstance(error, SafetensorError) or (isinstance(error, OSError) and error.errno in FULL):
            why = error.strerror if isinstance(error, OSError) else error  # often without a file's name
            raise ValueError(
                f"{self.out} could not be written: {why}; nothing was left there: free some disk space or choose "
                "another disk"
            ) from error

    def commit(self) -> None:
        """The directory becomes OUT."""
        if self.out.exists():
            self.out.rmdir()  # empty, or this fails
        self.partial.rename(self.out)


def place(shards: Shards, folder: Path, link: bool, progress: Progress | None = None) -> None:
    """Links or copies shards into a folder.

    Raises:
        ValueError: files can't be linked.
    """
    done = 0
    for name, file in shards.files.items():
        if link:
            try:
                os.link(file.resolve(), folder / name)  # resolved: in the Hub cache a shard is a symlink to its blob
            except OSError as error:
                raise ValueError(f"can't hard-link {file} ({error.strerror}): drop --link to copy") from error
            continue
        with open(file, "rb") as source, open(folder / name, "wb") as target:
            while block := source.read(COPY_BYTES):
                target.write(block)
                done += len(block)
                if progress is not None:
                    progress(done, shards.bytes)


def refuse_existing(out: Path) -> None:
    """Raises ValueError where `out` is a file, a directory with something in it, or has no name of its own."""
    if out.name in ("", ".."):
        raise ValueError(f"{out} names no new directory: give OUT a name")
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise ValueError(f"{out} exists: remove it or choose another OUT")
