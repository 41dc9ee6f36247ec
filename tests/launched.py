"""What a process of `launch` (conftest.py) runs: its program, with streams, environment and arguments of its own."""

import gc
import os
import sys

import torch


def become(output: str, error: str, environment: dict[str, str], program: str, arguments: list[str]) -> None:
    """Runs `program`, Python source, as `python -c` would."""
    gc.freeze()  # what was imported before the fork is not looked through for garbage
    for descriptor, file in ((1, output), (2, error)):
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.argv = ["-c", *arguments]
    exec(compile(program, "<launched>", "exec"), {"__name__": "__main__"})


become(*ORDER)  # type: ignore[name-defined] # noqa: F821 - a global that `launch` gives
