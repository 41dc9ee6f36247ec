"""When one process of a run dies, the others must not wait for it for ever: they end, and one says why."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from retrofox.support.launches import said

LOOK_SECONDS = 1.0
GRACE_SECONDS = 10.0
"""How long a failing collective has to raise by itself; a GPU's never does."""
LINGER_SECONDS = 2 * LOOK_SECONDS
"""How long a process stays when it knows of a lost one: so long that all others have looked while only that one is."""


class ProcessLost(ValueError):
    """A process of the run ended while the others needed it."""


class Watch:
    """Inside a `with` block, looks whether the run's other processes on this machine live.

    A collective that fails because one of them ended is raised again as `ProcessLost` by the first of those left, and
    as a silent SystemExit(1) by the rest. A process that waits for ever in one (NCCL's kernels do) is ended. Those that
    leave for a lost one stay long enough for all to see which one it was. A launcher that ends the others itself
    (torchrun, accelerate launch: SIGTERM) gets the same answer; any other SIGTERM is for the handler there was.

    Args:
        stands: what is kept if a process is lost now, and what to do, for the message.

    Raises:
        ProcessLost: on entering, too, where a process ended before the others knew its number.
    """

    def __init__(self, stands: Callable[[], str]):
        self.stands = stands
        self.done = threading.Event()
        self.first: dict[int, int] = {}
        self.leaving = False

    def __enter__(self) -> Watch:
        found: list[Any] = [None] * dist.get_world_size()
        here = _machine()
        try:
            dist.all_gather_object(found, (here, os.getpid(), _started(os.getpid())))
        except RuntimeError as error:
            raise ProcessLost(f"another process ended as it started: {self.stands()}") from error
        self.rank = dist.get_rank()
        # A process of another machine, or of a container with its own numbers, can't be looked for by its number.
        self.others = {rank: who[1:] for rank, who in enumerate(found) if who[0] == here and rank != self.rank}
        threading.Thread(target=self._look, daemon=True).start()
        self.before: Any = None
        if threading.current_thread() is threading.main_thread():
            self.before = signal.signal(signal.SIGTERM, self._terminated)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        broken = isinstance(error, RuntimeError) or isinstance(error and error.__cause__, RuntimeError)  # amid a save
        self.leaving = self.leaving or broken  # a SIGTERM that comes now changes nothing
        lost = self._waited_for() if self.leaving else {}
        self.done.set()
        if lost:
            time.sleep(LINGER_SECONDS)
        if self.before is not None:
            signal.signal(signal.SIGTERM, self.before)
        if lost:
            if self._speaks(lost):
                raise ProcessLost(self._message(lost)) from error
            raise SystemExit(1) from error

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        """SIGTERM: leaves for a lost process, whatever is under way; without one, does what was done before."""
        if self.leaving:
            return
        if self.lost():
            self.leaving = True
            raise SystemExit(1)
        if callable(self.before):
            self.before(number, frame)
        elif self.before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def lost(self) -> dict[int, int]:
        """Rank -> number of those that had ended when this process first saw any: others leave because of them."""
        if not self.first:
            self.first = {rank: pid for rank, (pid, started) in self.others.items() if _started(pid) != started}
        return self.first

    def _waited_for(self) -> dict[int, int]:
        """The processes lost, which may take a moment to show after their connections broke."""
        end = time.monotonic() + 3.0
        while not (lost := self.lost()) and time.monotonic() < end:
            time.sleep(0.1)
        return lost

    def _speaks(self, lost: dict[int, int]) -> bool:
        """Whether this is the first process left on this machine, and none of the lost has said why it ended."""
        return not said() and all(rank > self.rank or rank in lost for rank in self.others)

    def _message(self, lost: dict[int, int]) -> str:
        names = ", ".join(f"process {rank} (pid {pid})" for rank, pid in sorted(lost.items()))
        return f"{names} ended, and the others can't go on alone: {self.stands()}"

    def _look(self) -> None:
        while not self.done.wait(LOOK_SECONDS):
            lost = self.lost()
            if lost and not self.done.wait(GRACE_SECONDS):
                if self._speaks(lost):
                    print(f"error: {self._message(lost)}", file=sys.stderr, flush=True)
                os._exit(1)  # the main thread waits in a collective that nothing ends


def _started(pid: int) -> str | None:
    """When a process was started, in ticks since boot; None where it has ended, collected by its parent or not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _machine() -> str:
    """This machine and this set of process numbers."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = boot.read_text(encoding="utf-8").strip() if boot.is_file() else ""
    numbers = Path("/proc/self/ns/pid")
    return f"{name} {numbers.readlink() if numbers.is_symlink() else ''}"
