"""The weight files of a checkpoint: found, their headers read without loading a tensor.

Imports no torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

INDEX = "model.safetensors.index.json"
BIN_INDEX = "pytorch_model.bin.index.json"
SINGLE = "model-00001-of-00001.safetensors"
"""Name in OUT of the base's model.safetensors: transformers would take that name for the whole checkpoint."""


@dataclass
class Shards:
    """The weight files of a directory.

    Attributes:
        files: file name in OUT -> file of the source.
        weight_map: tensor name -> file name in OUT; empty for .bin files, whose names only torch can read.
        tensors: tensor name -> its safetensors header entry (dtype, shape); empty for .bin files.
    """

    files: dict[str, Path]
    weight_map: dict[str, str] = field(default_factory=dict)
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def pickled(self) -> bool:
        return any(file.suffix == ".bin" for file in self.files.values())

    @property
    def bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files.values())


def find(directory: Path) -> Shards:
    """The shards of a model directory, their headers read and checked against the index and the files' sizes.

    Raises:
        FileNotFoundError: there are no weights, or a file that the index names is missing.
        ValueError: a file is truncated or not a safetensors file, or lacks a tensor that the index says it has.
    """
    if (directory / "model.safetensors").is_file():  # in the order in which transformers looks
        shards = Shards({SINGLE: directory / "model.safetensors"})
    elif (directory / INDEX).is_file():
        weight_map = _index(directory / INDEX)
        shards = Shards({name: directory / name for name in sorted(set(weight_map.values()))}, weight_map)
    elif (directory / "pytorch_model.bin").is_file():
        shards = Shards({SINGLE: directory / "pytorch_model.bin"})
    elif (directory / BIN_INDEX).is_file():
        shards = Shards({name: directory / name for name in sorted(set(_index(directory / BIN_INDEX).values()))})
    else:
        raise FileNotFoundError(
            f"{directory} holds no weights: looked for model.safetensors, {INDEX}, pytorch_model.bin, {BIN_INDEX}"
        )
    missing = [file.name for file in shards.files.values() if not file.is_file()]
    if missing:
        raise FileNotFoundError(
            f"{directory} lacks {', '.join(missing[:5])}, named in its index: download the model again"
        )
    if not shards.pickled:
        _read_headers(shards)
    return shards


def _index(file: Path) -> dict[str, str]:
    """Tensor name -> name of a file beside the index, whatever folder the index names."""
    try:
        weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
        return {name: Path(shard).name for name, shard in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is not an index of shards ({error}): download the model again") from error


def _read_headers(shards: Shards) -> None:
    single = not shards.weight_map
    for name, file in shards.files.items():
        entries = header(file)
        if single:
            shards.weight_map.update(dict.fromkeys(entries, name))
        shards.tensors |= {key: entry for key, entry in entries.items() if shards.weight_map.get(key) == name}
    lost = [key for key in shards.weight_map if key not in shards.tensors]
    if lost:
        where = shards.files[shards.weight_map[lost[0]]]
        raise ValueError(f"{where} lacks {lost[0]}, which the index says it has: download the model again")


def header(file: Path) -> dict[str, Any]:
    """The tensors in a safetensors file: name -> dtype (as F32), shape; ValueError where it is none, or cut short."""
    file.open("rb").close()  # of a file that may not be read, safetensors says that it is not there
    try:
        with safe_open(file, "numpy") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - it is no dict
            return {name: {"dtype": part.get_dtype(), "shape": part.get_shape()} for name, part in slices.items()}
    except SafetensorError as error:
        raise ValueError(f"{file} is cut short or not a safetensors file ({error}): download it again") from error


def nbytes(entries: Iterable[Mapping[str, Any]]) -> int:
    """Bytes of the tensors with these header entries."""
    bits = ((entry["shape"], re.search(r"\d+", entry["dtype"])) for entry in entries)
    return sum(math.prod(shape) * (int(found[0]) // 8 if found else 1) for shape, found in bits)  # BOOL: a byte
