"""Starting another Python that finds the same modules as this one."""

from __future__ import annotations

import subprocess
import sys


def fresh_python(program: str) -> list[str]:
    """The command that runs `program`, Python source, in a new process with this one's module search path.

    `-m` and a plain `-c` look in the working directory first, where a random.py or a datasets.py of the user's may lie.
    """
    return [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{program}"]


def run_python(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs `program`, Python source, in a new process; returns its exit code, stdout and stderr."""
    return subprocess.run([*fresh_python(program), *map(str, arguments)], capture_output=True, text=True, check=False)
