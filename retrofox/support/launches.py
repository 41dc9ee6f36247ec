"""How many processes were launched together, and what they split."""

from __future__ import annotations

import os


def processes() -> int:
    """How many processes were launched together: WORLD_SIZE, which torchrun sets, and a person before `plan`."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def shards_weights(*by: str) -> bool:
    """Whether accelerate launched this process to split weights, gradients or optimizer.

    Args:
        by: "FSDP", "DEEPSPEED"; any of the two if none is named.
    """
    names = by or ("FSDP", "DEEPSPEED")
    return any(os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() == "true" for name in names)
