"""A converted checkpoint beside its base: weight files copied as they are, the new tensors in a shard of their own."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from retrofox.anatomy import is_new_tensor
from retrofox.loading import shards
from retrofox.loading.shards import INDEX, Shards
from retrofox.loading.tokenizers import keep_tokenizer
from retrofox.model.modeling_fox import write_remote_code
from retrofox.support.report import progress_bar
from retrofox.surgery import Plan, with_new_modules

logger = logging.getLogger(__name__)
FLOATS = ("F64", "F32", "F16", "BF16")
GATES_SHARD = "model-retrofox.safetensors"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".index.json")
OURS = ("config.json", "README.md", "retrofox.json")
COPY_BYTES = 16 << 20
EXPERTS = re.compile(r"\.(mlp|block_sparse_moe)\.")
"""Where transformers renames and fuses tensors of families with experts."""


def checked_shards(directory: Path, plan: Plan) -> Shards:
    """The weight files of a base, which have the tensors that its config describes.

    Neither .bin files nor those of a checkpoint with gates of its own are looked into. Tensors that the model has no
    use for are left where they are; a warning names the first.

    Raises:
        FileNotFoundError: there are none, or not all.
        ValueError: a file is damaged, or a tensor is missing, quantised or of another shape.
    """
    found = shards.find(directory)
    if found.pickled or plan.own_gates is not None:
        return found
    for name, shape in plan.base_tensors.items():
        entry = found.tensors.get(name)
        if entry is not None and (entry["dtype"] not in FLOATS or tuple(entry["shape"]) != shape):
            raise ValueError(
                f"{directory} has {name} as {entry['dtype']} of shape {entry['shape']}; its config.json asks for "
                f"floats of shape {list(shape)}: the two don't belong together, or the model is quantised"
            )
    fused = get_checkpoint_conversion_mapping(plan.model_type) is not None  # experts, while loading, in transformers
    missing = [
        name
        for name in plan.base_tensors
        if name not in found.tensors and name not in plan.tied and not (fused and EXPERTS.search(name))
    ]
    if missing:
        raise ValueError(
            f"{directory} lacks {len(missing)} tensors that its config.json asks for, such as {missing[0]}: if it has "
            "them under other names, load it with AutoModelForCausalLM, save_pretrained it, then convert that"
        )
    if fused:
        return found
    unused = [name for name in found.tensors if name not in plan.base_tensors and not name.endswith(".inv_freq")]
    if unused:
        logger.warning(
            "%s holds %d tensors that its model has no use for, such as %s: they stay in its files, unused",
            directory, len(unused), unused[0],
        )  # fmt: skip
    return found


def write_directory(
    directory: Path,
    found: Shards,
    plan: Plan,
    partial: Path,
    values: Mapping[str, torch.Tensor],
    progress: bool = False,
) -> None:
    """Writes shards, the new shard, index, config, tokenizer and code; no weight passes through memory.

    Args:
        values: measured starting values by name; other new tensors start as the plan says.
    """
    copy_shards(found, partial, progress)
    start = with_new_modules(plan).state_dict()
    new = {name: value for name, value in start.items() if is_new_tensor(name)} | dict(values)
    weight_map = dict(found.weight_map)
    if new:
        save_file(new, partial / GATES_SHARD, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(new, GATES_SHARD))
    size = shards.nbytes(found.tensors.values()) + sum(t.nbytes for t in new.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (partial / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    plan.config.to_json_file(partial / "config.json")
    copy_others(directory, partial)
    keep_tokenizer(directory, partial)
    write_remote_code(partial)


def copy_shards(shards: Shards, folder: Path, progress: bool = False) -> None:
    """Copies shards into a folder."""
    with progress_bar("MB", progress) as bar:
        task = bar.add_task("copying weights", total=shards.bytes / 1e6)
        for name, file in shards.files.items():
            with open(file, "rb") as source, open(folder / name, "wb") as target:
                while block := source.read(COPY_BYTES):
                    target.write(block)
                    bar.advance(task, len(block) / 1e6)


def copy_others(directory: Path, partial: Path) -> None:
    """Copies tokenizer, templates, licence and the like: everything but weights, config.json, card and code."""
    for file in [*directory.iterdir(), *(directory / "additional_chat_templates").glob("*.jinja")]:
        if file.is_file() and _comes_along(file.name):
            target = partial / file.relative_to(directory)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target)


def _comes_along(name: str) -> bool:
    """Whether a file of the base is copied: no weights, no hidden files, of code only a tokenizer's."""
    if name.endswith(WEIGHTS) or name in OURS or name.startswith("."):
        return False
    return not name.endswith(".py") or name.startswith("tokenization")
