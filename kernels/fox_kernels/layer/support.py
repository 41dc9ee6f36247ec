"""Whether the fused kernels can run on a tensor."""

import torch

from ..host.device import TRITON_DTYPES, no_triton_on


def available(x: torch.Tensor) -> bool:
    """Return whether Triton kernels run on x: on an NVIDIA GPU from Ampere on, or in the interpreter."""
    return x.dtype in TRITON_DTYPES and no_triton_on(x.device) is None


def require(x: torch.Tensor) -> None:
    """Raise ValueError where the fused kernels can't run on x."""
    if x.dtype not in TRITON_DTYPES:
        raise ValueError(f"the fused kernels take bfloat16, float16 and float32, got {x.dtype}: cast it")
    reason = no_triton_on(x.device)
    if reason is not None:
        raise ValueError(f"the fused kernels can't run: {reason}; use torch's own")
