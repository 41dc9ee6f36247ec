"""One run per OUTPUT: a second one is refused by name, and what dead processes leave is taken over."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from retrofox.config import load_recipe
from retrofox.training import lock as train_lock
from retrofox.training.lock import NAME, OutputLock
from retrofox.training.train import train

HOLDER = """
import sys, time
from pathlib import Path
from retrofox.training.lock import OutputLock
with OutputLock(Path(sys.argv[1])):
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


def test_a_second_process_is_refused_by_name_and_a_killed_one_is_no_obstacle(tmp_path, holder):
    with pytest.raises(ValueError, match=rf"in use by process {holder.pid} on .*since .*choose another `output`"):
        OutputLock(tmp_path).__enter__()
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert json.loads((tmp_path / NAME).read_text())["pid"] == holder.pid
    with OutputLock(tmp_path):
        assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()
    assert not (tmp_path / NAME).exists()


def test_a_process_does_not_let_itself_in_twice(tmp_path):
    with OutputLock(tmp_path), pytest.raises(ValueError, match="by this very process"):
        OutputLock(tmp_path).__enter__()
    with OutputLock(tmp_path):
        pass


@pytest.fixture
def without_locks(monkeypatch):
    """A file system that has no locks."""

    def refuse(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)


def test_without_locks_the_process_itself_is_looked_for(tmp_path, holder, without_locks):
    with pytest.raises(ValueError, match=f"in use by process {holder.pid}"):
        OutputLock(tmp_path).__enter__()
    holder.kill()
    holder.wait()
    with OutputLock(tmp_path):
        pass


@pytest.mark.parametrize("alive", [True, False])
def test_another_machine_is_watched_where_no_lock_vouches_for_it(tmp_path, without_locks, monkeypatch, capsys, alive):
    monkeypatch.setattr(train_lock, "WATCH_SECONDS", 0.3)
    said = {"pid": 1, "host": "elsewhere", "boot": "another", "processes": "", "started": "today", "command": "train"}
    (tmp_path / NAME).write_text(json.dumps(said))
    touch = threading.Timer(0.1, lambda: os.utime(tmp_path / NAME, (time.time() + 9, time.time() + 9)))
    if alive:
        touch.start()
        with pytest.raises(ValueError, match=r"in use by process 1 on elsewhere \(since today: train\)"):
            OutputLock(tmp_path).__enter__()
        touch.join()
    else:
        with OutputLock(tmp_path):
            pass
    assert "watching for 0 s whether it lives" in capsys.readouterr().err


def named_in(out) -> int:
    return json.loads((out / NAME).read_text())["pid"]


def test_what_a_full_disk_or_an_old_run_left_is_taken_over(tmp_path, monkeypatch):
    for content in ("", "{", '{"pid": "x"}', json.dumps({"pid": 1})):
        (tmp_path / NAME).write_text(content)
        with OutputLock(tmp_path):
            assert named_in(tmp_path) == os.getpid()
    monkeypatch.setattr(train_lock, "WATCH_SECONDS", 60.0)  # would be waited for if it were looked at
    said = {"pid": 1, "host": "elsewhere", "boot": "another", "processes": "", "started": "today", "command": "train"}
    (tmp_path / NAME).write_text(json.dumps(said))
    os.utime(tmp_path / NAME, (0, 0))
    with OutputLock(tmp_path):
        assert named_in(tmp_path) == os.getpid()


def test_the_holder_touches_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr(train_lock, "BEAT_SECONDS", 0.02)
    with OutputLock(tmp_path):
        os.utime(tmp_path / NAME, (0, 0))
        deadline = time.monotonic() + 10
        while not (tmp_path / NAME).stat().st_mtime and time.monotonic() < deadline:
            time.sleep(0.02)
        assert (tmp_path / NAME).stat().st_mtime > 0


def test_training_holds_its_output(tmp_path, holder, pico_fox_checkpoint):
    (tmp_path / "text.txt").write_text("the fox forgets the gate, " * 40)
    stage = {"objective": "extend", "tokens": 64, "sequence_length": 32}
    values = {
        "model": str(pico_fox_checkpoint),
        "output": str(tmp_path),
        "data": {"train": [str(tmp_path / "text.txt")], "cache": str(tmp_path / "cache"), "workers": 1},
        "stages": [stage],
        "precision": "fp32",
        "dataloader_workers": 0,
    }
    file = tmp_path / "recipe.yaml.in"
    file.write_text(yaml.safe_dump(values))
    with pytest.raises(ValueError, match=f"in use by process {holder.pid}"):
        train(load_recipe(file))
    assert not (tmp_path / "recipe.yaml").exists()
    holder.kill()
    holder.wait()
    assert Path(train(load_recipe(file))["model"]).is_dir()
    assert not (tmp_path / NAME).exists()
