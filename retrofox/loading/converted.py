"""load: opens a converted checkpoint or an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from retrofox.anatomy import is_new_tensor, lm_class
from retrofox.loading.adapter import base_of, with_adapter
from retrofox.loading.check_added_tensors import check_added
from retrofox.loading.device import resolve_device
from retrofox.loading.errors import makes_a_model
from retrofox.loading.generation_config import savable
from retrofox.loading.shards import check_layers, find
from retrofox.loading.source import read_config
from retrofox.model.configuration_fox import SUPPORTED


def load(
    path: str | Path, *, dtype: Any = None, device: Any = None, revision: str | None = None, **options: Any
) -> PreTrainedModel:
    """Loads a converted checkpoint (directory or Hub id) with the installed kernels.

    Args:
        dtype: torch dtype or its name, None = as stored; gates stay float32 in any case.
        device: where to put the model, None = CPU; `device_map` in its place is passed on.
        options: of transformers' `from_pretrained`, passed on: device_map, quantization_config, token, ...

    Raises:
        TypeError: an option that transformers does not know.
        ValueError: it is not a converted checkpoint (a plain model, or an adapter whose base is a plain model), or the
            device is not there; or a tensor that the conversion added is missing or not finite.
        FileNotFoundError: no such directory or Hub id, or a file of weights is missing.
    """
    directory = Path(path)
    place = None if device is None else resolve_device(device)
    if place is not None and options.get("device_map") is not None:
        raise ValueError(f"device={device!r} and device_map both place the model: give one of them")
    if (directory / "adapter_config.json").exists():
        return _load_adapter(directory, dtype=dtype, device=device, **options)
    config_dict = read_config(path, revision)
    model_type = config_dict.get("model_type", "")
    if not model_type.startswith("fox_"):
        raise ValueError(
            f"{path} is a plain {model_type or 'model'}, not a converted one: run `retrofox convert {path} OUT`"
        )
    base_type = model_type.removeprefix("fox_")
    if base_type not in SUPPORTED:
        raise ValueError(
            f"{path} has model_type {model_type}; this version knows {', '.join('fox_' + t for t in SUPPORTED)}"
        )
    if dtype is not None:
        options["dtype"] = dtype
    if directory.is_dir():
        check_files(directory, config_dict)
    with makes_a_model(path):
        model = lm_class(base_type).from_pretrained(path, revision=revision or "main", **options)
    model.generation_config = savable(model.generation_config)
    _check_finite(model, path)
    return model if place is None else model.to(place)


def check_files(directory: Path, values: dict[str, Any]) -> None:
    """Raises ValueError or FileNotFoundError where a converted model's weight files are not what its config asks for.

    Args:
        values: config.json as a dict, of a family that converts.
    """
    found = find(directory)  # says which file is missing or cut short
    check_layers(directory, values["num_hidden_layers"], found.tensors)
    check_added(directory, values, found)


def _check_finite(model: PreTrainedModel, path: str | Path) -> None:
    for name, tensor in model.state_dict().items():
        if is_new_tensor(name) and not tensor.is_meta and not bool(torch.isfinite(tensor).all()):
            raise ValueError(
                f"{path} has NaN or infinity in {name}: take a checkpoint from before, or train again with a lower "
                "learning rate"
            )


def _load_adapter(directory: Path, **options: Any) -> PreTrainedModel:
    base = base_of(directory)
    try:
        model = load(base, **options)
    except ValueError as error:
        raise ValueError(f"the adapter {directory} needs a converted base model: {error}") from error
    return with_adapter(model, directory)
