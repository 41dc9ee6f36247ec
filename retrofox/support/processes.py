"""Processes: another Python beside this one, how many were launched together, and which of them says why they end."""

from __future__ import annotations

import os
import subprocess
import sys
import time

PATIENCE = 5.0
"""Seconds in which a failed process ends, which may have to close a GPU, and torchrun, which looks ten times a second,
ends the others."""


def processes() -> int:
    """How many processes were launched together: WORLD_SIZE, which torchrun sets, and a person before `plan`."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def shards_weights(*by: str) -> bool:
    """Whether accelerate launched this process to split weights, gradients or optimizer, by "FSDP" or "DEEPSPEED"."""
    names = by or ("FSDP", "DEEPSPEED")
    return any(os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() == "true" for name in names)


def wait_to_be_ended() -> None:
    """Gives torchrun the time to end this process where another has failed before; returns where it does not.

    Called before an error is told. All processes refuse a recipe alike, and those that wait for one that has refused
    lose its connection: one text is enough. What only this process knows is told afterwards.
    """
    if processes() > 1:
        time.sleep(PATIENCE)


def run_python(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs `program`, Python source, in a new process with this one's module search path; returns exit code and output.

    `-m` and a plain `-c` look in the working directory first, where a random.py or a datasets.py of the user's may lie.
    """
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{program}", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)
