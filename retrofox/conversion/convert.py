"""convert: retrofits forget gates into a model in memory, or writes a converted checkpoint, all of it or nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from retrofox.conversion.card import card, licence_of
from retrofox.conversion.directory import checked_shards, write_directory
from retrofox.conversion.measured import is_measured, measured_values, set_measured
from retrofox.conversion.own_gates import plan_of_own_gates, write_own_gates
from retrofox.conversion.verify import prove
from retrofox.data.sources import Text
from retrofox.data.windows import require_files
from retrofox.families import OWN_GATES, check_supported
from retrofox.fox_spec import FoxSpec
from retrofox.loading.atomic_directory import atomic_directory, refuse_existing
from retrofox.loading.base import load_base
from retrofox.loading.configs import any_config
from retrofox.loading.source import check_live, check_source, fetch, read_config, recorded, refuse_adapter
from retrofox.loading.tokenizers import tokenizer_of_live
from retrofox.support.files import write_json
from retrofox.support.memory import peak_bytes
from retrofox.surgery import Plan, apply, make_plan
from retrofox.version import __version__

ModelSource = str | Path | PreTrainedModel


def convert(
    source: str | Path | PreTrainedModel,
    out: str | Path | None = None,
    *,
    fox: FoxSpec | dict[str, Any] | None = None,
    verify: bool = True,
    revision: str | None = None,
    texts: Sequence[Text] = (),
) -> Any:
    """Retrofits forget gates into a pretrained model.

    Args:
        source: a live transformers model, a Hub id, a local directory or a .gguf file.
        out: directory to write; None returns the converted model instead.
        fox: what to convert to, or the fields of it that a recipe would have; None = FoxSpec(): stretched RoPE,
            data-dependent gates on a ladder of half-lives, one sink token.
        verify: prove on the written artefact, in a fresh process, that gates open + RoPE kept is the base model.
        revision: Hub revision of `source`.
        texts: to measure the heads on with init "measured": files, globs, hf:...

    Returns:
        The converted model, sharing the tensors of a live `source` (out is None), or the report that is also written
        to retrofox.json in `out`: plan, seconds, peak memory, parity proof.

    Raises:
        ValueError: unsupported family, already converted, quantised, an adapter, or `out` exists.
        FileNotFoundError: `source` is not there.
    """
    spec = fox if isinstance(fox, FoxSpec) else FoxSpec.from_dict(fox or {})
    texts = [texts] if isinstance(texts, (str, Path)) else texts
    if out is not None:
        return write(source, Path(out), spec, verify=verify, revision=revision, texts=texts)
    if spec.version is None:  # a spec with a version says how a model was converted
        check_texts(spec, texts)
    plan = plan_for(source, spec, revision)
    if plan.own_gates is not None:
        raise ValueError(f"{source} has forget gates of its own: convert it into a directory (give OUT) and load that")
    base, tokenizer = (source, None) if isinstance(source, PreTrainedModel) else load_base(source, revision=revision)
    model = apply(base, plan)
    if is_measured(plan) and not model.get_input_embeddings().weight.is_meta:  # type: ignore[union-attr]
        set_measured(model, plan, tokenizer or tokenizer_of_live(base), texts)
    return model


def plan_for(source: ModelSource, spec: FoxSpec, revision: str | None = None) -> Plan:
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
    check_source(source, values)
    if values.get("model_type") in OWN_GATES:
        return plan_of_own_gates(values, spec, recorded(source), revision)
    check_supported(values)
    return make_plan(any_config(source, revision), spec, base=recorded(source), revision=revision)


def preview(
    source: str | Path, out: Path, spec: FoxSpec, *, revision: str | None = None, texts: Sequence[Text] = ()
) -> tuple[Plan, dict[str, Any]]:
    """The plan of a conversion, and the same as JSON values with the bytes that would be written.

    Nothing is written and no weight is read; of a local directory the weight files' headers are, and whatever would be
    refused is refused (tensors of a checkpoint with gates of its own only when they are read). Of a Hub id only
    config.json is fetched.
    """
    refuse_existing(out)
    check_texts(spec, texts)
    plan = plan_for(source, spec, revision)
    values: dict[str, Any] = plan.to_dict()
    if Path(source).is_dir():
        found = checked_shards(Path(source), plan)
        values |= {"weight_files": len(found.files), "weight_bytes": found.bytes}
    return plan, values


def check_texts(spec: FoxSpec, texts: Sequence[Text]) -> None:
    """Raises ValueError for texts that a conversion would ignore or lack, FileNotFoundError for one not there."""
    if (spec.init == "measured") != bool(texts):
        raise ValueError(
            f"init measured and texts to measure the heads on (--texts FILES) belong together; got init {spec.init} "
            f"and {len(texts)} texts"
        )
    require_files(texts)


def write(
    source: ModelSource,
    out: Path,
    spec: FoxSpec,
    *,
    verify: bool = True,
    revision: str | None = None,
    progress: bool = False,
    texts: Sequence[Text] = (),
) -> dict[str, Any]:
    """`convert` into the directory `out`, which appears whole or not at all; returns the report.

    A Hub id is fetched first: config.json, by which it may be refused, then the rest; everything after reads the copy.

    Args:
        progress: a bar for the copied weights.
    """
    refuse_existing(out)
    check_texts(spec, texts)
    started = time.perf_counter()
    plan = plan_for(source, spec, revision)
    place, found = source, None
    if not isinstance(source, PreTrainedModel) and not str(source).endswith(".gguf"):
        place, plan.spec.base_revision = fetch(source, revision)
        plan.config.fox["base_revision"] = plan.spec.base_revision
        found = checked_shards(place, plan)
    with atomic_directory(out) as partial:
        values, start = measured_values(place, plan, texts)
        if isinstance(place, Path) and found is not None and plan.own_gates is not None:
            how = write_own_gates(place, found, plan, partial)
        elif isinstance(place, Path) and found is not None and not found.pickled:
            write_directory(place, found, plan, partial, values, progress)
            how = "copied"
        else:
            how = _save(place, plan, partial, values)
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
            report["parity"] = prove(place, partial)
        write_json(partial / "retrofox.json", report)
        state = "Converted, not yet adapted." if plan.own_gates is None else "Its gates were trained with it."
        text = card(plan.spec, plan.model_type, state, licence_of(place))
        (partial / "README.md").write_text(text, encoding="utf-8")
    return report


def _save(place: ModelSource, plan: Plan, partial: Path, values: dict[str, torch.Tensor]) -> str:
    """Saves the converted form of a live model, or of one that must be loaded; returns where it came from."""
    if isinstance(place, PreTrainedModel):
        base, tokenizer, how = place, tokenizer_of_live(place), "saved from memory"
    else:
        base, tokenizer = load_base(place)
        how = "dequantised from GGUF" if str(place).endswith(".gguf") else "converted from .bin"
    model = apply(base, plan)
    model.load_state_dict(values, strict=False)
    model.save_pretrained(partial)
    if tokenizer is not None:
        tokenizer.save_pretrained(partial)
    return how
