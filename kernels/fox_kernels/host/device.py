"""Cached properties of GPUs: asking CUDA takes longer than a launch."""

import contextlib
import functools

import torch

_capabilities: dict[torch.device, tuple[int, int]] = {}


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
