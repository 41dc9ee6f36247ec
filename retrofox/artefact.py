"""Writing a converted checkpoint: weights linked or copied, new tensors in one new shard, all of it or nothing."""

from __future__ import annotations

import json
import os
import shutil
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, PreTrainedModel

import retrofox
from retrofox.model.configuration_fox import FoxSpec
from retrofox.model.modeling_fox import write_remote_code
from retrofox.surgery import Plan, apply, attentions, base_config, lm_class, load_base, load_tokenizer, make_plan

if TYPE_CHECKING:
    from retrofox.calibrate import Calibration

GATES_SHARD = "model-retrofox.safetensors"
INDEX = "model.safetensors.index.json"
COPY_STEP = 64 << 20
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".index.json")
OURS = ("config.json", "README.md", "retrofox.json")

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) while weights are copied."""


def plan_for(source: str | Path | PreTrainedModel, spec: FoxSpec, revision: str | None = None) -> Plan:
    """The plan of a conversion, without reading a weight. Errors as in `retrofox.convert`."""
    if isinstance(source, PreTrainedModel):
        return make_plan(source.config, spec, base=source.config._name_or_path or None)
    if str(source).endswith(".gguf"):
        path = Path(source)
        if not path.is_file():
            raise FileNotFoundError(f"{source}: no such file")
        config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
        return make_plan(config, spec, base=str(source))
    refuse_adapter(source)
    return make_plan(base_config(source, revision), spec, base=str(source), revision=revision)


def refuse_adapter(source: str | Path) -> None:
    """Raises ValueError for a directory that holds a LoRA adapter instead of a model."""
    if (Path(source) / "adapter_config.json").exists() and not (Path(source) / "config.json").exists():
        raise ValueError(f"{source} is a LoRA adapter: merge it into its base first, then convert the merged model")


def write(
    source: str | Path | PreTrainedModel,
    out: Path,
    spec: FoxSpec,
    *,
    link: bool = False,
    verify: bool = True,
    revision: str | None = None,
    progress: Progress | None = None,
    calibrate: Sequence[str] = (),
    calibrate_steps: int = 100,
    refit_queries: bool = True,
) -> dict[str, Any]:
    """Converts `source` into the directory `out`, which appears whole or not at all; returns the report.

    Args:
        calibrate: text files to fit gates (and queries) on, see `retrofox.calibrate`; the work is kept beside `out`
            while it lasts, so an interrupted conversion goes on where it stopped.
        calibrate_steps: Adam steps per layer; 0 takes only the half-lives of init="calibrated".
        refit_queries: whether calibration may rewrite the query projections.

    Raises:
        ValueError: `out` exists, `source` can't be converted, the parity proof failed, or linking is impossible.
        FileNotFoundError: `source` is not there.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists: remove it or choose another OUT")
    if spec.init == "calibrated" and not calibrate:
        raise ValueError("init 'calibrated' measures the base on text: name files with --calibrate FILES")
    if link and (isinstance(source, PreTrainedModel) or str(source).endswith(".gguf")):
        raise ValueError(
            "--link shares the weight files of a directory; a .gguf file or a live model has none: drop it"
        )
    started = time.perf_counter()
    plan = plan_for(source, spec, revision)
    calibration, work = None, out.parent / f".{out.name}.calibration"
    if calibrate:
        from retrofox.calibrate import calibrate as run

        options = {"steps": calibrate_steps, "refit_queries": refit_queries, "revision": revision}
        calibration = run(source, spec, calibrate, out_dir=work, **options)
    with _appearing(out) as partial:
        if isinstance(source, PreTrainedModel) or str(source).endswith(".gguf"):
            how = _write_live(source, plan, partial, calibration)
        else:
            directory, commit = _fetch(source, revision)
            plan.config.fox["base_revision"] = plan.spec.base_revision = commit
            how = _write_directory(directory, plan, partial, link, progress)
            if calibration is not None:
                _place(calibration.tensors(), partial)
        report: dict[str, Any] = {
            "retrofox": retrofox.__version__,
            "plan": plan.to_dict(),
            "weights": how,
            "seconds": round(time.perf_counter() - started, 2),
            "peak_memory_mib": peak_memory_mib(),
            "parity": "skipped (--no-verify)",
        }
        if calibration is not None:
            report["calibration"] = {**calibration.report, "rewritten": calibration.rewritten()}
            shutil.copytree(work, partial / "calibration", ignore=shutil.ignore_patterns("*.safetensors"))
        if verify:
            from retrofox.verify import prove

            report["parity"] = prove(source, partial, exact=calibration is None or not calibration.rewritten())
        (partial / "retrofox.json").write_text(json.dumps(report, indent=2) + "\n")
        (partial / "README.md").write_text(_card(plan, report))
        for file in partial.iterdir():
            if not file.is_symlink() and not (link and file.stat().st_nlink > 1):
                file.chmod(0o644)  # safetensors writes 0600 whatever the umask says
    shutil.rmtree(work, ignore_errors=True)
    return report


@contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """A directory beside `out` that becomes `out` when the block ends well and vanishes when it doesn't."""
    partial = out.parent / f".{out.name}.partial"
    if partial.exists():
        shutil.rmtree(partial)  # left by a run that was killed
    partial.mkdir(parents=True)
    try:
        yield partial
        if out.exists():
            out.rmdir()
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_live(
    source: str | Path | PreTrainedModel, plan: Plan, partial: Path, calibration: Calibration | None
) -> str:
    """Saves the converted form of a model in memory, or of a .gguf file after dequantising it."""
    if isinstance(source, PreTrainedModel):
        base, tokenizer, how = source, None, "saved from memory"
    else:
        (base, tokenizer), how = load_base(source), "dequantised from GGUF"
    model = apply(base, plan)
    if calibration is not None:
        from retrofox.calibrate import apply_to

        apply_to(model, calibration)
    model.save_pretrained(partial)
    if tokenizer is not None:
        tokenizer.save_pretrained(partial)
    return how


def _fetch(source: str | Path, revision: str | None) -> tuple[Path, str | None]:
    """(local directory, commit) of a directory or a Hub id, downloading what a conversion needs."""
    if Path(source).is_dir():
        return Path(source), None
    from huggingface_hub import HfApi, snapshot_download

    names = HfApi().list_repo_files(str(source), revision=revision)
    skip = ["*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "original/*", "consolidated*"]
    if any(name.endswith(".safetensors") for name in names):
        skip.append("*.bin")
    directory = Path(snapshot_download(str(source), revision=revision, ignore_patterns=skip))
    return directory, directory.name


def _write_directory(directory: Path, plan: Plan, partial: Path, link: bool, progress: Progress | None) -> str:
    """Places shards, the new shard, index, config, tokenizer and code; no weight passes through memory."""
    shards, weight_map = _shards(directory)
    total = sum(file.stat().st_size for file in shards.values())
    done = 0
    for name, file in shards.items():
        if file.suffix == ".bin":
            sizes = _from_bin(file, partial / name)
            weight_map.update(dict.fromkeys(sizes, name))
        elif link:
            _link(file, partial / name)
        else:
            for step in _copy(file, partial / name):
                done += step
                if progress is not None:
                    progress(done, total)
    new = _new_tensors(plan)
    if new:
        save_file(new, partial / GATES_SHARD, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(new, GATES_SHARD))
    size = sum(_tensor_bytes(partial / name) for name in dict.fromkeys(weight_map.values()))
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    values = json.loads((directory / "config.json").read_text())
    for key in ("model_type", "architectures", "auto_map"):
        values[key] = getattr(plan.config, key)
    values["fox"] = plan.config.fox
    (partial / "config.json").write_text(json.dumps(values, indent=2) + "\n")
    for file in directory.iterdir():
        if (
            file.is_file()
            and not file.name.endswith((*WEIGHTS, ".py"))
            and file.name not in OURS
            and file.name[0] != "."
        ):
            shutil.copyfile(file, partial / file.name)
    if (directory / "additional_chat_templates").is_dir():
        shutil.copytree(directory / "additional_chat_templates", partial / "additional_chat_templates")
    write_remote_code(partial)
    return "converted from .bin" if any(f.suffix == ".bin" for f in shards.values()) else "linked" if link else "copied"


def _place(tensors: dict[str, torch.Tensor], partial: Path) -> None:
    """Puts calibrated tensors where the plain ones are, rewriting the shards that hold them, one at a time."""
    weight_map = json.loads((partial / INDEX).read_text())["weight_map"]
    for file in sorted({weight_map[name] for name in tensors}):
        with safe_open(partial / file, "pt") as shard:
            state = {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118 not a dict
        state |= {name: t.to(state[name].dtype).contiguous() for name, t in tensors.items() if weight_map[name] == file}
        (partial / file).unlink()  # it may be a hard link to the source
        save_file(state, partial / file, metadata={"format": "pt"})


def _shards(directory: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """(file name in OUT -> file of the source, tensor name -> file name in OUT); the second is empty for .bin."""
    if (directory / INDEX).is_file():
        weight_map = json.loads((directory / INDEX).read_text())["weight_map"]
        shards = {name: directory / name for name in sorted(set(weight_map.values()))}
    elif (directory / "model.safetensors").is_file():
        # Not under its old name: transformers would take a model.safetensors for the whole checkpoint.
        name = "model-00001-of-00001.safetensors"
        shards = {name: directory / "model.safetensors"}
        weight_map = dict.fromkeys(_header(shards[name]), name)
    else:
        bins = sorted(directory.glob("pytorch_model*.bin"))
        if not bins:
            raise FileNotFoundError(
                f"{directory} holds no weights: looked for {INDEX}, model.safetensors, pytorch_model*.bin"
            )
        shards, weight_map = {f"{file.stem}.safetensors": file for file in bins}, {}
    for file in shards.values():
        if not file.is_file():
            raise FileNotFoundError(f"{file} is named in the index but is not there: download the model again")
    return shards, weight_map


def _header(file: Path) -> dict[str, Any]:
    """The tensors in a safetensors file: name -> dtype, shape, data_offsets."""
    with open(file, "rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    return header


def _tensor_bytes(file: Path) -> int:
    return sum(entry["data_offsets"][1] - entry["data_offsets"][0] for entry in _header(file).values())


def _link(file: Path, target: Path) -> None:
    try:
        os.link(file.resolve(), target)  # resolved: in the Hub cache a shard is a symlink to its blob
    except OSError as error:
        raise ValueError(
            f"can't hard-link {file} to {target.parent} ({error.strerror}): drop --link to copy"
        ) from error


def _copy(file: Path, target: Path) -> Iterator[int]:
    """Copies a file in the kernel, yielding the bytes of each step."""
    with open(file, "rb") as src, open(target, "wb") as dst:
        while True:
            try:
                step = os.copy_file_range(src.fileno(), dst.fileno(), COPY_STEP)
            except OSError:  # file systems that can't: through user space
                block = src.read(COPY_STEP)
                dst.write(block)
                dst.flush()
                step = len(block)
            if not step:
                return
            yield step


def _from_bin(file: Path, target: Path) -> list[str]:
    """Rewrites one .bin shard as safetensors (weights_only, memory-mapped); tensors that share memory go in once."""
    state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    seen: set[tuple[int, int]] = set()
    kept = {}
    for name, tensor in state.items():
        key = (tensor.untyped_storage().data_ptr(), tensor.storage_offset())
        if key not in seen:
            seen.add(key)
            kept[name] = tensor.contiguous()
    save_file(kept, target, metadata={"format": "pt"})
    return list(kept)


def _new_tensors(plan: Plan) -> dict[str, torch.Tensor]:
    """The tensors a conversion adds, at their starting values: a model of meta tensors with real new modules."""
    with torch.device("meta"):
        model = lm_class(plan.model_type)(plan.config)
    tensors = {}
    for name, attention in attentions(model):
        for part, module in attention.new_modules():
            module.to_empty(device="cpu")
            module.reset()
            tensors.update({f"{name}.{part}.{key}": value for key, value in module.state_dict().items()})
    return tensors


def peak_memory_mib() -> int:
    """Peak resident memory of this process so far, in MiB."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max(peak, psutil.Process().memory_info().rss >> 10) >> 10


def _card(plan: Plan, report: dict[str, Any]) -> str:
    from retrofox.hub import card

    return card(plan, report)


def tokenizer_of(source: str | Path, out: Path) -> Any:
    """The tokenizer of a converted checkpoint, or of its source where the checkpoint has none."""
    return load_tokenizer(out) or (None if isinstance(source, PreTrainedModel) else load_tokenizer(source))
