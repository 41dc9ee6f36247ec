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
