"""What all processes of a launch would say is said once; what only one of them knows is said, too."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import pytest

from retrofox.support import processes
from retrofox.training.run_directory import output_lock

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def refusals(*train: str) -> list[str]:
    """What two processes of torchrun that train print as errors of ours."""
    command = [sys.executable, *TORCHRUN, "-m", "retrofox", "train", *train]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode != 0
    assert "run it again to go on" not in done.stderr
    return [line for line in done.stderr.splitlines() if line.startswith("error:")]


@pytest.mark.parametrize(("locked", "reason"), [(False, "no data at"), (True, "is in use by another run")])
def test_two_processes_that_train_refuse_a_recipe_once(write_recipe, tmp_path, locked, reason):
    with output_lock(tmp_path / "run") if locked else contextlib.nullcontext():  # which only the first looks at
        (told,) = refusals(str(write_recipe()), *([] if locked else ["data.train=[gone]"]))
    assert reason in told


def test_what_only_a_later_process_knows_is_said(monkeypatch, run):
    waits = []
    monkeypatch.setattr(processes.time, "sleep", waits.append)
    for rank, size, waited in (("1", "2", [processes.PATIENCE]), ("0", "2", []), ("0", "1", [])):
        monkeypatch.setenv("LOCAL_RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", size)
        code, _, err = run("plan", "nowhere.yaml")
        assert (code, waits) == (2, waited)
        assert "none of this name ships" in err
        waits.clear()
