"""OUT while it is being written: a directory beside it, weights linked or copied into it, renamed when it is whole.

Standard library only, so that copying can begin while torch is still being imported: that takes three to five seconds,
in which a fast disk copies as many gigabytes.

Durability is that of cp: nothing is synced to disk one by one. When the process dies, OUT is there whole or not at all,
as the renaming comes last. After a power cut within seconds of a conversion, convert again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from retrofox.loading.shards import Shards
from retrofox.support.counts import size

COPY_STEP = 256 << 20
"""Bytes copied in one go: each costs a wait of up to 5 ms for Python's lock while torch is being imported."""
_CANT_COPY = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)

NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""What file systems without locks answer."""

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) while weights are copied."""


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
        for left in self.partial.iterdir():  # left by a killed run
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
