"""Whether the fused kernels can run on a tensor."""

import contextlib
import os

import torch

from ..host.device import capability

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def available(x: torch.Tensor) -> bool:
    """Return whether Triton kernels run on x: on an NVIDIA GPU from Ampere on, or in the interpreter."""
    if x.dtype not in DTYPES:
        return False
    if x.is_cuda:
        return torch.version.cuda is not None and capability(x.device) >= (8, 0)
    return x.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"


def require(x: torch.Tensor) -> None:
    """Raise ValueError where the fused kernels can't run on x."""
    if x.dtype not in DTYPES:
        raise ValueError(f"the fused kernels take bfloat16, float16 and float32, got {x.dtype}: cast it")
    if not available(x):
        raise ValueError(f"the kernels need an NVIDIA GPU from Ampere on, got a tensor on {x.device}: use torch's own")


def without_autocast(x: torch.Tensor) -> contextlib.AbstractContextManager:
    """Return a context in which products of x's dtype stay in it; entering torch's own costs the host 20 us."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) == x.dtype:
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)
