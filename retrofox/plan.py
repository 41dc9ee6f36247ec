"""`retrofox plan`"""
from __future__ import annotations
from typing import Any
import torch
from retrofox.config import Stage

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "H800": 989e12, "A100": 312e12, "B200": 2250e12, "L40S": 362e12, "4090": 165e12, "3090": 71e12}

def flops_per_token(model: Any, stage: Stage) -> float:
    return 6.0 * sum(p.numel() for p in model.parameters())

def peak_flops(device: torch.device) -> float | None:
    return None
