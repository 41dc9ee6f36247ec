"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import json
import os
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of the errors that say: there is no more room for a file."""


def new_file_mode() -> int:
    """Permissions of a new file, as the umask has them; safetensors writes 0600 whatever it says."""
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


@contextlib.contextmanager
def temporary(folder: Path, name: str) -> Iterator[Path]:
    """A name beside the final one, of this machine, process and thread alone; removed unless it was renamed."""
    path = folder / f".{name}.{socket.gethostname()}.{threading.get_ident()}.{os.getpid()}.tmp"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def left_behind(folder: Path, name: str, suffix: str) -> list[Path]:
    """Files in a folder of this machine's processes that have ended: .NAME.HOST...PID.SUFFIX, NAME a glob."""
    found = folder.glob(f".{name}.{glob.escape(socket.gethostname())}.*.{suffix}")
    processes = {path: path.name.split(".")[-2] for path in found}
    return [path for path, pid in processes.items() if pid.isdecimal() and not psutil.pid_exists(int(pid))]


def sha256_of(path: Path) -> str:
    """The sha256 of a file's content, hex."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def stamps(path: Path) -> list[list[Any]]:
    """[name, size, time of change] of a file, or of a directory's files; none where nothing is there."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files if file.is_file()]


def sync(path: Path) -> None:
    """Makes a file's content, or a directory's entries, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file, durable and with the umask's permissions; one that holds this content already is left alone.

    A reader sees the old content or the new, never a part. After an exception the old content stays.
    """
    if path.is_file() and path.read_bytes() == content:
        return
    with temporary(path.parent, path.name) as partial:
        partial.write_bytes(content)
        sync(partial)
        partial.chmod(new_file_mode())
        os.replace(partial, path)
    sync(path.parent)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Writes a JSON file whole or not at all."""
    write_whole(path, json.dumps(values, indent=1).encode())


def write_result(path: str | os.PathLike, content: bytes) -> str:
    """Writes a result file whole or not at all, making its folder; returns its path. ValueError where it can't."""
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, content)
    except OSError as error:
        raise ValueError(
            f"can't write {target}: {error.strerror or error}; free some disk space or name another directory"
        ) from error
    return str(target)


def write_json_result(path: str | os.PathLike, values: dict[str, Any]) -> str:
    """`write_result` of JSON, which has no NaN or infinity."""
    return write_result(path, (json.dumps(values, indent=1, allow_nan=False) + "\n").encode())


def nearest_existing(path: Path) -> Path:
    """The path itself, or the nearest one above it that is there."""
    whole = path.expanduser().absolute()
    return next(place for place in (whole, *whole.parents) if place.exists())


def why_unwritable(folder: Path) -> str | None:
    """Why no file can be made in a folder, by trying (rights alone don't tell for root); None where one can."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror


def text_of(file: Path) -> str:
    """The text in a file, without a byte-order mark; raises ValueError where it can't be read or is not UTF-8."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except OSError as error:
        reason = error.strerror
    except UnicodeDecodeError as error:
        reason = f"it is not UTF-8 text: {error.reason} at byte {error.start}"
    raise ValueError(f"{file} can't be read ({reason}): give a UTF-8 text file")
