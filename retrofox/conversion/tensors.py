"""Tensors of a checkpoint on disk: checked against the model, taken out of .bin files."""

from __future__ import annotations

import logging
import pickle
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from retrofox.anatomy import is_new_tensor
from retrofox.loading import shards
from retrofox.loading.errors import NO_MODEL, UNREADABLE_BIN, first_line
from retrofox.surgery import Plan

logger = logging.getLogger(__name__)
FLOATS = ("F64", "F32", "F16", "BF16")


def check_weights(where: Path, tensors: Mapping[str, Mapping[str, Any]], plan: Plan) -> None:
    """Raises ValueError where a checkpoint's tensors are not the ones its config describes, or are already ours.

    Tensors that the model has no use for are left where they are; a warning names the first.

    Args:
        where: the directory, for the message.
        tensors: name -> safetensors header entry.
    """
    ours = [name for name in tensors if is_new_tensor(name)]
    if ours:
        raise ValueError(
            f"{where} already holds {ours[0]}, a name that the conversion would give to a tensor of its own: convert "
            "the model it was made from, or rename the tensor"
        )
    shards.check_layers(where, plan.config.num_hidden_layers, tensors)
    odd = [name for name in plan.base_tensors if name in tensors and tensors[name]["dtype"] not in FLOATS]
    if odd:
        raise ValueError(
            f"{where} stores {odd[0]} as {tensors[odd[0]]['dtype']}, so it is quantised, though its config doesn't say "
            "so: convert the unquantised model it was made from"
        )
    for name, shape in plan.base_tensors.items():
        if name in tensors and tuple(tensors[name]["shape"]) != shape:
            raise ValueError(
                f"{where} has {name} of shape {tensors[name]['shape']}; its config.json asks for {list(shape)}: the "
                "two don't belong together"
            )
    if get_checkpoint_conversion_mapping(plan.model_type) is not None:
        return  # transformers renames or fuses this family's tensors while loading (experts)
    unused = [name for name in tensors if name not in plan.base_tensors and not name.endswith(".inv_freq")]
    if unused and plan.base_tensors.keys() & tensors.keys():
        logger.warning(
            "%s holds %d tensors that its model has no use for, such as %s: they stay in its files, unused",
            where, len(unused), unused[0],
        )  # fmt: skip
    missing = [name for name in plan.base_tensors if name not in tensors and name not in plan.tied]
    if missing:
        ending = next((n for n in tensors if missing[0].endswith(n) or n.endswith(missing[0].partition(".")[2])), None)
        renamed = (
            f"it has {ending} instead: load it with AutoModelForCausalLM, save_pretrained it anew, then convert that"
        )
        raise ValueError(
            f"{where} lacks {len(missing)} tensors that its config.json asks for, such as {missing[0]}; "
            + (renamed if ending else "the two don't belong together")
        )


def from_bin(file: Path, target: Path, tied: Collection[str]) -> None:
    """Rewrites one .bin shard as safetensors: weights_only, memory-mapped.

    Args:
        tied: names that the model ties to others: left out where they share their memory with another tensor.

    Raises:
        ValueError: the file is damaged, holds something other than tensors, or would run code when unpickled.
    """
    state = unpickled(file)
    state = state if isinstance(state, dict) else {"": state}
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            kind = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            raise ValueError(f"{file} holds {name!r}, a {kind}: only dense tensors can be converted")
    kept: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name in sorted(state, key=lambda name: name in tied):
        memory = state[name].untyped_storage().data_ptr()
        if memory not in seen:
            kept[name] = state[name].contiguous()
        elif name not in tied:
            kept[name] = state[name].clone(memory_format=torch.contiguous_format)
        seen.add(memory)
    save_file(kept, target, metadata={"format": "pt"})


def unpickled(file: Path) -> Any:
    """What a .bin file holds, tensors by name if it is sound, mapped to it unless torch before 1.6 wrote it."""
    try:
        try:
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:
            if "mmap" not in str(error):
                raise
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL (\S+)", str(error))
        what = wanted[1] if wanted else "a damaged or foreign pickle"
        raise ValueError(
            f"{file} holds more than tensors ({what}) and could run code when it is opened, so it was not: convert a "
            "safetensors version of the model"
        ) from error
    except (*UNREADABLE_BIN, *NO_MODEL, OSError) as error:
        raise ValueError(f"{file} can't be read ({first_line(error)}): download it again") from error
