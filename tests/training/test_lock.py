"""One run per OUTPUT: a second one is refused, and a killed one is no obstacle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import filelock
import pytest

from retrofox.training.lock import NAME, output_lock
from retrofox.training.train import train

HOLDER = """
import sys, time
from pathlib import Path
from retrofox.training.lock import output_lock
with output_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds tmp_path."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_killed_process_is_no_obstacle(tmp_path, holder):
    with pytest.raises(ValueError, match=r"in use by another run: .*choose another `output`"):
        output_lock(tmp_path).__enter__()
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with output_lock(tmp_path):
        assert (tmp_path / NAME).exists()
    assert not (tmp_path / NAME).exists()


def test_a_process_does_not_let_itself_in_twice(tmp_path):
    with output_lock(tmp_path), pytest.raises(ValueError, match="in use by another run"):
        output_lock(tmp_path).__enter__()
    with output_lock(tmp_path):
        pass


def test_without_locks_a_run_goes_on_and_says_so(tmp_path, monkeypatch, capsys):
    def refuse(*arguments, **options):
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    with output_lock(tmp_path):
        assert "on a file system without locks" in capsys.readouterr().err


def test_a_refused_run_leaves_no_folder(tmp_path):
    with pytest.raises(ValueError, match="no"), output_lock(tmp_path / "a" / "b"):
        raise ValueError("no")
    assert not (tmp_path / "a").exists()


def test_training_holds_its_output(tmp_path, holder, make_recipe):
    recipe = make_recipe({"tokens": 128}, output="")
    with pytest.raises(ValueError, match="in use by another run"):
        train(recipe)
    assert not (tmp_path / "recipe.yaml").exists()
    holder.kill()
    holder.wait()
    assert Path(train(recipe)["model"]).is_dir()
    assert not (tmp_path / NAME).exists()
