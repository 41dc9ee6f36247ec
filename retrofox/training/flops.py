"""Floating-point operations of a training token, counted on the model itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from retrofox.anatomy import causal_lm
from retrofox.config import Stage
from retrofox.planning.hardware import peak_of


def flops_per_token(model: Any, stage: Stage) -> float:
    """Operations per training token, without what recomputation adds.

    A product with a matrix of n parameters costs 2n forward, 2n for the gradient of its input and 2n for its own where
    it is trained; causal attention over rows of T tokens costs 2 L H D T forward and twice that backward, L layers of H
    query heads of width D. distill adds a forward pass of the original; align is that
    pass and attention alone.
    """
    lm = causal_lm(model)
    config = lm.config
    matrices = [m for m in lm.modules() if isinstance(m, nn.Linear)]
    all_of_them = sum(_products(m) for m in matrices)
    trained = sum(_products(m) for m in matrices if m.weight.requires_grad)
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    attention = 2.0 * config.num_hidden_layers * heads * width * stage.sequence_length
    forward = 2.0 * all_of_them + attention
    if stage.objective == "align":
        inside = sum(_products(m) for name, m in lm.named_modules() if isinstance(m, nn.Linear) and "attn" in name)
        return forward + 4.0 * inside + 3 * attention
    training = forward + 2.0 * all_of_them + 2.0 * trained + 2 * attention
    return training + (forward if stage.objective == "distill" else 0.0)


def _products(linear: nn.Linear) -> int:
    """Multiplications per token; of a 4-bit layer, whose weight tensor holds two numbers in a byte, too."""
    return linear.in_features * linear.out_features


def peak_flops(device: torch.device) -> float | None:
    """Peak operations per second of the device in bfloat16, None where it is not in the table (CPUs, unknown GPUs)."""
    return peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
