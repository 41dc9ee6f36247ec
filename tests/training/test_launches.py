"""What all processes of a launch would say is said once; what only one of them knows is said, too."""

from __future__ import annotations

import os
import signal
import time

import pytest

from retrofox.support.interruptions import Interruptions
from retrofox.support.launches import processes, say_once
from retrofox.training.run_directory import output_lock

SAYING = """
import os, sys, time
from retrofox.cli import app

def doctor():
    rank = int(os.environ["RANK"])
    time.sleep((2 - rank) / 4)  # the first by rank comes last
    raise ValueError(f"no {sys.argv[2 + rank]} there: give another one\\nand so on")

app.app = doctor
app.spread = lambda arguments: arguments
app.main()
"""
TRAINING = "import sys\nfrom retrofox.cli import main\nsys.argv = ['retrofox', 'train', *sys.argv[1:]]\nmain()"


def told(done) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("error:")]


@pytest.fixture
def as_torchrun(launch, tmp_path):
    """`launch`, with the file for a process's error that torchrun names, in the launch's folder."""
    folder = tmp_path / "attempt_0"
    folder.mkdir()
    return lambda *given, **options: launch(*given, TORCHELASTIC_ERROR_FILE=f"{folder}/0/error.json", **options)


def test_each_reason_is_said_once(as_torchrun):
    done = as_torchrun(SAYING, "doctor", "disk", "text", "text", processes=3)
    assert sorted(told(done)) == [f"error: no {word} there: give another one" for word in ("disk", "text")]
    assert done.stderr.count("and so on") == 2
    assert done.returncode == 2


def test_without_a_folder_of_the_launch_every_process_speaks(launch, tmp_path):
    for file in ("", str(tmp_path / "gone" / "0" / "error.json")):
        done = launch(SAYING, "doctor", "text", "text", processes=2, TORCHELASTIC_ERROR_FILE=file)
        assert len(told(done)) == 2, done.stderr
        assert done.returncode == 2


@pytest.mark.parametrize(("change", "reason"), [("log.evrey=3", "unknown key"), ("data.train=[gone]", "no data at")])
def test_two_processes_that_train_refuse_a_recipe_once(as_torchrun, write_recipe, change, reason):
    done = as_torchrun(TRAINING, str(write_recipe()), change, processes=2)
    assert len(told(done)) == 1, done.stderr
    assert reason in told(done)[0]
    assert done.returncode == 2


def test_what_only_the_first_process_refuses_ends_all_with_its_reason(as_torchrun, write_recipe, tmp_path):
    started = time.monotonic()
    with output_lock(tmp_path / "run"):
        done = as_torchrun(TRAINING, str(write_recipe()), processes=2)
    assert len(told(done)) == 1, done.stderr
    assert f"{tmp_path / 'run'} is in use by another run" in told(done)[0]
    assert "Traceback" not in done.stderr
    assert done.returncode == 2
    assert time.monotonic() - started < 30


def test_a_signal_after_a_refusal_says_nothing_more(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0" / "error.json"))
    for line in ("signal 15: it stands: run it again to go on\n", ""):
        with pytest.raises(SystemExit), Interruptions("it stands"):
            os.kill(os.getpid(), signal.SIGTERM)  # as torchrun does where another process has failed
        assert capsys.readouterr().err == line
        say_once("a reason", lambda: None)


@pytest.mark.parametrize("given", ["two", "1.5", "0", "-2"])
def test_a_number_of_processes_that_is_none_is_refused_in_one_line(monkeypatch, run, given):
    monkeypatch.setenv("WORLD_SIZE", given)
    code, out, err = run("plan", "nowhere.yaml")
    assert (code, out) == (2, "")
    assert err == f"error: WORLD_SIZE is the number of processes, a whole number from 1 on, and it is '{given}'\n"
    monkeypatch.setenv("WORLD_SIZE", "")
    assert processes() == 1
