"""Writing a converted checkpoint: weights linked or copied, new tensors in one new shard, all of it or nothing."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from retrofox.calibration.calibrate import apply_to, calibrate
from retrofox.calibration.steps import STEPS
from retrofox.calibration.windows import Text, require_sources
from retrofox.conversion.card import card
from retrofox.conversion.directory import Gains, write_directory
from retrofox.conversion.licence import licence_of
from retrofox.conversion.norm_gains import gains_of, has_norms, set_gains
from retrofox.conversion.tensors import check_weights
from retrofox.conversion.verify import prove
from retrofox.fox_spec import FoxSpec
from retrofox.loading import shards
from retrofox.loading.atomic_directory import AtomicDirectory, Progress, refuse_existing, refuse_full_disk
from retrofox.loading.base import load_base
from retrofox.loading.configs import any_config, base_config
from retrofox.loading.source import check_live, check_out, fetch, recorded
from retrofox.loading.tokenizers import refuse_damaged_tokenizer, tokenizer_of_live
from retrofox.support.files import new_file_mode
from retrofox.support.memory import peak_bytes
from retrofox.surgery import Plan, apply, make_plan, starting_half_lives
from retrofox.version import __version__

if TYPE_CHECKING:
    from retrofox.calibration.calibrate import Calibration


def plan_for(source: str | Path | PreTrainedModel, spec: FoxSpec, revision: str | None = None) -> Plan:
    """The plan of a conversion, without reading a weight. Errors as in `retrofox.convert`."""
    if isinstance(source, PreTrainedModel):
        check_live(source)
        return make_plan(source.config, spec, base=recorded(source.config._name_or_path) or None)
    if revision is not None and Path(source).exists():
        raise ValueError(f"revision {revision!r} belongs to a Hub id, and {source} is a local path: drop one of them")
    if str(source).endswith(".gguf"):
        return make_plan(any_config(source), spec, base=recorded(source))
    return make_plan(base_config(source, revision), spec, base=recorded(source), revision=revision)


def preview(
    source: str | Path,
    out: Path,
    spec: FoxSpec,
    *,
    link: bool = False,
    revision: str | None = None,
    calibrate: Sequence[Text] = (),
    choose_pairs: bool = True,
) -> tuple[Plan, dict[str, Any]]:
    """The plan of a conversion, and the same as JSON values with the bytes that would be written.

    Nothing is written and no weight is read; of a local directory the weight files' headers are, and whatever would be
    refused is refused. Of a Hub id only config.json is fetched.
    """
    check_out(source, out)
    _check_options(source, spec, link, calibrate)
    plan = plan_for(source, spec, revision)
    values: dict[str, Any] = plan.to_dict()
    chooses = choose_pairs and spec.rope == "partial" and not spec.layer_pairs
    values["pairs_to_be_chosen"] = bool(calibrate) and chooses
    if Path(source).is_dir():
        refuse_damaged_tokenizer(source)
        found = shards.find(Path(source))
        if not found.pickled:
            check_weights(Path(source), found.tensors, plan)
        if not link:
            refuse_full_disk(out, found.bytes)
        values |= {"weight_files": len(found.files), "weight_bytes": found.bytes, "weights_linked": link}
    return plan, values


def _check_options(source: str | Path | PreTrainedModel, spec: FoxSpec, link: bool, calibrate: Sequence[Text]) -> None:
    if spec.init == "calibrated" and not calibrate:
        raise ValueError("init 'calibrated' measures the base on text: name files with --calibrate FILES")
    require_sources(calibrate)
    if link and (isinstance(source, PreTrainedModel) or str(source).endswith(".gguf")):
        raise ValueError(
            "--link shares the weight files of a directory; a .gguf file or a live model has none: drop it"
        )


def write(
    source: str | Path | PreTrainedModel,
    out: Path,
    spec: FoxSpec,
    *,
    link: bool = False,
    verify: bool = True,
    revision: str | None = None,
    progress: Progress | None = None,
    calibrate: Sequence[Text] = (),
    calibrate_steps: int = STEPS,
    calibrate_length: int | None = None,
    refit_queries: bool = True,
    choose_pairs: bool = True,
) -> dict[str, Any]:
    """Converts `source` into the directory `out`, which appears whole or not at all; returns the report.

    A Hub id is fetched first: config.json, by which it may be refused, then the rest; everything after reads the copy.

    Args:
        calibrate: text files to fit gates (and queries) on, see `retrofox.calibrate`; the work is kept beside `out`
            while it lasts, so an interrupted conversion goes on where it stopped.
        calibrate_steps: Adam steps per layer; 0 takes only the half-lives of init="calibrated".
        calibrate_length: tokens of the windows to fit on; None = `retrofox.calibrate`'s own choice.
        refit_queries: whether calibration may rewrite the query projections.
        choose_pairs: whether it may choose which rotary pairs the layers of rope "partial" keep.

    Raises:
        ValueError: `out` exists, `source` can't be converted, the parity proof failed, or linking is impossible.
        FileNotFoundError: `source` is not there.
    """
    if isinstance(source, PreTrainedModel):
        refuse_existing(out)
    else:
        check_out(source, out)
    _check_options(source, spec, link, calibrate)
    started = time.perf_counter()
    job = _job(source, spec, link, revision, progress)
    plan = job.plan
    work = out.parent / f".{out.name}.calibration"
    with contextlib.ExitStack() as stack:
        stack.enter_context(_disk_of(out))
        directory = stack.enter_context(AtomicDirectory(out))
        partial = directory.partial
        options = {"steps": calibrate_steps, "length": calibrate_length, "refit_queries": refit_queries}
        options |= {"choose_pairs": choose_pairs, "out_dir": work}
        calibration, gains = _calibrated(job.place, plan, calibrate, options)
        if calibration is not None and calibration.layer_pairs:
            plan.spec.layer_pairs = calibration.layer_pairs
            plan.config.fox = plan.spec.to_dict()
        how = job.write(partial, calibration, gains)
        report: dict[str, Any] = {
            "retrofox": __version__,
            "plan": plan.to_dict(),
            "weights": how,
            "seconds": round(time.perf_counter() - started, 2),
            "peak_memory_mib": peak_bytes(torch.device("cpu")) >> 20,
            "parity": "skipped (--no-verify)",
        }
        if calibration is not None:
            report["calibration"] = {
                **calibration.report,
                "rewritten": calibration.rewritten(),
                "half_lives_tokens": _fitted_half_lives(calibration),
            }
            shutil.copytree(work, partial / "calibration", ignore=shutil.ignore_patterns("*.safetensors", "layers"))
        if verify:
            report["parity"] = prove(job.place, partial, refitted=calibration.rewritten() if calibration else ())
        (partial / "retrofox.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        (partial / "README.md").write_text(card(plan, report, licence_of(job.place)), encoding="utf-8")
        for file in partial.rglob("*"):
            if file.is_file() and not (link and file.stat().st_nlink > 1):
                file.chmod(new_file_mode())
        directory.commit()
    shutil.rmtree(work, ignore_errors=True)
    return report


@dataclass
class _Job:
    """One conversion: its plan, where its base is read from, and how it is written.

    Attributes:
        place: the live model, the .gguf file or the local directory, for calibration and the proof.
        write: writes it all but card and report, given the directory in the making and what calibration fitted; returns
            how the weights came there.
    """

    plan: Plan
    place: str | Path | PreTrainedModel
    write: Callable[[Path, Calibration | None, Gains], str]


def _job(
    source: str | Path | PreTrainedModel,
    spec: FoxSpec,
    link: bool,
    revision: str | None,
    progress: Progress | None = None,
) -> _Job:
    if isinstance(source, PreTrainedModel):
        return _from_memory(source, spec, revision)
    return (
        _from_gguf(source, spec, revision)
        if str(source).endswith(".gguf")
        else _from_disk(source, spec, link, revision, progress)
    )


def _from_memory(model: PreTrainedModel, spec: FoxSpec, revision: str | None) -> _Job:
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            f"this {type(model).__name__} holds no weights (they are on the meta device, or offloaded): load it whole, "
            "or convert the directory that it came from"
        )
    plan = plan_for(model, spec, revision)

    def save(partial: Path, calibration: Calibration | None, gains: Gains) -> str:
        _save(model, tokenizer_of_live(model), plan, partial, calibration, gains)
        return "saved from memory"

    return _Job(plan, model, save)


def _from_gguf(file: str | Path, spec: FoxSpec, revision: str | None) -> _Job:
    plan = plan_for(file, spec, revision)

    def save(partial: Path, calibration: Calibration | None, gains: Gains) -> str:
        _save(*load_base(file), plan, partial, calibration, gains)
        return "dequantised from GGUF"

    return _Job(plan, file, save)


def _from_disk(source: str | Path, spec: FoxSpec, link: bool, revision: str | None, progress: Progress | None) -> _Job:
    """A directory, or a Hub id: its config.json by which it may be refused first, then the rest."""
    plan = plan_for(source, spec, revision)
    directory, plan.spec.base_revision = fetch(source, revision)
    plan.config.fox["base_revision"] = plan.spec.base_revision
    refuse_damaged_tokenizer(directory)
    found = shards.find(directory)
    if not found.pickled:
        check_weights(directory, found.tensors, plan)

    def place(partial: Path, calibration: Calibration | None, gains: Gains) -> str:
        return write_directory(directory, found, plan, partial, link, calibration, gains, progress)

    return _Job(plan, directory, place)


@contextlib.contextmanager
def _disk_of(out: Path) -> Iterator[None]:
    """Turns the errors of a full disk, often without a file's name, into a ValueError about `out`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        if isinstance(error, OSError) and error.errno not in full:
            raise
        why = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f"{out} could not be written: {why}; nothing was left there: free some disk space or choose another disk"
        ) from error


def _calibrated(
    place: str | Path | PreTrainedModel, plan: Plan, files: Sequence[Text], options: dict[str, Any]
) -> tuple[Calibration | None, Gains]:
    """The outcome of `retrofox.calibrate` on `files` with its options, and of measuring the gains of norms on them."""
    if not files:
        return None, {}
    if not has_norms(plan):
        return calibrate(place, plan.spec, files, **options), {}
    # Norms come first: queries are fitted to their output. That takes the whole model at once.
    base, tokenizer = (place, None) if isinstance(place, PreTrainedModel) else load_base(place, dtype=torch.float32)
    model = apply(base, plan)
    set_gains(model, tokenizer, files if tokenizer is not None else ())
    return calibrate(model, None, files, tokenizer=tokenizer, **options), gains_of(model)


def _fitted_half_lives(calibration: Calibration) -> list[list[float]]:
    """Half-lives in tokens that the heads of each layer start with; no layers where there are no gates.

    As measured on held-out text where the gates' weights were fitted, else those that the biases say.
    """
    rows = calibration.report["layers"]
    if rows:
        return [row["half_life_after_by_head"] for row in rows if row["half_life_after_by_head"]]
    biases = [value for name, value in calibration.values.items() if name.endswith("forget_gate.bias")]
    return [starting_half_lives(bias.tolist()) for bias in biases]


def _save(
    base: PreTrainedModel,
    tokenizer: Any,
    plan: Plan,
    partial: Path,
    calibration: Calibration | None,
    gains: Gains,
) -> None:
    """Saves the converted form of a model in memory."""
    model = apply(base, plan)
    if calibration is not None:
        apply_to(model, calibration)
    if gains:
        model.load_state_dict(gains, strict=False)
    elif has_norms(plan):
        set_gains(model, tokenizer)
    model.save_pretrained(partial)
    if tokenizer is not None:
        tokenizer.save_pretrained(partial)
