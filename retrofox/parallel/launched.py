"""Commands that several processes run together, launched by torchrun: joining them, and which one speaks."""

from __future__ import annotations

import atexit
import os
from typing import Any

import torch
import torch.distributed as dist

from retrofox.loading.source import holds_converted
from retrofox.support.launches import processes


def refuse_unconverted(model: Any) -> None:
    """Raises ValueError for the name of a model without gates, whose context can't be shared; loads nothing."""
    if isinstance(model, (str, os.PathLike)) and not holds_converted(os.fspath(model)):
        raise ValueError(f"context shares rows for Forgetting Attention only, and {model} is not converted: convert it")


def join(context: int, command: str) -> str | None:
    """Joins the processes that were launched to share a text; the device of this one, None where there is no GPU.

    Args:
        command: such as "eval MODEL", for the error.

    Raises:
        ValueError: another number of processes was launched.
    """
    launched = processes()
    if launched != context:
        raise ValueError(
            f"context: {context} processes share a document, and {launched} were launched: torchrun --nproc-per-node "
            f"{context} -m retrofox {command} --context {context} ..."
        )
    if not dist.is_initialized():
        dist.init_process_group("cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo")
        atexit.register(_leave)
    if not torch.cuda.is_available():
        return None
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return f"cuda:{torch.cuda.current_device()}"


def is_first() -> bool:
    """Whether this process prints and writes."""
    return not dist.is_initialized() or dist.get_rank() == 0


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
