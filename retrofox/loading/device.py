"""Devices and dtypes as a user names them."""

from __future__ import annotations

import torch

from retrofox.loading.errors import first_line

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PRECISIONS = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""A recipe's `precision` as a dtype."""


def resolve_device(device: str | torch.device | None) -> torch.device:
    """The device asked for, or the GPU if there is one, else the CPU; refuses one that is not there."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
        torch.empty(1, device=place).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(
            f"device {str(device)!r} can't be used here ({first_line(error)}); use cpu, cuda or cuda:N"
        ) from error
    return place


def resolve_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A torch dtype from its name; None stays None."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    return DTYPES[dtype]
