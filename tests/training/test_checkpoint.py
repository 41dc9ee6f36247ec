"""Checkpoints: only complete ones count, the newest good one is found, rotation never removes it."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from retrofox.training import checkpoint


def make(root, step, complete=True):
    directory = root / f"checkpoint-{step}"
    (directory / "inner").mkdir(parents=True)
    (directory / "weights.bin").write_bytes(os.urandom(1000))
    (directory / "inner" / "state.json").write_text(json.dumps({"step": step}))
    if complete:
        checkpoint.commit(directory, {"step": step})
    return directory


def test_commit_names_every_file_and_its_note_comes_back(tmp_path):
    directory = make(tmp_path, 3)
    marker = json.loads((directory / checkpoint.MARKER).read_text())
    assert sorted(marker["files"]) == ["inner/state.json", "weights.bin"]
    assert checkpoint.problem(directory) is None
    assert checkpoint.note_of(directory) == {"step": 3}


@pytest.mark.parametrize("damage", ["marker", "torn marker", "missing", "short", "flipped"])
def test_newest_good_falls_back_and_says_why(tmp_path, damage):
    good, bad = make(tmp_path, 9), make(tmp_path, 10)
    weights, marker = bad / "weights.bin", bad / checkpoint.MARKER
    if damage == "marker":
        marker.unlink()
    elif damage == "torn marker":
        marker.write_bytes(marker.read_bytes()[:-2])
    elif damage == "missing":
        weights.unlink()
    elif damage == "short":
        weights.write_bytes(weights.read_bytes()[:-1])
    else:
        weights.write_bytes(bytes([weights.read_bytes()[0] ^ 1]) + weights.read_bytes()[1:])
    found, skipped = checkpoint.newest_good(tmp_path)
    assert found == good
    assert len(skipped) == 1
    assert skipped[0].startswith("checkpoint-10: ")


def test_a_save_outlives_later_ones_that_were_passed_over(tmp_path):
    make(tmp_path, 4)
    for step in (6, 8):  # damaged after they were complete
        (make(tmp_path, step) / "weights.bin").write_bytes(b"torn")
    found, skipped = checkpoint.newest_good(tmp_path)
    assert found is not None
    assert (found.name, len(skipped)) == ("checkpoint-4", 2)
    make(tmp_path, 5)
    checkpoint.rotate(tmp_path, keep=2)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["checkpoint-4", "checkpoint-5"]


def test_rotation_keeps_the_newest_complete_and_whatever_is_newer(tmp_path):
    for step in (2, 4, 6, 10):
        make(tmp_path, step)
    make(tmp_path, 8, complete=False)
    make(tmp_path, 12, complete=False)  # being written
    checkpoint.rotate(tmp_path, keep=2)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == [
        "checkpoint-6",
        "checkpoint-10",
        "checkpoint-12",
    ]
    shutil.rmtree(tmp_path / "checkpoint-10")
    shutil.rmtree(tmp_path / "checkpoint-6")
    checkpoint.rotate(tmp_path, keep=1)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["checkpoint-12"]
