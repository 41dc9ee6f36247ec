"""Checkpoints that survive kill -9: a COMPLETE marker written last, checksums, fallback, rotation.

A checkpoint is a directory checkpoint-N. It counts only once it holds COMPLETE, a JSON file naming every other file
with its size and SHA-256, written to disk after all of them. Whenever the process is killed, training resumes from the
newest directory whose files agree with its COMPLETE.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from retrofox.support.counts import size
from retrofox.support.files import sha256_of, sync, write_json

MARKER = "COMPLETE"


def checkpoints(root: Path) -> list[Path]:
    """Every checkpoint-N below root, complete or not, oldest first."""
    steps = {path: path.name.removeprefix("checkpoint-") for path in root.glob("checkpoint-*") if path.is_dir()}
    return sorted((path for path, step in steps.items() if step.isdecimal()), key=lambda path: int(steps[path]))


def commit(directory: Path, note: dict[str, Any]) -> None:
    """Declares a checkpoint complete: all its files reach the disk, then COMPLETE does.

    Checkpoints of later steps are then deleted: the run that saves this one has passed over them as damaged, and they
    would otherwise count as the newest.

    Args:
        note: JSON values kept in COMPLETE beside the file list (step, tokens, stage).
    """
    files = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.name != MARKER:
            sync(path)
            files[path.relative_to(directory).as_posix()] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    for folder in (directory.parent, directory, *(path for path in directory.rglob("*") if path.is_dir())):
        sync(folder)
    write_json(directory / MARKER, {**note, "files": files})
    beside = checkpoints(directory.parent)
    for later in beside[beside.index(directory) + 1 :] if directory in beside else ():
        discard(later)


def problem(directory: Path) -> str | None:
    """Why a checkpoint can't be used, or None if it is complete and every file agrees with COMPLETE."""
    marker = directory / MARKER
    if not marker.is_file():
        return "it has no COMPLETE marker: its save was interrupted"
    try:
        files = json.loads(marker.read_bytes())["files"]
    except (ValueError, KeyError, TypeError):
        return "its COMPLETE marker is damaged"
    for name, wanted in files.items():
        path = directory / name
        if not path.is_file() or path.stat().st_size != wanted["bytes"] or sha256_of(path) != wanted["sha256"]:
            return f"{name} is missing, or not as it was written"
    return None


def newest_good(root: Path) -> tuple[Path | None, list[str]]:
    """(newest usable checkpoint or None, why each newer one was passed over)."""
    skipped = []
    for directory in reversed(checkpoints(root)):
        reason = problem(directory)
        if reason is None:
            return directory, skipped
        skipped.append(f"{directory.name}: {reason}")
    return None, skipped


def note_of(directory: Path) -> dict[str, Any]:
    """The note given to `commit`, without the file list."""
    values = json.loads((directory / MARKER).read_text(encoding="utf-8"))
    return {key: value for key, value in values.items() if key != "files"}


def refuse_other_tensors(model: Any, load_result: Any) -> None:
    """Raises ValueError where a checkpoint has other tensors than the model: they would keep their first values."""
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    missing = set(load_result.missing_keys)
    loaded = {tensor.data_ptr() for name, tensor in tensors.items() if name not in missing}
    lost = [name for name in missing if name in tensors and tensors[name].data_ptr() not in loaded]  # but tied ones
    if wrong := sorted({*lost, *load_result.unexpected_keys}):
        raise ValueError(
            f"the checkpoint has other tensors than the model ({wrong[0]}, {len(wrong)} in all), as an earlier "
            "version or another transformers wrote it: delete the stage's checkpoints to train it again"
        )


def rotate(root: Path, keep: int) -> None:
    """Deletes all but the newest `keep` complete checkpoints, and interrupted ones older than the newest complete.

    The marker goes first, so that a kill in the middle leaves an incomplete checkpoint and not a damaged one.
    """
    every = checkpoints(root)
    complete = [path for path in every if (path / MARKER).is_file()]
    for path in every[: every.index(complete[-1])] if complete else ():
        if path not in complete[-keep:]:
            discard(path)


def discard(directory: Path) -> None:
    """Deletes a checkpoint, marker first."""
    (directory / MARKER).unlink(missing_ok=True)
    shutil.rmtree(directory)


@contextlib.contextmanager
def saving(directory: Path, root: Path) -> Iterator[None]:
    """Turns the error of a failed save into a ValueError that names the checkpoint still complete below `root`."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        stands, _ = newest_good(root)
        raise ValueError(
            f"could not write {directory}: {error} ({size(shutil.disk_usage(root).free)} free there). "
            + (f"{stands} is complete: " if stands else "There is no earlier checkpoint: ")
            + "free some disk space or repair the directory, and run the same command again"
        ) from error
