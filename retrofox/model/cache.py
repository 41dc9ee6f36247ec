"""Gates in the key/value cache: they ride along as extra key channels, so every cache class carries them."""

from __future__ import annotations

from typing import Any

import torch


class GateCache:
    """One attention call's view of a transformers cache (or of none) that keeps log f beside each key.

    The float32 bits of log f, one number per query head of the key's group, are appended to the key as
    G * 4 / itemsize channels of the key's dtype (float64 keys take the number itself). So growth, static buffers,
    sliding windows, beam reorder, crop, batch select and offload treat gates and keys as one, with no cache class of
    our own. Unwritten slots of a static cache read as log f = 0.

    Key and value shift need the previous token's projections: `carried` holds this call's, and each is appended to
    the key as head_dim further channels (a cache with both shifts is 2 x the size of one without).

    Attributes:
        log_f: (B, S, H) float32 for all keys that `update` returned.
        hidden_states: (B, T, hidden), what entered the attention block.
        position_ids: (B, T) or (1, T), None where the model was given none; native forwards don't all pass them on.
        carried: (B, T, Hkv, D) tensors to find again at the next call.

    Raises:
        ValueError: the cache quantises its keys, which would destroy the bits; or it is offloaded and something is
            carried, or gates are to be trained through a static cache.
    """

    def __init__(
        self,
        cache: Any,
        log_f: torch.Tensor,
        hidden_states: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ):
        self._cache = cache
        self.log_f = log_f
        self.hidden_states = hidden_states
        self.position_ids = position_ids
        self.carried: list[torch.Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        if self._cache is None:
            return keys, values
        _refuse_quantised(self._cache, layer_idx)
        new, head_dim = self.log_f, keys.shape[-1]
        bits = _to_channels(new, keys)
        carried = [x.transpose(1, 2).to(keys.dtype) for x in self.carried]
        wide = torch.cat([keys, bits, *carried], dim=-1)
        wide, values = self._cache.update(wide, values, layer_idx, *args, **kwargs)
        self.log_f = _from_channels(wide[..., head_dim : head_dim + bits.shape[-1]], new.shape[-1])
        if torch.is_grad_enabled() and new.requires_grad:
            # bits carry no gradient: this call's gates take their place again, at the end where caches append
            if hasattr(self._cache.layers[layer_idx], "max_cache_len"):
                raise ValueError("gates can't be trained through a static cache: use the default cache, or none")
            self.log_f = torch.cat([self.log_f[:, : -new.shape[1]], new], dim=1)
        return wide[..., :head_dim], values

    def previous(self, layer_idx: int, width: int) -> torch.Tensor | None:
        """(B, Hkv, width): the last `width` channels of the newest cached token, None when the cache is empty."""
        layers = () if self._cache is None else self._cache.layers
        if layer_idx >= len(layers) or getattr(layers[layer_idx], "keys", None) is None:
            return None
        layer = layers[layer_idx]
        if getattr(self._cache, "offloading", False):
            raise ValueError(
                "key and value shift can't run with an offloaded cache: the previous token's keys may be in flight; "
                'use the default cache or "static"'
            )
        newest = min(int(layer.get_seq_length()), layer.keys.shape[-2]) - 1
        return layer.keys[:, :, newest, -width:] if newest >= 0 and layer.keys.numel() else None


def _to_channels(log_f: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """(B, T, H) float32 -> (B, Hkv, T, channels) in the dtype of keys (B, Hkv, T, D)."""
    batch, kv_heads, length, _ = keys.shape
    grouped = log_f.detach().float().view(batch, length, kv_heads, -1).transpose(1, 2).contiguous()
    return grouped.to(keys.dtype) if keys.element_size() > 4 else grouped.view(keys.dtype)


def _from_channels(bits: torch.Tensor, heads: int) -> torch.Tensor:
    """The inverse of `_to_channels`: (B, S, H) float32."""
    bits = bits.detach()
    grouped = bits.float() if bits.element_size() > 4 else bits.contiguous().view(torch.float32)
    return grouped.transpose(1, 2).reshape(bits.shape[0], -1, heads)


def _refuse_quantised(cache: Any, layer_idx: int) -> None:
    layers = getattr(cache, "layers", ())
    layer = layers[layer_idx] if layer_idx < len(layers) else getattr(cache, "layer_class_to_replicate", None)
    name = layer.__name__ if isinstance(layer, type) else type(layer).__name__
    if "Quant" in name or "Quant" in type(cache).__name__:
        raise ValueError(
            f"a quantised key/value cache ({name}) would destroy the forget gates stored in it; "
            'use the default cache, "static" or "offloaded"'
        )
