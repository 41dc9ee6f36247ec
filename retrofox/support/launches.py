"""How many processes were launched together, and what those of torchrun say once."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

PREFIX = "retrofox-said-"


def processes() -> int:
    """How many processes were launched together: WORLD_SIZE, which torchrun sets, and a person before `plan`.

    Raises:
        ValueError: it is no such number.
    """
    given = os.environ.get("WORLD_SIZE") or "1"
    if not given.strip().isdecimal() or int(given) < 1:
        raise ValueError(f"WORLD_SIZE is the number of processes, a whole number from 1 on, and it is {given!r}")
    return int(given)


def shards_weights(*by: str) -> bool:
    """Whether accelerate launched this process to split weights, gradients or optimizer.

    Args:
        by: "FSDP", "DEEPSPEED"; any of the two if none is named.
    """
    names = by or ("FSDP", "DEEPSPEED")
    return any(os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() == "true" for name in names)


def folder() -> Path | None:
    """The folder that torchrun, and so `accelerate launch`, makes on each machine for one launch; else None."""
    own = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(own).parents[1] if own else None  # FOLDER/RANK/error.json


def say_once(text: str, say: Callable[[], None]) -> None:
    """Calls `say`, which prints `text`, unless another process of this launch on this machine has said the same.

    The first that comes speaks, not the first by rank: torchrun ends all others as soon as one has failed. Nobody
    leaves before it was said. Where there is no folder of the launch, every process speaks.
    """
    shared = folder()
    if shared is None or not shared.is_dir():
        say()
        return
    with (shared / (PREFIX + hashlib.sha256(text.encode()).hexdigest()[:16])).open("a") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if not os.fstat(file.fileno()).st_size:
            say()
            file.write(text)


def said() -> bool:
    """Whether a process of this launch on this machine has said why it ended."""
    shared = folder()
    return shared is not None and any(shared.glob(f"{PREFIX}*"))
