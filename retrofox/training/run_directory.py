"""OUTPUT belongs to one recipe: the run begun there is resumed, or refused where it is another recipe's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import yaml

from retrofox.config import ROLES, Recipe, dump, load_recipe, validate
from retrofox.data.shards import Manifest
from retrofox.parallel.settings import readers_of
from retrofox.planning.steps import accumulation, tokens_per_step
from retrofox.support.files import write_json, write_whole
from retrofox.support.report import environment
from retrofox.training import checkpoint
from retrofox.version import __version__

FREE_TO_CHANGE = ("output", "checkpoint", "log", "parallel", "dataloader_workers", "deterministic")
FREE_IN_DATA = ("cache",)
FREE_IN_STAGE = (
    *("micro_batch", "compile", "gradient_checkpointing", "cross_entropy", "spike_factor"),
    *("tiled_mlp", "offload_activations", "offload_optimizer"),
)
FREE_UNTIL_DONE = ("learning_rate", "rates", "warmup_tokens", "clip")
"""What may change in a stage that is not complete: a run that diverged goes on with lower rates. Their zeros stay."""


def claim_output(out: Path, recipe: Recipe, state: Any) -> list[int]:
    """Makes OUTPUT this recipe's, or finds that it is; returns tokens per optimizer step of each stage.

    The run resumes with OUTPUT/recipe.yaml. A run that left nothing to resume (refused for a misspelt
    path or pattern, say) leaves OUTPUT to the next.

    Raises:
        ValueError: OUTPUT holds another run or can't be written to; batch_tokens don't divide among the devices.
    """
    file, readers = out / "recipe.yaml", readers_of(recipe.parallel, state.num_processes)
    begun, batches = batches_of(out, recipe) is not None, step_tokens(out, recipe, state)
    if not begun:
        checkpoint.check_writable(out, 0)
    for stage, batch_tokens in zip(recipe.stages, batches, strict=True):
        try:
            accumulation(stage, batch_tokens, readers)
        except ValueError as error:
            if not begun:
                raise
            raise ValueError(f"{error} (the run in {out} began with {batch_tokens} tokens a step)") from None
    state.wait_for_everyone()
    if state.is_main_process:
        if not begun:
            _discard_conversion(out, recipe)
            (out / "data.json").unlink(missing_ok=True)
        values = {"retrofox": __version__, "batch_tokens": batches, "recipe": yaml.safe_load(dump(recipe))}
        write_whole(file, yaml.safe_dump(values, sort_keys=False).encode())
    state.wait_for_everyone()
    return batches


def step_tokens(out: Path, recipe: Recipe, state: Any) -> list[int]:
    """Tokens per optimizer step of each stage: as the run in OUTPUT began, else as it would begin now."""
    readers = readers_of(recipe.parallel, state.num_processes)
    return batches_of(out, recipe) or [tokens_per_step(stage, readers) for stage in recipe.stages]


def stage_folder(out: Path, recipe: Recipe, number: int) -> Path:
    """Where a stage keeps its checkpoints and, unless it is the last, its model."""
    return out / f"stage-{number}-{recipe.stages[number].objective}"


def batches_of(out: Path, recipe: Recipe) -> list[int] | None:
    """Tokens per optimizer step of each stage of the run begun in OUTPUT; None where none was.

    Raises:
        ValueError: it is another recipe's run, or OUTPUT/recipe.yaml is damaged.
    """
    file = out / "recipe.yaml"
    if not file.is_file():
        return None
    try:
        kept = yaml.safe_load(file.read_text(encoding="utf-8"))
        begun_with = validate(kept["recipe"])
        batches = [int(tokens) for tokens in kept["batch_tokens"]]
    except (yaml.YAMLError, ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{file} is damaged: delete it to continue with the recipe given, or choose another `output` ({error})"
        ) from error
    if not any(
        path.exists() for path in (out / "model", *out.glob("stage-*/checkpoint-*"), *out.glob("stage-*/model"))
    ):
        return None
    changed = _changes(begun_with, recipe, complete_stages(out, recipe))
    if changed:
        raise ValueError(
            f"{out} holds another run: {', '.join(changed)} differ from {file}. Choose another `output`, or delete it"
        )
    return batches


def refuse_mingling(recipe: Recipe) -> None:
    """Raises where a run would write over, or into, files that it did not write; writes nothing itself.

    Raises:
        ValueError: the model lies where OUTPUT's own models go, or OUTPUT inside it; OUTPUT has models of no run.
    """
    out = Path(recipe.output)
    model, run = Path(recipe.model).resolve(), out.resolve()
    if model.exists() and (model.is_relative_to(run / "model") or model.is_relative_to(run / "converted")):
        raise ValueError(
            f"the run would write over its own model, {recipe.model}: choose an `output` that is not {out}"
        )
    if model.is_dir() and run.is_relative_to(model):
        raise ValueError(f"output {out} lies inside the model, {recipe.model}: choose another `output`")
    ours = (out / "recipe.yaml").exists() or (out / "data.json").exists()
    theirs = [out / name for name in ("model", "converted") if (out / name).exists()]
    if theirs and not ours:
        raise ValueError(f"{theirs[0]} is there, and not of a run: move it away, or choose another `output`")


def unmark_damaged(out: Path, recipe: Recipe, state: Any) -> list[str]:
    """Takes COMPLETE from finished models whose files are not as written, the last first, up to one that is whole.

    Returns:
        Which, and why. The run then writes them anew from their stages' last checkpoints.
    """
    places = [stage_folder(out, recipe, number) / "model" for number in range(len(recipe.stages) - 1)] + [out / "model"]
    found = []
    if state.is_main_process:
        for place in reversed([place for place in places if (place / checkpoint.MARKER).is_file()]):
            reason = checkpoint.problem(place)
            if reason is None:
                break
            (place / checkpoint.MARKER).unlink()
            found.append(f"{place}: {reason}: it is written anew")
    state.wait_for_everyone()
    return found


def _discard_conversion(out: Path, recipe: Recipe) -> None:
    """Deletes OUTPUT/converted where a run that never began had it made of another model, or in another way."""
    file = out / "recipe.yaml"
    if not file.is_file() or not (out / "converted").is_dir():
        return
    before = load_recipe(file)
    measured = recipe.fox is not None and recipe.fox.init == "measured"
    if any(getattr(before, key) != getattr(recipe, key) for key in ("model", "fox", *(["data"] if measured else []))):
        shutil.rmtree(out / "converted")


def complete_stages(out: Path, recipe: Recipe) -> int:
    """How many stages of the run in OUTPUT are done."""
    if (out / "model" / checkpoint.MARKER).is_file():
        return len(recipe.stages)
    folders = [stage_folder(out, recipe, number) for number in range(len(recipe.stages))]
    return sum((folder / "model" / checkpoint.MARKER).is_file() for folder in folders)


def _changes(before: Recipe, now: Recipe, complete: int) -> list[str]:
    """Keys whose change would make a resumed run another run; the first `complete` stages are done."""
    old, new = _compared(before), _compared(now)
    found = [key for key in new if key != "stages" and old[key] != new[key]]
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
    values = recipe.model_dump(exclude={*FREE_TO_CHANGE})
    for key in FREE_IN_DATA:
        del values["data"][key]
    if values["fox"] is not None:
        values["fox"].pop("preset")  # the fields that it stands for are compared
    return values


def claim_data(file: Path, train: Manifest, held_out: Manifest | None = None) -> None:
    """Records in a run's folder which tokens it uses, and from then on refuses any others, whatever stage it is at.

    Raises:
        ValueError: a source or the tokenizer is not what it was when the run began.
    """
    now = {
        "tokenizer": train.tokenizer,
        "sources": [[s.path, s.fingerprint] for part in (train, held_out) if part for s in part.sources],
    }
    if not file.is_file():
        write_whole(file, json.dumps(now, indent=1).encode() + b"\n")
        return
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
        before, sources = kept["tokenizer"], [tuple(pair) for pair in kept["sources"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{file} is damaged ({error}): delete it if the data did not change since the run began"
        ) from error
    changed = [] if before == now["tokenizer"] else ["the tokenizer"]
    changed += [path for path, fingerprint in now["sources"] if (path, fingerprint) not in sources]
    if changed or len(sources) != len(now["sources"]):
        raise ValueError(
            f"the data under this run changed: {', '.join(changed) or 'the list of sources'}. Restore it, or choose "
            "another `output`"
        )


def complete_result(out: Path, recipe: Recipe, state: Any) -> dict[str, Any]:
    """The result of a run that has nothing left to do."""
    if (out / "result.json").is_file():
        return json.loads((out / "result.json").read_text(encoding="utf-8"))
    # killed between the two
    folders = [*(stage_folder(out, recipe, number) for number in range(len(recipe.stages) - 1)), out]
    reports = [checkpoint.note_of(folder / "model")["report"] for folder in folders]
    return write_result(out, reports, sum(report["seconds"] for report in reports), state)


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
