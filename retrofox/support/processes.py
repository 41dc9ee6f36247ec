"""Starting another Python that finds the same modules as this one."""

from __future__ import annotations

import sys


def fresh_python(program: str) -> list[str]:
    """The command that runs `program`, Python source, in a new process with this one's module search path.

    `-m` and a plain `-c` look in the working directory first, where a random.py or a datasets.py of the user's may lie.
    """
    return [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{program}"]
