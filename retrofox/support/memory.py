"""Memory in use, and its peak."""

from __future__ import annotations

import resource
import sys

import psutil
import torch


def out_of_memory(what: str) -> ValueError:
    """The error for a GPU out of memory at, for example, "batch 4 x 8192 tokens"."""
    return ValueError(f"the GPU ran out of memory at {what}; lower the length, or load the model in bfloat16")


def bytes_in_use(device: torch.device) -> int:
    """Bytes that the GPU allocator holds now; on a CPU this process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return psutil.Process().memory_info().rss


def reset_peak(device: torch.device) -> int:
    """Starts counting a GPU's peak anew; returns the bytes in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    return bytes_in_use(device)


def peak_bytes(device: torch.device) -> int:
    """Most bytes in use: of a GPU since the last `reset_peak`, of this process since its start."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
