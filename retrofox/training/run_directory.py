"""A run and its OUTPUT, which belongs to one recipe: the same recipe resumes there, another is refused."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import filelock
import yaml

from retrofox.config import ROLES, Recipe, Stage, dump, load_recipe
from retrofox.data.pack import PACKING
from retrofox.data.sampler import ORDERING
from retrofox.data.shards import Manifest
from retrofox.loading.atomic_directory import model_around
from retrofox.planning.steps import accumulation, count_steps, readers_of, stage_rows, tokens_per_step
from retrofox.support.files import write_json, write_whole
from retrofox.support.interruptions import Interruptions
from retrofox.support.report import environment
from retrofox.training import checkpoint
from retrofox.version import __version__

WRITTEN = ("data.json", "log.jsonl", "recipe.yaml")
"""Names of files that runs and token shards write, which a glob may match."""
FREE_TO_CHANGE = ("output", "checkpoint", "log", "parallel", "dataloader_workers", "deterministic")
FREE_IN_STAGE = (
    *("micro_batch", "gradient_checkpointing", "cross_entropy", "spike_factor"),
    *("tiled_mlp", "offload_activations"),
)
FREE_UNTIL_DONE = ("learning_rate", "rates", "warmup_tokens", "clip")
"""Keys that may change in a stage that is not complete: a diverged run resumes with lower rates. Their zeros stay."""


@dataclass
class Run:
    """A run under way, with the parts that its stages share.

    Attributes:
        batch_tokens: tokens per optimizer step on all devices together, of each stage.
        interruptions: where signals are noted during a stage's loop, which stops for them after a save.
        source: the checkpoint that training starts from.
    """

    recipe: Recipe
    out: Path
    batch_tokens: list[int]
    interruptions: Interruptions
    source: Path = Path()
    tokens: Any = None
    tokenizer: Any = None
    state: Any = None

    def steps(self, number: int) -> int:
        """Optimizer steps of a stage."""
        return count_steps(self.recipe.stages[number], self.batch_tokens[number])

    def rows(self, number: int) -> range:
        """Global rows that a stage reads: it goes on where earlier stages of its length ended."""
        return stage_rows(self.recipe.stages, self.batch_tokens, number)

    def folder(self, number: int) -> Path:
        """Where a stage keeps its checkpoints."""
        return stage_folder(self.out, number, self.recipe.stages[number].objective)

    def before(self, number: int) -> Path:
        """The model a stage starts from."""
        return self.folder(number - 1) / "model" if number else self.source


@contextlib.contextmanager
def output_lock(out: Path) -> Iterator[None]:
    """Holds OUTPUT inside a `with` block, or until the process ends; ValueError where another run has it."""
    made = [folder for folder in (out, *out.parents) if not folder.exists()]
    out.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(out / ".lock", timeout=1)  # a run that was just killed gives its lock back by then
    try:
        lock.acquire()
    except filelock.Timeout:
        raise ValueError(f"{out} is in use by another run: wait for it, stop it, or choose another `output`") from None
    except (NotImplementedError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            raise OSError(f"{lock.lock_file}: {error.strerror}; another user's run? Choose another `output`") from None
        print(f"{out} is on a file system without locks: start no second run there", file=sys.stderr)
    try:
        yield
    finally:
        if lock.is_locked:
            Path(lock.lock_file).unlink(missing_ok=True)  # while it is locked: who waits for it makes another
            lock.release()
        with contextlib.suppress(OSError):  # a run that began has files there, one that was refused has not
            for folder in made:
                folder.rmdir()


def claim_output(out: Path, recipe: Recipe, state: Any) -> list[int]:
    """Makes OUTPUT this recipe's, or finds that it is; returns tokens per optimizer step of each stage.

    The run resumes with OUTPUT/recipe.yaml. A run that left nothing to resume (refused for a misspelt
    path or pattern, say) leaves OUTPUT to the next.

    Raises:
        ValueError: OUTPUT holds another run; batch_tokens don't divide among the devices.
    """
    readers = readers_of(recipe.parallel, state.num_processes)
    before = batches_of(out, recipe)
    batches = before or [tokens_per_step(stage, readers) for stage in recipe.stages]
    for stage, batch_tokens in zip(recipe.stages, batches, strict=True):
        accumulation(stage, batch_tokens, readers)
    state.wait_for_everyone()
    if state.is_main_process:
        if before is None:
            _discard_conversion(out, recipe)
            (out / "data.json").unlink(missing_ok=True)
        values = {"retrofox": __version__, "batch_tokens": batches, "recipe": yaml.safe_load(dump(recipe))}
        write_whole(out / "recipe.yaml", yaml.safe_dump(values, sort_keys=False).encode())
    state.wait_for_everyone()
    return batches


def stage_folder(out: Path, number: int, objective: str) -> Path:
    """Where a stage keeps its checkpoints and, unless it is the last, its model."""
    return out / f"stage-{number}-{objective}"


def batches_of(out: Path, recipe: Recipe) -> list[int] | None:
    """Tokens per optimizer step of each stage of the run begun in OUTPUT, or None; ValueError for another's run."""
    if (out / "config.json").is_file():
        raise ValueError(f"{out} is a model's directory, and a run needs one of its own: choose another `output`")
    file = out / "recipe.yaml"
    made = (out / "model", *out.glob("stage-*/checkpoint-*"), *out.glob("stage-*/model"))
    if not file.is_file() or not any(path.exists() for path in made):
        return None
    changed = _changes(load_recipe(file), recipe, complete_stages(out, recipe.stages))
    if changed:
        raise ValueError(
            f"{out} holds another run: {', '.join(changed)} differ{'s' * (len(changed) == 1)} from {file}. "
            "Choose another `output`, or delete it"
        )
    return yaml.safe_load(file.read_text(encoding="utf-8"))["batch_tokens"]


def refuse_mingling(out: Path, base: str, texts: Sequence[str] = ()) -> None:
    """Raises ValueError where a run of `base` would write over, or into, files that it did not write, or its texts."""
    model, run = Path(base).resolve(), out.resolve()
    ours = (out / "recipe.yaml").exists() or (out / "data.json").exists()
    clash = None
    if model.exists() and (model.is_relative_to(run / "model") or model.is_relative_to(run / "converted")):
        clash = f"holds {base}, the model to train, and the run would write over it"
    elif (around := model_around(run.parent)) is not None:
        clash = f"lies inside the model {around}"
    elif not ours and ((out / "model").exists() or (out / "converted").exists()):
        clash = "has a model, and not of a run (move it away)"
    if clash is not None:
        raise ValueError(f"output {out} {clash}: choose another `output`")
    refuse_among(out, texts, "output")


def refuse_among(folder: Path, texts: Sequence[str], key: str) -> None:
    """Raises ValueError where a directory of texts, or a glob with **, would read what is written into `folder`.

    Neither reads hidden folders, a directory none whose name begins with _ either.
    """
    for text in texts:
        place, every, _ = text.partition("**")
        within, written = Path(place).expanduser().resolve(), folder.resolve()
        whole = any(fnmatch(name, Path(text).name) for name in WRITTEN) if every else within.is_dir()
        below = written.parts[len(within.parts) :]
        if whole and written.is_relative_to(within) and not any(x.startswith((".", every or "_")) for x in below):
            raise ValueError(
                f"{key} {folder} lies inside {text}, whose files are all read as texts, and those written there would "
                f"be too: choose another `{key}`"
            )


def _discard_conversion(out: Path, recipe: Recipe) -> None:
    """Deletes OUTPUT/converted where a run that never began had it made of another model, or in another way."""
    file = out / "recipe.yaml"
    if not file.is_file() or not (out / "converted").is_dir():
        return
    before = load_recipe(file)
    measured = recipe.fox is not None and recipe.fox.init == "measured"
    if any(getattr(before, key) != getattr(recipe, key) for key in ("model", "fox", *(["data"] if measured else []))):
        shutil.rmtree(out / "converted")


def complete_stages(out: Path, stages: Sequence[Stage]) -> int:
    """How many of these stages are done in OUTPUT."""
    if (out / "model" / checkpoint.MARKER).is_file():
        return len(stages)
    folders = [stage_folder(out, number, stage.objective) for number, stage in enumerate(stages)]
    return sum((folder / "model" / checkpoint.MARKER).is_file() for folder in folders)


def _changes(before: Recipe, now: Recipe, complete: int) -> list[str]:
    """Changed keys that a resumed run may not change; the first `complete` stages are done."""
    old, new = _compared(before), _compared(now)
    found: list[str] = []
    for key in (key for key in new if key != "stages" and old[key] != new[key]):
        then, today = old[key], new[key]
        names = {**then, **today} if isinstance(then, dict) and isinstance(today, dict) else ()
        found += [f"{key}.{name}" for name in names if then.get(name) != today.get(name)] or [key]
    if len(old["stages"]) != len(new["stages"]):
        return [*found, "stages"]
    for number, (then, today) in enumerate(zip(old["stages"], new["stages"], strict=True)):
        free = FREE_IN_STAGE if number < complete else FREE_IN_STAGE + FREE_UNTIL_DONE
        found += [f"stages.{number}.{key}" for key in today if key not in free and then.get(key) != today[key]]
        if number >= complete and any((then["rates"][role] > 0) != (today["rates"][role] > 0) for role in ROLES):
            found.append(f"stages.{number}.rates (which of them are 0)")
    return found


def _compared(recipe: Recipe) -> dict[str, Any]:
    """The values of a recipe that a resumed run may not change, and its stages; defaults filled in."""
    values = recipe.model_dump(exclude={**dict.fromkeys(FREE_TO_CHANGE, True), "data": {"cache"}})
    if values["fox"] is not None:
        values["fox"].pop("preset")  # the fields that it stands for are compared
    return values


def claim_data(file: Path, train: Manifest, held_out: Manifest | None = None) -> None:
    """Records in a run's folder which tokens it uses in which order, and from then on refuses any others.

    Raises:
        ValueError: a source, the tokenizer, or how windows are made of tokens is not what it was when the run began.
    """
    parts = [part for part in (train, held_out) if part is not None]
    sources = [[source.path, source.fingerprint] for part in parts for source in part.sources]
    now = {"tokenizer": train.tokenizer, "windows": [PACKING, ORDERING], "sources": sources}
    if not file.is_file():
        write_whole(file, json.dumps(now, indent=1).encode() + b"\n")
        return
    kept = json.loads(file.read_text(encoding="utf-8"))
    changed = [] if kept["tokenizer"] == now["tokenizer"] else ["the tokenizer"]
    if kept.get("windows", [2, 2]) != now["windows"]:  # earlier runs have the second versions, and don't say so
        changed.append("how this version of retrofox packs and orders them")
    # Of tokens, source by source: files and cache may lie elsewhere now.
    changed += [path for (path, found), (_, before) in zip(sources, kept["sources"], strict=False) if found != before]
    if changed or len(kept["sources"]) != len(sources):
        raise ValueError(
            f"the data under this run changed: {', '.join(changed) or 'the list of sources'}. Restore it, or choose "
            "another `output`"
        )


def write_result(out: Path, reports: list[dict[str, Any]], seconds: float, state: Any) -> dict[str, Any]:
    """Writes result.json: stages, losses, command, versions, hardware."""
    result = {
        "output": str(out),
        "model": str(out / "model"),
        "stages": reports,
        "seconds": seconds,
        "version": __version__,
        "environment": environment(),
    }
    if state.is_main_process:
        write_json(out / "result.json", result)
    state.wait_for_everyone()
    return result
