"""Starting another Python that finds the same modules as this one."""

from __future__ import annotations

import subprocess
import sys


def run_python(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs `program`, Python source, in a new process with this one's module search path; returns exit code and output.

    `-m` and a plain `-c` look in the working directory first, where a random.py or a datasets.py of the user's may lie.
    """
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{program}", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)
