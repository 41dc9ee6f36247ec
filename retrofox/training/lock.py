"""One run per OUTPUT."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import filelock

from retrofox.support.files import missing, remove_empty
from retrofox.training.checkpoint import check_writable

NAME = ".lock"
WAIT_SECONDS = 1.0
"""A run that was just killed gives its lock back within this time."""


@contextlib.contextmanager
def output_lock(out: Path) -> Iterator[None]:
    """Holds OUTPUT for this process inside a `with` block; the operating system ends the lock with the process.

    Raises:
        ValueError: another run has it, or OUTPUT can't be written.
    """
    made = missing(out)
    check_writable(out, 0)
    lock = filelock.FileLock(out / NAME, timeout=WAIT_SECONDS)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise ValueError(f"{out} is in use by another run: wait for it, stop it, or choose another `output`") from None
    except NotImplementedError:
        print(f"{out} is on a file system without locks: start no second run there", file=sys.stderr)
    try:
        yield
    finally:
        if lock.is_locked:
            (out / NAME).unlink(missing_ok=True)  # while it is locked: a process that waits for it makes another
            lock.release()
        remove_empty(made)  # of a run that was refused; one that began has files there
