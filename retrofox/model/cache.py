"""Gates in the key/value cache: they ride along as extra key channels, so every cache class carries them."""

from __future__ import annotations

from typing import Any

import torch


class GateCache:
    """One attention call's view of a transformers cache (or of none) that keeps log f beside each key.

    The float32 bits of log f, one number per query head of the key's group, are appended to the key as
    G * 4 / itemsize channels of the key's dtype. So growth, static buffers, sliding windows, beam reorder, crop,
    batch select and offload treat gates and keys as one, with no cache class of our own. Unwritten slots of a static
    cache read as log f = 0.

    Attributes:
        log_f: (B, S, H) float32 for all keys that `update` returned.

    Raises:
        ValueError: the cache quantises its keys, which would destroy the bits.
    """

    def __init__(self, cache: Any, log_f: torch.Tensor):
        self._cache = cache
        self.log_f = log_f

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        if self._cache is None:
            return keys, values
        _refuse_quantised(self._cache, layer_idx)
        batch, kv_heads, length, head_dim = keys.shape
        heads = self.log_f.shape[-1]
        bits = self.log_f.float().view(batch, length, kv_heads, heads // kv_heads).transpose(1, 2).contiguous()
        keys = torch.cat([keys, bits.view(keys.dtype)], dim=-1)
        keys, values = self._cache.update(keys, values, layer_idx, *args, **kwargs)
        bits = keys[..., head_dim:].contiguous().view(torch.float32)
        self.log_f = bits.transpose(1, 2).reshape(batch, -1, heads)
        return keys[..., :head_dim], values


def _refuse_quantised(cache: Any, layer_idx: int) -> None:
    layers = getattr(cache, "layers", ())
    layer = layers[layer_idx] if layer_idx < len(layers) else getattr(cache, "layer_class_to_replicate", None)
    name = layer.__name__ if isinstance(layer, type) else type(layer).__name__
    if "Quant" in name or "Quant" in type(cache).__name__:
        raise ValueError(
            f"a quantised key/value cache ({name}) would destroy the forget gates stored in it; "
            'use the default cache, "static" or "offloaded"'
        )
