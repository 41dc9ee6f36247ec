"""`retrofox teacher`: runs the original once over the windows that distill stages will read, and writes its logits."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from safetensors import SafetensorError

from retrofox.config import Recipe, Stage
from retrofox.data.files import sweep
from retrofox.data.packed import PackedDataset, collate
from retrofox.data.shards import Manifest
from retrofox.loading.tokenizers import recipe_tokenizer
from retrofox.parallel.settings import readers_of
from retrofox.parallel.watch import Watch
from retrofox.support.counts import size
from retrofox.support.files import nearest_existing, why_unwritable
from retrofox.support.interruptions import Interruptions
from retrofox.support.report import environment, progress_bar
from retrofox.training.data import prepare_tokens
from retrofox.training.groups import stage_rows, tokens_per_step
from retrofox.training.lock import OutputLock
from retrofox.training.offline.codec import id_type, pack
from retrofox.training.offline.record import Record, claim
from retrofox.training.offline.run import Original
from retrofox.training.offline.shards import read_shard, shard_file, write_shard
from retrofox.training.refusals import refused_data
from retrofox.training.speed import repeatable
from retrofox.training.train import PATIENCE

SHARD_TOKENS = 1 << 17
"""Tokens of a shard, the unit of resuming: 21 MB with k = 64; a GPU writes one in a second, a CPU core in minutes."""
ENTRY_BYTES = 2.6
"""Bytes of one of the k, packed, with 16-bit ids, at k = 64 (docs/teacher.md): for the estimate."""
STANDS = "whole shards are kept; run the same command again to resume"


def write_teacher(
    recipe: Recipe, stage: int | None = None, top_k: int = 64, out: Path | None = None
) -> dict[str, dict[str, Any]]:
    """Writes the k largest log-probabilities of the original, and the rest's mass, for a recipe's distill stages.

    Of every position of exactly the windows that the stages will read. Run again after any interruption, it goes on
    behind the last whole shard, whose bytes do not depend on it; several processes share the shards.

    Args:
        stage: number of a distill stage, from 0; None = all of them.
        top_k: tokens kept at each position.
        out: directory to write; None = each stage's own `teacher_logits`.

    Returns:
        Per directory: windows, tokens, shards, bytes, bytes_per_token, rest (mean mass outside the k), and of the call
        that wrote the last of it tokens_per_second, command and versions.

    Raises:
        ValueError: no distill stage, no directory, one that holds something else, stages that differ where they share
            one, a k beyond the vocabulary, data that can't be read, a full disk.
        ProcessLost: another process of the run ended (the rest leave with SystemExit 1).
        SystemExit: 130 after Ctrl-C, 143 after SIGTERM, whole shards kept.
    """
    state: Any = PartialState(cpu=not torch.cuda.is_available(), timeout=PATIENCE)
    interruptions = Interruptions("whole shards are kept", quiet=not state.is_main_process)
    watch = Watch(lambda: STANDS) if state.num_processes > 1 else contextlib.nullcontext()
    with interruptions, repeatable(recipe.deterministic), watch:
        folders = _folders(recipe, stage, out)
        original = Original.of(recipe)
        if not 1 <= top_k <= original.vocabulary:
            raise ValueError(f"--top-k must be from 1 to the vocabulary, {original.vocabulary}; got {top_k}")
        for refusal in refused_data(recipe, original.vocabulary):
            raise refusal
        manifest = prepare_tokens(recipe, recipe_tokenizer(recipe), state).train
        return {
            str(folder): _write(Job(recipe, numbers, folder, top_k, original, manifest, state))
            for folder, numbers in folders.items()
        }


def _folders(recipe: Recipe, stage: int | None, out: Path | None) -> dict[Path, list[int]]:
    """Which stages' logits go into which directory; raises ValueError where that can't be."""
    objectives = ", ".join(s.objective for s in recipe.stages)
    if recipe.stages[0].objective == "adapt":
        raise ValueError(
            "this recipe's teacher is the original as its adapt stage leaves it, which is not made yet: leave "
            "teacher_logits out, and `train` runs it beside the model"
        )
    distill = [number for number, s in enumerate(recipe.stages) if s.objective == "distill"]
    if not distill:
        raise ValueError(f"no stage of this recipe distills (its stages: {objectives}): there is nothing to write")
    if stage is not None and stage not in distill:
        raise ValueError(f"--stage {stage} is no distill stage: they are {', '.join(map(str, distill))}, from 0")
    folders: dict[Path, list[int]] = {}
    for number in distill if stage is None else [stage]:
        folder = out or recipe.stages[number].teacher_logits
        if folder is None:
            raise ValueError(
                f"stage {number} names no directory: give stages.{number}.teacher_logits=DIR, which train reads, too, "
                "or --out DIR"
            )
        folders.setdefault(Path(folder), []).append(number)
    for folder, numbers in folders.items():
        place = nearest_existing(folder)
        reason = why_unwritable(place) if place.is_dir() else "a file"
        if reason is not None:
            raise ValueError(f"can't write to {folder}, {place}: {reason}; choose another --out, or teacher_logits")
        for key in ("sequence_length", "temperature"):
            values = {getattr(recipe.stages[number], key) for number in numbers}
            if len(values) > 1:
                raise ValueError(
                    f"stages {', '.join(map(str, numbers))} differ in {key} ({', '.join(map(str, sorted(values)))}) "
                    f"and can't share {folder}: give each its own directory; --stage N writes one"
                )
    return folders


@dataclass
class Job:
    """One directory to write: the stages it is for, and all it takes."""

    recipe: Recipe
    numbers: list[int]
    folder: Path
    top_k: int
    original: Original
    manifest: Manifest
    state: Any
    dataset: PackedDataset = field(init=False)
    record: Record = field(init=False)

    def __post_init__(self) -> None:
        stage, recipe = self.stage, self.recipe
        self.dataset = PackedDataset(self.manifest, stage.sequence_length, seed=recipe.seed)
        self.record = Record(
            model=self.original.source,
            revision=self.original.revision,
            fingerprint=self.original.fingerprint,
            precision=recipe.precision,
            tokenizer=self.manifest.tokenizer,
            data=self.dataset.fingerprint,
            seed=recipe.seed,
            sequence_length=stage.sequence_length,
            temperature=stage.temperature or 1.0,
            top_k=self.top_k,
            vocabulary=self.original.vocabulary,
            shard_windows=max(1, SHARD_TOKENS // stage.sequence_length),
        )

    @property
    def stage(self) -> Stage:
        """The first of the stages, which agree in all that is used here."""
        return self.recipe.stages[self.numbers[0]]

    def shards(self) -> list[np.ndarray]:
        """Numbers of the packed windows, each once, in the order in which the stages first read them, by shard."""
        readers = readers_of(self.recipe, self.state.num_processes)
        batch_tokens = [tokens_per_step(stage, readers) for stage in self.recipe.stages]
        rows = np.concatenate([stage_rows(self.recipe, batch_tokens, number) for number in self.numbers])
        windows = self.dataset.order.take(rows)
        windows = windows[np.sort(np.unique(windows, return_index=True)[1])]
        return np.split(windows, range(self.record.shard_windows, len(windows), self.record.shard_windows))

    def has(self, number: int, windows: np.ndarray) -> bool:
        """Whether a shard is there with these windows first; a longer run's last one may have more."""
        shard = read_shard(shard_file(self.folder, number))
        return shard is not None and np.array_equal(shard.windows[: len(windows)], windows)

    def say(self, text: str) -> None:
        """Prints on the main process."""
        if self.state.is_main_process:
            print(text, file=sys.stderr, flush=True)


def _write(job: Job) -> dict[str, Any]:
    claim(job.folder, job.record)
    state = job.state
    with OutputLock(job.folder) if state.is_main_process else contextlib.nullcontext():
        if state.is_main_process:
            sweep(job.folder)
        shards = job.shards()
        missing = [number for number, windows in enumerate(shards) if not job.has(number, windows)]
        state.wait_for_everyone()  # before any of them is written
        tokens = job.record.sequence_length * sum(len(shards[number]) for number in missing)
        entry = ENTRY_BYTES + id_type(job.record.vocabulary).itemsize - 2
        job.say(
            f"{len(shards) - len(missing)} of {len(shards)} shards are in {job.folder}"
            + (f"; {tokens:,} tokens to write, about {size(tokens * job.top_k * entry)}" if missing else "")
        )
        started = time.perf_counter()
        if missing:
            if state.is_main_process:
                with _disk_errors(job.folder):
                    job.record.save(job.folder)
            mine = missing[state.process_index :: state.num_processes]
            _write_shards(job, {number: shards[number] for number in mine})
        state.wait_for_everyone()
        report = _report(job, len(shards), tokens, time.perf_counter() - started)
    state.wait_for_everyone()
    return report


def _write_shards(job: Job, shards: dict[int, np.ndarray]) -> None:
    """Writes this process's share; windows are compressed in threads, beside the model's next pass."""
    length, rows = job.record.sequence_length, job.stage.micro_batch
    model = job.original.load(job.recipe, job.state.device)
    bar = progress_bar("tokens", job.state.is_main_process)
    with bar, ThreadPoolExecutor() as pool:
        task = bar.add_task("teacher", total=length * sum(map(len, shards.values())))
        for number, windows in shards.items():
            packed: list[Future[bytes]] = []
            left: list[float] = []
            for start in range(0, len(windows), rows):
                batch = collate([job.dataset[int(window)] for window in windows[start : start + rows]])
                ids, codes, rest = model.distributions(batch, job.top_k, job.record.temperature)
                left += rest.tolist()
                packed += [pool.submit(pack, *window) for window in zip(ids, codes, strict=True)]
                bar.advance(task, len(batch["input_ids"]) * length)
            blobs = [part.result() for part in packed]
            with _disk_errors(job.folder):
                write_shard(shard_file(job.folder, number), windows, blobs, left)


def _report(job: Job, count: int, tokens: int, seconds: float) -> dict[str, Any]:
    """What the directory takes, kept in teacher.json."""
    written = [shard for n in range(count) if (shard := read_shard(shard_file(job.folder, n))) is not None]
    windows = sum(len(shard.windows) for shard in written)
    bytes_ = sum(shard.bytes for shard in written)
    report = {
        "windows": windows,
        "tokens": windows * job.record.sequence_length,
        "shards": len(written),
        "bytes": bytes_,
        "bytes_per_token": bytes_ / (windows * job.record.sequence_length),
        "rest": float(np.concatenate([shard.rest for shard in written]).mean(dtype=np.float64)),
        "tokens_per_second": tokens / seconds if tokens else None,
        "environment": environment(),
    }
    if job.state.is_main_process and tokens:
        with _disk_errors(job.folder):
            job.record.save(job.folder, report)
    return report


@contextlib.contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Turns the error of a failed write into one line; whole shards stay."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"teacher logits can't be written to {folder}: {reason}. Free space there and run it "
            "again: whole shards are kept"
        ) from error
