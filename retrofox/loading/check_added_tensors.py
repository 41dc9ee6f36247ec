"""Checks the tensors that a conversion added to a checkpoint on disk: all there, of the right shapes, finite."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from retrofox.anatomy import is_new_tensor, lm_class, on_meta
from retrofox.loading.errors import understood
from retrofox.loading.shards import Shards


def check_added(directory: Path, values: Mapping[str, Any], found: Shards) -> None:
    """Raises ValueError, by name, where weight files lack a tensor that a converted model's config asks for.

    Args:
        values: config.json as a dict.
        found: the directory's weight files; of .bin files the names can't be read, so they pass.
    """
    if found.pickled:
        return
    base_type = values["model_type"].removeprefix("fox_")
    with understood(f"config.json of {directory}"):
        model = on_meta(base_type, lm_class(base_type).config_class.from_dict(dict(values)))
    expected = {name: list(t.shape) for name, t in model.state_dict().items() if is_new_tensor(name)}
    missing = [name for name in expected if name not in found.tensors]
    if missing:
        raise ValueError(
            f"{directory} lacks {len(missing)} of the {len(expected)} tensors that its conversion added, such as "
            f"{missing[0]}: it is incomplete and would run without them; download it, or convert its base, again"
        )
    foreign = [name for name in found.tensors if is_new_tensor(name) and name not in expected]
    if foreign:
        raise ValueError(
            f"{directory} has {foreign[0]}, for which its config.json has no place: the two don't belong together"
        )
    for name, shape in expected.items():
        if not found.tensors[name]["dtype"].startswith(("F", "BF")):
            raise ValueError(f"{directory} has {name} as {found.tensors[name]['dtype']}: it must be a float, F32")
        if found.tensors[name]["shape"] != shape:
            raise ValueError(
                f"{directory} has {name} of shape {found.tensors[name]['shape']}; its config.json asks for {shape}: "
                "the two don't belong together"
            )


def check_finite(directory: Path, found: Shards) -> None:
    """Raises ValueError, by name, for a tensor that holds NaN or infinity, the added ones first; all are read."""
    for name in sorted(found.tensors, key=is_new_tensor, reverse=True):
        if found.tensors[name]["dtype"] not in ("F64", "F32", "F16", "BF16"):
            continue
        with safe_open(found.files[found.weight_map[name]], "pt") as file:
            if not bool(torch.isfinite(file.get_tensor(name)).all()):
                raise ValueError(
                    f"{directory} has NaN or infinity in {name}: take a checkpoint from before, or train again with a "
                    "lower learning rate"
                )
