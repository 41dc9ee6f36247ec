"""Cached properties of GPUs, as asking CUDA takes longer than a launch, and what Triton's kernels can't run on."""

import contextlib
import functools
import importlib.metadata
import importlib.util
import os

import torch

TRITON_HEAD_DIMS = (16, 32, 64, 80, 96, 128, 192, 256)
TRITON_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KNOWN_TRITON = {(3, 6), (3, 7), (3, 8), (3, 9)}  # GPU tests passed; others get plain kernels, by Triton's own launch
HAS_TRITON = importlib.util.find_spec("triton") is not None

_capabilities: dict[torch.device, tuple[int, int]] = {}


def triton_version() -> tuple[int, int] | None:
    """Return the installed Triton's major and minor version."""
    try:
        major, minor = importlib.metadata.version("triton").split(".")[:2]
    except importlib.metadata.PackageNotFoundError:
        return None
    return int(major), int(minor)


def capability(device: torch.device) -> tuple[int, int]:
    """Return a GPU's compute capability; asking torch takes longer than all other checks of a call together."""
    if torch.compiler.is_compiling():
        return torch.cuda.get_device_capability(device)
    if device not in _capabilities:
        _capabilities[device] = torch.cuda.get_device_capability(device)
    return _capabilities[device]


@functools.cache
def processors(device: torch.device) -> int:
    """Return how many multiprocessors a device has; 8 for a CPU, where the interpreter runs."""
    return 8 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


def on_device(q: torch.Tensor):
    """Return a context in which q's device is the current one: Triton launches there."""
    if q.device.type != "cuda" or q.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(q.device)


def no_triton_on(device: torch.device) -> str | None:
    """Return why Triton kernels can't run on a device, or None if they can."""
    if not HAS_TRITON:
        return "triton is not installed"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if device.type != "cuda":
        return f"tensors are on {device.type}, Triton needs cuda"
    if torch.version.cuda is None:
        return "the kernels are proven on CUDA only"
    return "the GPU is older than Ampere (compute capability 8.0)" if capability(device) < (8, 0) else None


def triton_unsupported(q: torch.Tensor) -> str | None:
    """Return why the Triton kernels can't run for queries like q, or None if they can."""
    reason = no_triton_on(q.device)
    if reason is not None:
        return reason
    if q.dtype not in TRITON_DTYPES:
        return f"dtype {q.dtype} is not one of bfloat16, float16, float32"
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        return "Triton's interpreter multiplies bfloat16 wrongly"
    if q.shape[-1] not in TRITON_HEAD_DIMS:
        return f"head_dim {q.shape[-1]} is not one of {TRITON_HEAD_DIMS}"
    return None


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
