"""The rotary dial under vLLM: tables of cos and sin with each pair's fade in them."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import nn

from retrofox.model.modeling_fox import RotaryFade


def faded(fade: RotaryFade, length: int, native: Any = None) -> Any:
    """vLLM's rotary module turned by the fades, or for modules of transformers a `Tables`."""
    table = _table(tuple(fade.inv_freq), tuple(fade.fade), fade.attention_scaling, length)
    if native is None:
        return Tables(table, fade.channel_pair)
    if native.cos_sin_cache.shape[1] != table.shape[1]:
        raise ValueError(
            f"vLLM turns {native.cos_sin_cache.shape[1] // 2} rotary pairs where transformers turns {len(fade.fade)}"
        )
    made = copy.copy(native)
    made._buffers = dict(native._buffers)  # the native one belongs to all layers
    made.cos_sin_cache = table.to(native.cos_sin_cache)
    made._forward_method = made.dispatch_forward(compile_native=False)  # vLLM keeps the method bound to its module
    return made


@functools.lru_cache(maxsize=8)
def _table(inv_freq: tuple[float, ...], fades: tuple[float, ...], scaling: float, length: int) -> torch.Tensor:
    """(length, 2 P) float32: scaling * cos(fade_p * position * w_p), then the sines.

    The product fade_p * w_p is rounded before it is multiplied by the position, as in `RotaryFade`.
    """
    with torch.device("cpu"):
        speed = torch.tensor(inv_freq, dtype=torch.float32) * torch.tensor(fades, dtype=torch.float32)
        angle = torch.arange(length, dtype=torch.float32)[:, None] * speed
        return torch.cat([angle.cos(), angle.sin()], -1) * scaling


class Tables(nn.Module):
    """(cos, sin) as transformers' attention modules take them, looked up by position.

    Shapes: positions (B, T) -> two tensors (B, T, channels) in `dtype`, halves stacked or interleaved as the family's.
    """

    table: torch.Tensor

    def __init__(self, table: torch.Tensor, channel_pair: list[int]):
        super().__init__()
        cos, sin = table.chunk(2, -1)
        pairs = torch.tensor(channel_pair, device=table.device)
        self.register_buffer("table", torch.cat([cos[:, pairs], sin[:, pairs]], -1), persistent=False)

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = self.table[positions].to(dtype).chunk(2, -1)
        return cos, sin
