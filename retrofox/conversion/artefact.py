"""Writing a converted checkpoint: weights linked or copied, new tensors in one new shard, all of it or nothing."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import AutoConfig, PreTrainedModel

from retrofox.anatomy import is_new_tensor
from retrofox.calibration.calibrate import apply_to, calibrate
from retrofox.calibration.steps import STEPS
from retrofox.calibration.windows import Text, require_sources
from retrofox.conversion.card import card
from retrofox.conversion.norm_gains import gains_of, has_norms, measure_gains, set_gains
from retrofox.conversion.tensors import check_weights, from_bin, replace_tensors
from retrofox.conversion.verify import prove
from retrofox.loading import shards
from retrofox.loading.base import base_config, load_base
from retrofox.loading.shards import INDEX, Appearing, Progress, Shards, refuse_existing
from retrofox.loading.source import check_live, check_out, fetch, reading_gguf, recorded
from retrofox.loading.tokenizers import load_tokenizer, tokenizer_of_live
from retrofox.model.configuration_fox import NOT_FOR_PLAIN_CLASSES, FoxSpec
from retrofox.model.modeling_fox import write_remote_code
from retrofox.support.files import new_file_mode
from retrofox.surgery import ATTENTION, Plan, apply, make_plan, starting_half_lives, with_new_modules
from retrofox.version import __version__

if TYPE_CHECKING:
    from retrofox.calibration.calibrate import Calibration

GATES_SHARD = "model-retrofox.safetensors"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".index.json")
OURS = ("config.json", "README.md", "retrofox.json")


def plan_for(source: str | Path | PreTrainedModel, spec: FoxSpec, revision: str | None = None) -> Plan:
    """The plan of a conversion, without reading a weight. Errors as in `retrofox.convert`."""
    if isinstance(source, PreTrainedModel):
        check_live(source)
        return make_plan(source.config, spec, base=recorded(source.config._name_or_path) or None)
    if revision is not None and Path(source).exists():
        raise ValueError(f"revision {revision!r} belongs to a Hub id, and {source} is a local path: drop one of them")
    if str(source).endswith(".gguf"):
        path = Path(source)
        if not path.is_file():
            raise FileNotFoundError(f"{source}: no such file")
        with reading_gguf(path):
            config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
        return make_plan(config, spec, base=recorded(source))
    return make_plan(base_config(source, revision), spec, base=recorded(source), revision=revision)


def preview(
    source: str | Path,
    out: Path,
    spec: FoxSpec,
    *,
    link: bool = False,
    revision: str | None = None,
    calibrate: Sequence[Text] = (),
) -> tuple[Plan, dict[str, Any]]:
    """What a conversion would do: its plan, and the same as JSON values with the bytes that would be written.

    Nothing is written and no weight is read; of a local directory the weight files' headers are, and whatever would be
    refused is refused. Of a Hub id only config.json is fetched.
    """
    check_out(source, out)
    _check_options(source, spec, link, calibrate)
    plan = plan_for(source, spec, revision)
    values: dict[str, Any] = plan.to_dict()
    if Path(source).is_dir():
        found = shards.find(Path(source))
        if not found.pickled:
            check_weights(Path(source), found.tensors, plan)
        if not link:
            shards.refuse_full_disk(out, found.bytes)
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
    refit_queries: bool = True,
    appearing: Appearing | None = None,
) -> dict[str, Any]:
    """Converts `source` into the directory `out`, which appears whole or not at all; returns the report.

    A Hub id is fetched first: config.json, by which it may be refused, then the rest; everything after reads the copy.

    Args:
        calibrate: text files to fit gates (and queries) on, see `retrofox.calibrate`; the work is kept beside `out`
            while it lasts, so an interrupted conversion goes on where it stopped.
        calibrate_steps: Adam steps per layer; 0 takes only the half-lives of init="calibrated".
        refit_queries: whether calibration may rewrite the query projections.
        appearing: `out` in the making, as `retrofox.loading.source.begun` gives it.

    Raises:
        ValueError: `out` exists, `source` can't be converted, the parity proof failed, or linking is impossible.
        FileNotFoundError: `source` is not there.
    """
    live = isinstance(source, PreTrainedModel)
    if isinstance(source, PreTrainedModel):
        refuse_existing(out)
        if any(parameter.is_meta for parameter in source.parameters()):
            raise ValueError(
                f"this {type(source).__name__} holds no weights (they are on the meta device, or offloaded): load it "
                "whole, or convert the directory that it came from"
            )
    elif appearing is None:
        check_out(source, out)
    _check_options(source, spec, link, calibrate)
    started = time.perf_counter()
    plan = plan_for(source, spec, revision)
    whole = live or str(source).endswith(".gguf")
    place, found = source, Shards({})
    if not isinstance(source, PreTrainedModel) and not whole:
        place, plan.spec.base_revision = fetch(source, revision)
        plan.config.fox["base_revision"] = plan.spec.base_revision
        found = shards.find(place)
        if not found.pickled:
            check_weights(place, found.tensors, plan)
    work = out.parent / f".{out.name}.calibration"
    with contextlib.ExitStack() as stack:
        stack.enter_context(_disk_of(out))
        if appearing is None:
            appearing = stack.enter_context(Appearing(out))
        partial = appearing.partial
        calibration, gains = _calibrated(place, plan, calibrate, work, calibrate_steps, refit_queries)
        if isinstance(place, PreTrainedModel) or whole:
            how = _write_live(place, plan, partial, calibration, gains)
        else:
            how = _write_directory(Path(place), found, plan, appearing, link, calibration, gains)
            appearing.wait(progress)
        report: dict[str, Any] = {
            "retrofox": __version__,
            "plan": plan.to_dict(),
            "weights": how,
            "seconds": round(time.perf_counter() - started, 2),
            "peak_memory_mib": peak_memory_mib(),
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
            report["parity"] = prove(place, partial, refitted=calibration.rewritten() if calibration else ())
        (partial / "retrofox.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        (partial / "README.md").write_text(card(plan, report), encoding="utf-8")
        for file in partial.rglob("*"):
            if file.is_file() and not (link and file.stat().st_nlink > 1):
                file.chmod(new_file_mode())
        appearing.commit()
    shutil.rmtree(work, ignore_errors=True)
    return report


@contextlib.contextmanager
def _disk_of(out: Path) -> Iterator[None]:
    """Turns what a full disk raises inside, often without a file's name, into a ValueError about `out`."""
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


Gains = dict[str, torch.Tensor]
"""Name in the converted model -> starting gain of an added norm."""


def _calibrated(
    place: str | Path | PreTrainedModel, plan: Plan, files: Sequence[Text], work: Path, steps: int, refit: bool
) -> tuple[Calibration | None, Gains]:
    """The outcome of `retrofox.calibrate` on `files`, and of measuring the gains of norms on them."""
    if not files:
        return None, {}
    options: dict[str, Any] = {"out_dir": work, "steps": steps, "refit_queries": refit}
    if not has_norms(plan):
        return calibrate(place, plan.spec, files, **options), {}
    # Norms come first, queries are fitted to what leaves them. That takes the whole model at once.
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


def _write_live(
    source: str | Path | PreTrainedModel, plan: Plan, partial: Path, calibration: Calibration | None, gains: Gains
) -> str:
    """Saves the converted form of a model in memory, or of a .gguf file after dequantising it."""
    if isinstance(source, PreTrainedModel):
        base, tokenizer, how = source, tokenizer_of_live(source), "saved from memory"
    else:
        (base, tokenizer), how = load_base(source), "dequantised from GGUF"
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
    return how


def _write_directory(
    directory: Path,
    found: Shards,
    plan: Plan,
    appearing: Appearing,
    link: bool,
    calibration: Calibration | None,
    gains: Gains,
) -> str:
    """Places shards, the new shard, index, config, tokenizer and code; no weight passes through memory."""
    partial, how = appearing.partial, "linked" if link else "copied"
    if GATES_SHARD in found.files:
        raise ValueError(
            f"{directory} has a shard called {GATES_SHARD}, as the one that is added: load it, save_pretrained it "
            "anew, then convert that"
        )
    if found.pickled:
        how = "converted from .bin"
        for name, file in found.files.items():
            from_bin(file, partial / name, plan.tied)
        found = shards.read(partial, list(found.files))
        check_weights(directory, found.tensors, plan)
    elif appearing.placed is None:
        appearing.place(found, link)
    new = _new_tensors(plan)
    if has_norms(plan):
        new |= gains or measure_gains(directory, plan.spec, load_tokenizer(directory))
    weight_map = dict(found.weight_map)
    size = shards.nbytes(found.tensors.values()) + sum(t.nbytes for t in new.values())
    if new:
        save_file(new, partial / GATES_SHARD, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(new, GATES_SHARD))
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    values = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    for key in ATTENTION:
        values.pop(key, None)
    for key in ("model_type", "architectures", "auto_map"):
        values[key] = getattr(plan.config, key)
    values |= plan.settings_replaced
    values["transformers_weights"] = NOT_FOR_PLAIN_CLASSES
    values["fox"] = plan.config.fox
    (partial / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    templates = directory / "additional_chat_templates"
    for file in [*directory.iterdir(), *templates.glob("*.jinja")]:
        taken = (*found.files, GATES_SHARD, INDEX, *OURS)
        if (
            file.is_file()
            and not file.name.endswith(WEIGHTS)
            and (not file.name.endswith(".py") or file.name.startswith("tokenization"))
            and file.name not in taken
            and file.name[0] != "."
        ):
            target = partial / file.relative_to(directory)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target)
    write_remote_code(partial)
    if calibration is not None:
        appearing.wait()
        replace_tensors(partial, calibration.tensors(), weight_map)
    return how


def _new_tensors(plan: Plan) -> dict[str, torch.Tensor]:
    """The tensors a conversion adds, at their starting values."""
    state = with_new_modules(plan).state_dict()
    return {name: value for name, value in state.items() if is_new_tensor(name)}


def peak_memory_mib() -> int:
    """Peak resident memory of this process so far, in MiB."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max(peak, psutil.Process().memory_info().rss >> 10) >> 10
