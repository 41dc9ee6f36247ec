"""One run per OUTPUT: a lock file that names who holds it, and that nobody has to delete."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

from retrofox.loading.appearing import NO_LOCKS
from retrofox.support.files import missing, remove_empty
from retrofox.training.checkpoint import check_writable

NAME = ".lock"
BEAT_SECONDS = 15.0
"""The holder touches the file so often."""
WATCH_SECONDS = 60.0
"""How long a file without a lock is watched: longer than a network file system caches its state."""
FORGOTTEN_SECONDS = 3600.0
"""Last touched so long ago, it is not watched: no two clocks differ by so much."""
CHOOSE = "wait for it, stop it, or choose another `output`"


class OutputLock:
    """Holds OUTPUT for this process inside a `with` block.

    The lock is a POSIX record lock on OUTPUT/.lock: it ends with its process, kill -9 included, no child inherits it,
    and network file systems hand it to other machines. Where a file system has none, or none that other machines
    see, the file itself decides: its process lives (this machine), or touches it while we watch (another one).

    Raises:
        ValueError: another process has it, with its number, machine, start and command; or OUTPUT can't be written.
    """

    held: ClassVar[set[str]] = set()
    """Files this process holds: record locks don't keep a process from itself."""

    def __init__(self, out: Path):
        self.out, self.path = out, out / NAME
        self.done = threading.Event()

    def __enter__(self) -> OutputLock:
        self.made = missing(self.out)
        check_writable(self.out, 0)
        self.key = str(self.path.resolve())
        if self.key in self.held:
            raise ValueError(f"{self.out} is in use by this very process, in another thread: {CHOOSE}")
        try:
            self._take()
        except OSError as error:
            raise ValueError(f"can't write {self.path}: {error.strerror}; choose another `output`") from error
        self.held.add(self.key)
        threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.done.set()
        self.held.discard(self.key)
        with contextlib.suppress(OSError):  # while it is locked: whoever opened it sees that it is another file now
            self.path.unlink()
        os.close(self.file)
        remove_empty(self.made)  # of a run that was refused; one that began has files there

    def _take(self) -> None:
        self.file, lock = _open_locked(self.path)
        try:
            holder = _holder(self.file, lock, self.out)
            if holder is not None:
                raise ValueError(f"{self.out} is in use by {holder}: {CHOOSE}")
            who = {"pid": os.getpid(), "host": socket.gethostname(), "boot": _boot(), "processes": _processes()}
            os.ftruncate(self.file, 0)
            os.pwrite(self.file, json.dumps({**who, "started": time.ctime(), "command": _command()}).encode(), 0)
        except (OSError, ValueError):
            os.close(self.file)
            raise

    def _beat(self) -> None:
        while not self.done.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):
                os.utime(self.path)  # never opened again: closing it would end the lock


def _open_locked(path: Path) -> tuple[int, str]:
    """The open file, and whose its lock is: "ours", "theirs", or "nobody's" where the file system has none."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return file, "theirs"
            if error.errno in NO_LOCKS:
                return file, "nobody's"
            os.close(file)
            raise
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file), os.stat(path)):
                return file, "ours"
        os.close(file)  # its holder has just unlinked it


def _holder(file: int, lock: str, out: Path) -> str | None:
    """Who has OUTPUT, or None."""
    try:
        said: dict[str, Any] = json.loads(os.pread(file, 1 << 16, 0))
        pid, host, boot = int(said["pid"]), said["host"], said["boot"]
        who = f"process {pid} on {host} (since {said['started']}: {said['command']})"
    except (ValueError, KeyError, TypeError):  # just made, or cut off by a full disk
        return "a process that has only just started" if lock == "theirs" else None
    if lock == "theirs":
        return who
    this_machine = boot == _boot() if boot else host == socket.gethostname()
    if this_machine and lock == "ours":
        return None  # the lock can be trusted here: the process is gone
    if this_machine and said["processes"] == _processes():
        return who if _alive(pid) else None
    return who if _touched(file, who, out) else None


def _touched(file: int, who: str, out: Path) -> bool:
    """Whether somebody touches the file while we watch."""
    before = os.fstat(file).st_mtime
    if abs(time.time() - before) > FORGOTTEN_SECONDS:
        return False
    print(f"{out} was in use by {who}: watching for {WATCH_SECONDS:.0f} s whether it lives", file=sys.stderr)
    until = time.monotonic() + WATCH_SECONDS
    while time.monotonic() < until:
        time.sleep(min(1.0, WATCH_SECONDS))
        if os.fstat(file).st_mtime != before:
            return True
    return False


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _boot() -> str:
    """This start of this machine's kernel; empty where it has no name."""
    file = Path("/proc/sys/kernel/random/boot_id")
    return file.read_text(encoding="ascii").strip() if file.is_file() else ""


def _processes() -> str:
    """The space of process numbers: containers of one machine have their own."""
    space = Path("/proc/self/ns/pid")
    return os.readlink(space) if space.is_symlink() else ""


def _command() -> str:
    file = Path("/proc/self/cmdline")
    words = file.read_bytes().split(b"\0") if file.is_file() else []
    return " ".join(b" ".join(words).decode(errors="replace").split())[:500]
