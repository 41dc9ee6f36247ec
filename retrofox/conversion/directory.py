"""A converted checkpoint beside its base: weight files placed as they are, the new tensors in a shard of their own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from retrofox.anatomy import is_new_tensor
from retrofox.conversion.tensors import check_weights, from_bin
from retrofox.loading import shards
from retrofox.loading.atomic_directory import Progress, place
from retrofox.loading.shards import INDEX, Shards
from retrofox.model.configuration_fox import NOT_FOR_PLAIN_CLASSES
from retrofox.model.modeling_fox import write_remote_code
from retrofox.surgery import ATTENTION, Plan, with_new_modules

GATES_SHARD = "model-retrofox.safetensors"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".index.json")
OURS = ("config.json", "README.md", "retrofox.json")


def write_directory(
    directory: Path,
    found: Shards,
    plan: Plan,
    partial: Path,
    link: bool,
    values: Mapping[str, torch.Tensor],
    progress: Progress | None = None,
) -> str:
    """Places shards, the new shard, index, config, tokenizer and code; no weight passes through memory.

    Args:
        values: measured starting values by name; other new tensors start as the plan says.
    """
    how = "linked" if link else "copied"
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
    else:
        place(found, partial, link, progress)
    new = {**_new_tensors(plan), **values}
    weight_map = dict(found.weight_map)
    size = shards.nbytes(found.tensors.values()) + sum(t.nbytes for t in new.values())
    if new:
        save_file(new, partial / GATES_SHARD, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(new, GATES_SHARD))
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    for key in ATTENTION:
        config.pop(key, None)
    for key in ("model_type", "architectures", "auto_map"):
        config[key] = getattr(plan.config, key)
    config |= plan.settings_replaced
    config["transformers_weights"] = NOT_FOR_PLAIN_CLASSES
    config["fox"] = plan.config.fox
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    copy_others(directory, partial)
    write_remote_code(partial)
    return how


def copy_others(directory: Path, partial: Path) -> None:
    """Copies tokenizer, templates, licence and the like: everything but weights, config.json, card and code."""
    templates = directory / "additional_chat_templates"
    for file in [*directory.iterdir(), *templates.glob("*.jinja")]:
        if (
            file.is_file()
            and not file.name.endswith(WEIGHTS)
            and (not file.name.endswith(".py") or file.name.startswith("tokenization"))
            and file.name not in OURS
            and file.name[0] != "."
        ):
            target = partial / file.relative_to(directory)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target)


def _new_tensors(plan: Plan) -> dict[str, torch.Tensor]:
    """The tensors a conversion adds, at their starting values."""
    state = with_new_modules(plan).state_dict()
    return {name: value for name, value in state.items() if is_new_tensor(name)}
