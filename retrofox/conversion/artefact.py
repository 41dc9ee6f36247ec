"""Writing a converted checkpoint: weights linked or copied, new tensors in one new shard, all of it or nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from retrofox.conversion.card import card
from retrofox.conversion.directory import write_directory
from retrofox.conversion.licence import licence_of
from retrofox.conversion.measured import measured_values
from retrofox.conversion.own_gates import plan_of_own_gates, write_own_gates
from retrofox.conversion.tensors import check_weights
from retrofox.conversion.verify import prove
from retrofox.data.windows import require_files
from retrofox.families import OWN_GATES
from retrofox.fox_spec import FoxSpec
from retrofox.heads.texts import Text
from retrofox.loading import shards
from retrofox.loading.atomic_directory import AtomicDirectory, Progress, refuse_existing
from retrofox.loading.base import load_base
from retrofox.loading.configs import any_config, base_config
from retrofox.loading.source import check_live, check_out, fetch, read_config, recorded, refuse_adapter
from retrofox.loading.tokenizers import refuse_damaged_tokenizer, tokenizer_of_live
from retrofox.support.files import new_file_mode
from retrofox.support.memory import peak_bytes
from retrofox.surgery import Plan, apply, make_plan
from retrofox.version import __version__


def plan_for(source: str | Path | PreTrainedModel, spec: FoxSpec, revision: str | None = None) -> Plan:
    """The plan of a conversion, without reading a weight. Errors as in `retrofox.convert`."""
    live = isinstance(source, PreTrainedModel)
    if revision is not None and (live or Path(source).exists()):
        raise ValueError(f"revision {revision!r} belongs to a Hub id, and the model is live or a local path: drop it")
    if live:
        check_live(source)
        return make_plan(source.config, spec, base=recorded(source.config._name_or_path) or None)
    if str(source).endswith(".gguf"):
        return make_plan(any_config(source), spec, base=recorded(source))
    refuse_adapter(source)
    values = read_config(source, revision)
    if values.get("model_type") in OWN_GATES:
        return plan_of_own_gates(values, spec, recorded(source), revision)
    return make_plan(base_config(source, revision), spec, base=recorded(source), revision=revision)


def preview(
    source: str | Path,
    out: Path,
    spec: FoxSpec,
    *,
    link: bool = False,
    revision: str | None = None,
    texts: Sequence[Text] = (),
) -> tuple[Plan, dict[str, Any]]:
    """The plan of a conversion, and the same as JSON values with the bytes that would be written.

    Nothing is written and no weight is read; of a local directory the weight files' headers are, and whatever would be
    refused is refused. Of a Hub id only config.json is fetched.
    """
    check_out(source, out)
    check_options(spec, link, texts, _has_files(source))
    plan = plan_for(source, spec, revision)
    values: dict[str, Any] = plan.to_dict()
    if Path(source).is_dir() and plan.own_gates is None:
        refuse_damaged_tokenizer(source)
        found = shards.find(Path(source))
        if not found.pickled:
            check_weights(Path(source), found.tensors, plan)
        values |= {"weight_files": len(found.files), "weight_bytes": found.bytes, "weights_linked": link}
    return plan, values


def check_options(spec: FoxSpec, link: bool, texts: Sequence[Text], has_files: bool = True) -> None:
    """Raises ValueError for options that a conversion would ignore, FileNotFoundError for a text that is not there.

    Args:
        has_files: whether there are a directory's weight files to link, and OUT to link them into.
    """
    if (spec.init == "measured") != bool(texts):
        raise ValueError(
            f"init measured and texts to measure the heads on (--texts FILES) belong together; got init {spec.init} "
            f"and {len(texts)} texts"
        )
    require_files(texts)
    if link and not has_files:
        raise ValueError(
            "--link shares the weight files of a directory with OUT; without OUT, of a .gguf file or of a live model "
            "there are none: drop it"
        )


def _has_files(source: str | Path | PreTrainedModel) -> bool:
    return not isinstance(source, PreTrainedModel) and not str(source).endswith(".gguf")


def write(
    source: str | Path | PreTrainedModel,
    out: Path,
    spec: FoxSpec,
    *,
    link: bool = False,
    verify: bool = True,
    revision: str | None = None,
    progress: Progress | None = None,
    texts: Sequence[Text] = (),
) -> dict[str, Any]:
    """Converts `source` into the directory `out`, which appears whole or not at all; returns the report.

    A Hub id is fetched first: config.json, by which it may be refused, then the rest; everything after reads the copy.

    Args:
        texts: what init "measured" measures the heads on: files, globs, hf:...

    Raises:
        ValueError: `out` exists, `source` can't be converted, the parity proof failed, or linking is impossible.
        FileNotFoundError: `source` is not there.
    """
    if isinstance(source, PreTrainedModel):
        refuse_existing(out)
    else:
        check_out(source, out)
    check_options(spec, link, texts, _has_files(source))
    started = time.perf_counter()
    job = _job(source, spec, link, revision, progress)
    plan = job.plan
    with AtomicDirectory(out) as directory:
        partial = directory.partial
        values, start = measured_values(job.place, plan, texts)
        how = job.write(partial, values)
        report: dict[str, Any] = {
            "retrofox": __version__,
            "plan": plan.to_dict(),
            "weights": how,
            "seconds": round(time.perf_counter() - started, 2),
            "peak_memory_mib": peak_bytes(torch.device("cpu")) >> 20,
            "parity": "skipped (--no-verify)",
        }
        if start is not None:
            report["start"] = asdict(start)
        if plan.own_gates is not None:
            report["parity"] = "none: the gates were trained with the model, which has no form without them"
        elif verify:
            report["parity"] = prove(job.place, partial)
        (partial / "retrofox.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        (partial / "README.md").write_text(card(plan, report, licence_of(job.place)), encoding="utf-8")
        for file in partial.rglob("*"):
            if file.is_file() and not (link and file.stat().st_nlink > 1):
                file.chmod(new_file_mode())
        directory.commit()
    return report


@dataclass
class _Job:
    """One conversion: its plan, where its base is read from, and how it is written.

    Attributes:
        place: the live model, the .gguf file or the local directory, for measuring and the proof.
        write: writes it all but card and report, given the directory in the making and the measured values; returns how
            the weights came there.
    """

    plan: Plan
    place: str | Path | PreTrainedModel
    write: Callable[[Path, dict[str, torch.Tensor]], str]


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

    def save(partial: Path, values: dict[str, torch.Tensor]) -> str:
        _save(model, tokenizer_of_live(model), plan, partial, values)
        return "saved from memory"

    return _Job(plan, model, save)


def _from_gguf(file: str | Path, spec: FoxSpec, revision: str | None) -> _Job:
    plan = plan_for(file, spec, revision)

    def save(partial: Path, values: dict[str, torch.Tensor]) -> str:
        _save(*load_base(file), plan, partial, values)
        return "dequantised from GGUF"

    return _Job(plan, file, save)


def _from_disk(source: str | Path, spec: FoxSpec, link: bool, revision: str | None, progress: Progress | None) -> _Job:
    """A directory, or a Hub id: its config.json by which it may be refused first, then the rest."""
    plan = plan_for(source, spec, revision)
    directory, plan.spec.base_revision = fetch(source, revision)
    plan.config.fox["base_revision"] = plan.spec.base_revision
    refuse_damaged_tokenizer(directory)
    found = shards.find(directory)
    if plan.own_gates is not None:
        if link:
            raise ValueError(f"the tensors of a {plan.own_gates} are renamed, so --link can't share its files: drop it")
        return _Job(plan, directory, lambda partial, _: write_own_gates(directory, found, plan, partial))
    if not found.pickled:
        check_weights(directory, found.tensors, plan)

    def place(partial: Path, values: dict[str, torch.Tensor]) -> str:
        return write_directory(directory, found, plan, partial, link, values, progress)

    return _Job(plan, directory, place)


def _save(base: PreTrainedModel, tokenizer: Any, plan: Plan, partial: Path, values: dict[str, torch.Tensor]) -> None:
    """Saves the converted form of a model in memory."""
    model = apply(base, plan)
    model.load_state_dict(values, strict=False)
    model.save_pretrained(partial)
    if tokenizer is not None:
        tokenizer.save_pretrained(partial)
