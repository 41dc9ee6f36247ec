"""One run per OUTPUT: a second one is refused, and a killed one is no obstacle."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import filelock
import pytest

from retrofox.training.run_directory import output_lock
from retrofox.training.train import train

HOLDER = """
import sys, time
from pathlib import Path
from retrofox.training.run_directory import output_lock
with output_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_run_is_refused_until_the_first_is_killed(tmp_path, make_recipe):
    recipe = make_recipe({"tokens": 128}, output="")
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    with holder.stdout:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=r"in use by another run: .*choose another `output`"):
            train(recipe)
        assert not (tmp_path / "recipe.yaml").exists()
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
    assert Path(train(recipe)["model"]).is_dir()
    assert not (tmp_path / ".lock").exists()


@pytest.mark.parametrize("error", [NotImplementedError("no flock"), OSError(errno.ENOLCK, "No locks available")])
def test_without_locks_a_run_goes_on_and_says_so(error, tmp_path, monkeypatch, capsys):
    def refuse(*arguments, **options):
        raise error

    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    with output_lock(tmp_path):
        assert "on a file system without locks" in capsys.readouterr().err
