"""A directory that is there whole or not at all: written beside its place, then renamed.

Durability is that of cp: after a power cut within seconds of a conversion, convert again.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError

from retrofox.support.files import FULL, left_behind, new_file_mode

MARKS = {"config.json": b'"model_type"', "adapter_config.json": b'"peft_type"'}
"""File of a model's or adapter's directory -> a key that it has."""


@contextlib.contextmanager
def atomic_directory(out: Path) -> Iterator[Path]:
    """A new directory beside `out` that is renamed to it where the block ends, and removed where it raises.

    A process that is killed leaves it, .OUT.HOST.PID.partial, for the machine's next one to remove.

    Raises:
        ValueError: `out` exists, or lies inside a model's directory.
        OSError: it can't be written, as where the disk is full.
    """
    refuse_existing(out)
    for left in left_behind(out.parent, glob.escape(out.name), "partial"):
        shutil.rmtree(left, ignore_errors=True)
    partial = out.parent / f".{out.name}.{socket.gethostname()}.{os.getpid()}.partial"
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise OSError(f"{out} can't be made: {error.strerror}; choose another OUT") from None
    try:
        yield partial
        for file in partial.rglob("*.safetensors"):
            file.chmod(new_file_mode())
        partial.rename(out)
    except (SafetensorError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in FULL:
            refuse_existing(out)  # another made it meanwhile
            raise
        why = error.strerror if isinstance(error, OSError) else error
        raise OSError(f"{out} could not be written: {why}; nothing was left there") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def refuse_existing(out: Path) -> None:
    """Raises ValueError where `out` is a file, a directory with something in it, or inside a model's directory."""
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise ValueError(f"{out} exists: remove it or choose another OUT")
    if (model := model_around(out)) is not None:
        raise ValueError(f"{out} lies inside the model {model}: choose another OUT, outside of it")


def model_around(folder: Path) -> Path | None:
    """The nearest directory that holds a model or adapter, with weights: this one or one above it; None without one."""
    weights = "*.safetensors", "pytorch_model*.bin", "adapter_model.bin"
    for place in (folder.resolve(), *folder.resolve().parents):
        told = [(place / name, mark) for name, mark in MARKS.items() if (place / name).is_file()]
        held = told and any(any(place.glob(name)) for name in weights)
        if held and any(mark in file.read_bytes() for file, mark in told):
            return place
    return None
