"""A process of a group dies: the others end, and one line names that one, not those that left because of it."""

from __future__ import annotations

import time

import pytest

PROGRAM = """
import os, signal, sys
import torch, torch.distributed as dist
from retrofox.parallel.watch import ProcessLost, Watch

dist.init_process_group("gloo")
rank, lost = dist.get_rank(), int(sys.argv[1])
chain = [dist.new_group([place, place + 1]) for place in range(3)]  # neighbours alone
try:
    with Watch(lambda: "nothing stands"):
        if rank == lost:
            os.kill(os.getpid(), signal.SIGKILL)
        nearer = rank - 1 if rank > lost else rank + 1
        try:
            dist.all_reduce(torch.zeros(1), group=chain[min(rank, nearer)])
        except RuntimeError as error:
            raise error if rank % 2 else ValueError("could not write") from error  # as a save says it
except ProcessLost as error:
    print("error:", error, file=sys.stderr, flush=True)
    raise SystemExit(2)
"""


@pytest.mark.parametrize("lost", [0, 3])
def test_only_the_process_that_died_is_named(launch, lost):
    started = time.monotonic()
    done = launch(PROGRAM, lost, processes=4)
    told = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(told) == 1, done.stderr
    assert f"error: process {lost} (pid" in told[0], told
    assert ", process" not in told[0], told
    assert time.monotonic() - started < 30


LAUNCHED = """
import os, signal, sys, time
import torch.distributed as dist
from retrofox.parallel.watch import ProcessLost, Watch
from retrofox.support.interruptions import Interruptions

dist.init_process_group("gloo")
rank, lost = dist.get_rank(), int(sys.argv[1])
try:
    with Interruptions("nothing was done yet", quiet=rank > 0), Watch(lambda: "nothing stands") as watch:
        if rank == lost:
            os.kill(os.getpid(), signal.SIGKILL)
        while lost >= 0 and not watch.lost():
            time.sleep(0.1)
        if lost >= 0 or rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(3)
except ProcessLost as error:
    print("error:", error, file=sys.stderr, flush=True)
    raise SystemExit(2)
"""


@pytest.mark.parametrize(
    ("lost", "line"),
    [(1, "error: process 1 (pid"), (0, "error: process 0 (pid"), (-1, "signal 15: nothing was done yet")],
)
def test_a_launchers_sigterm_for_a_lost_process_names_it_and_any_other_is_answered_as_before(launch, lost, line):
    done = launch(LAUNCHED, lost, processes=3)
    told = [text for text in done.stderr.splitlines() if text.startswith(("error:", "signal"))]
    assert len(told) == 1, done.stderr
    assert told[0].startswith(line), told
    if lost < 0:
        assert done.returncode == 143


AMID = """
import os, signal
import torch.distributed as dist
from retrofox.parallel.watch import ProcessLost, Watch

dist.init_process_group("gloo")
try:
    with Watch(lambda: "nothing stands") as watch:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        plain = watch._waited_for
        watch._waited_for = lambda: (plain(), os.kill(os.getpid(), signal.SIGTERM))[0]
        dist.barrier()
except ProcessLost as error:
    print("error:", error, flush=True)
"""


def test_a_sigterm_while_the_lost_one_is_looked_for_changes_nothing(launch):
    done = launch(AMID, processes=2)
    assert done.stdout.startswith("error: process 1 (pid"), done.stdout + done.stderr


EARLY = """
import os, signal, sys
import torch.distributed as dist
from retrofox.parallel.watch import ProcessLost, Watch

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    with Watch(lambda: "nothing stands"):
        pass
except ProcessLost as error:
    print("error:", error, file=sys.stderr, flush=True)
"""


def test_a_process_that_dies_before_it_is_known_ends_the_others_with_a_line(launch):
    done = launch(EARLY, processes=2)
    assert "error: another process ended as it started: nothing stands" in done.stderr
    assert "Traceback" not in done.stderr, done.stderr
