"""SIGTERM and Ctrl-C: leave at once where nothing would be lost, else after the next save."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interruptions:
    """Answers both signals inside a `with` block: SystemExit(128 + signal), at once or, inside `held`, when asked.

    The exit unwinds as an exception does: temporary files are removed, processes end. Further signals change nothing,
    but a second Ctrl-C raises KeyboardInterrupt. In a thread that is not the main one, where Python allows no
    handlers, signals do what they did before.

    Attributes:
        stands: the work that is kept if a signal comes now; printed before leaving.
        caught: the signal that came, or None.
    """

    def __init__(self, stands: str, quiet: bool = False):
        self.stands, self.quiet = stands, quiet
        self.caught: int | None = None
        self.holding, self.leaving = 0, False
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Interruptions:
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self._catch) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        if self.leaving and self.caught is not None and kind is not None and issubclass(kind, Exception):
            raise SystemExit(128 + self.caught)  # torch made an error of the exit

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Inside, a signal is only noted in `caught`: for work that must be finished, such as a save."""
        self.holding += 1
        try:
            yield
        finally:
            self.holding -= 1

    def leave(self) -> None:
        """Raises SystemExit(128 + signal) if a signal came, and prints `stands`."""
        if self.caught is not None and not self.leaving:
            self.leaving = True
            if not self.quiet:
                print(f"signal {self.caught}: {self.stands}: run it again to go on", file=sys.stderr, flush=True)
            raise SystemExit(128 + self.caught)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if self.caught == signal.SIGINT and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.caught = number
        if not self.holding:
            self.leave()
