"""load: opens a converted checkpoint or an adapter."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from retrofox.anatomy import is_new_tensor, lm_class
from retrofox.loading.adapter import converted_base, with_adapter
from retrofox.loading.device import resolve_device
from retrofox.loading.errors import opening
from retrofox.loading.shards import find
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
    if revision is not None and directory.exists():
        raise ValueError(f"revision {revision!r} belongs to a Hub id, and {path} is a local path: drop it")
    place = None if device is None else resolve_device(device)
    if place is not None and options.get("device_map") is not None:
        raise ValueError(f"device={device!r} and device_map both place the model: give one of them")
    if options.get("output_loading_info"):
        raise ValueError(
            "output_loading_info=True: retrofox.load returns the model alone, and refuses one whose tensors are "
            "missing; transformers' AutoModelForCausalLM.from_pretrained returns both"
        )
    if (directory / "adapter_config.json").exists():
        return with_adapter(load(converted_base(directory), dtype=dtype, device=device, **options), directory)
    config_dict = read_config(path, revision)
    model_type = config_dict.get("model_type", "")
    base_type = model_type.removeprefix("fox_")
    if base_type == model_type or base_type not in SUPPORTED:
        raise ValueError(
            f"{path} has model_type {model_type!r}, and is no converted model that this version knows: run `retrofox "
            f"convert {path} OUT` for a plain model of a supported family"
        )
    if dtype is not None:
        options["dtype"] = dtype
    if directory.is_dir():
        find(directory)  # says which file is missing or cut short
    with opening(path):
        model = lm_class(base_type).from_pretrained(path, revision=revision or "main", **options)
    model.generation_config = savable(model.generation_config)
    require_finite(path, {name: t for name, t in model.state_dict().items() if is_new_tensor(name)})
    return model if place is None else model.to(place)


def require_finite(source: str | Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raises ValueError, by name, for a tensor that holds NaN or infinity; quantised ones are not read."""
    for name, tensor in tensors.items():
        if type(tensor) is torch.Tensor and not tensor.is_meta and not bool(torch.isfinite(tensor).all()):
            raise ValueError(
                f"{source} has NaN or infinity in {name}: take a checkpoint from before, or train again with a lower "
                "learning rate"
            )


SAMPLING = ("temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Settings of a generation config that only sampling reads."""


def savable(config: Any) -> Any:
    """A generation config as it is or, where transformers refuses to save it, a copy without the fields it ignores.

    Published checkpoints have temperatures without do_sample, and -1 for no padding token; most versions of
    transformers then refuse to save the model at all.
    """
    if config is None:
        return None
    with contextlib.suppress(ValueError):
        config.validate(strict=True)
        return config
    config = copy.deepcopy(config)
    if not config.do_sample:
        for name in SAMPLING:
            setattr(config, name, None)
    if (config.pad_token_id or 0) < 0:
        config.pad_token_id = None
    return config
