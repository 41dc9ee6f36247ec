"""Gates in the key/value cache: summed up once in a layer that grows in place, or riding along in key channels."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer
from transformers.modeling_outputs import BaseModelOutputWithPast

try:
    from fox_kernels.decoding.append import append, appends
except ImportError:  # no fox_kernels, or no Triton
    append: Any = None

    def appends(k: torch.Tensor, v: torch.Tensor, log_f: torch.Tensor) -> bool:
        """No fused kernel is installed."""
        return False


CACHE = "cache" if hasattr(BaseModelOutputWithPast, "cache") else "past_key_values"
"""What transformers calls a model's cache, as an argument and in what it returns: "cache" from 5.24 on."""
LOG2_E = 1.4426950408889634
LOG_F_MIN = -1e4  # as in the operator: exp underflows long before
SPARE_TOKENS, SPARE_PART = 64, 16  # room for more tokens, or a sixteenth of those there: new memory costs time


class GrowingLayer(DynamicLayer):
    """A dynamic cache layer that keeps c beside the keys, and room for more: a new token is written, nothing copied.

        c_t = log2(e) * sum_{l <= t} log f_l, in two floats

    `GateCache` puts it in the place of a cache's empty `DynamicLayer`, whose interface it has. Where gradients are
    recorded, what is there is left as it is and copied, as in a DynamicLayer.

    Attributes:
        keys, values: (B, Hkv, S, width), views of the first S tokens of what is allocated.
        sums: (B, 2 H, S, 1) float32, likewise: c of every query head, then what rounding it lost.

    Raises:
        ValueError: keys arrive without gates, or `keys` was replaced from outside.
    """

    clock: Any = None  # of a `fixed.FixedLayer`
    reserve = 0  # tokens to have room for from the first on

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._forget()

    def _forget(self) -> None:
        self.is_initialized = False
        self.keys: Any = None
        self.values: Any = None
        self.sums: Any = None
        self._rooms: list[torch.Tensor] = []  # keys, values and sums, each (B, heads, tokens that fit, width)
        self._length, self._writable = 0, False

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any):  # type: ignore[override]
        log_f, head_dim = kwargs.get("log_f"), kwargs.get("head_dim", key_states.shape[-1])
        if log_f is None:
            raise ValueError("this cache holds the forget gates of a converted model: give another model a new cache")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._check(key_states)
        end = self._length + key_states.shape[2]
        if self._fits(end) and appends(key_states, value_states, log_f):
            append(self._rooms, self._length, key_states, value_states, log_f, None, head_dim)
            self._show(end)
        else:
            self._append([key_states, value_states, self._continued(log_f)], end)
        return self.keys, self.values

    def _fits(self, end: int) -> bool:
        """Whether tokens up to `end` may be written where they belong."""
        if not self._writable or torch.is_grad_enabled() or end > self._rooms[0].shape[2]:
            return False
        return torch.is_inference_mode_enabled() or not self._rooms[0].is_inference()

    def _check(self, new_keys: torch.Tensor) -> None:
        self._check_length()
        if not self._rooms:
            return
        kept = self._rooms[0].shape
        if new_keys.shape[:2] != kept[:2] or new_keys.shape[3] != kept[3]:
            raise ValueError(
                f"keys (rows, heads, tokens, width) of {tuple(new_keys.shape)} don't fit a cache of {tuple(kept)}: "
                "see batch_repeat_interleave and batch_select_indices"
            )
        if self._rooms[0].device != new_keys.device:
            self._each(lambda x: x.to(new_keys.device))

    def _check_length(self) -> None:
        if self.get_seq_length() != self._length:
            raise ValueError(
                f"the cache has keys of {self.get_seq_length()} tokens and gates of {self._length}: something replaced "
                "them from outside; use its methods (crop, reorder_cache, batch_select_indices)"
            )

    def _continued(self, log_f: torch.Tensor) -> torch.Tensor:
        """The sums of new gates (B, T, H), as (B, 2 H, T, 1)."""
        c = _summed(log_f.detach())
        if self._length:
            high, low = self.sums[:, :, -1:, 0].double().chunk(2, 1)
            c = c + (high + low)
        return torch.cat(_two_floats(c), 1)[..., None]

    def _move(self, like: list[torch.Tensor], end: int) -> None:
        """What there is into memory for `end` tokens and some more; as wide and of the dtype as `like`."""
        old = [room[:, :, : self._length] for room in self._rooms]
        fits = -(-max(end + max(SPARE_TOKENS, end // SPARE_PART), self.reserve) // 64) * 64
        self._rooms = [x.new_empty((*x.shape[:2], fits, x.shape[3])) for x in like]
        for room, x in zip(self._rooms, old, strict=False):
            room[:, :, : self._length] = x
        self._writable = True

    def _append(self, new: list[torch.Tensor], end: int) -> None:
        recorded = torch.is_grad_enabled()
        if not self._fits(end):
            if recorded:
                old = [room[:, :, : self._length] for room in self._rooms]
                self._rooms = [torch.cat(pair, 2) for pair in zip(old, new, strict=True)] if old else new
                self._writable = False
            else:
                self._move(new, end)
        if not recorded:
            for room, x in zip(self._rooms, new, strict=True):
                room.narrow(2, self._length, end - self._length).copy_(x)
        self._show(end)

    def _show(self, length: int) -> None:
        self._length = length
        self.keys, self.values, self.sums = (room.narrow(2, 0, length) for room in self._rooms)

    def _each(self, change: Any) -> None:
        """Applies `change` to every tensor kept; the first dimension of each is the batch."""
        if self._rooms:
            self._check_length()
            self._rooms = [change(room) for room in self._rooms]
            self._writable = not torch.is_grad_enabled()
            self._show(self._length)

    def crop(self, *args: Any, **kwargs: Any) -> None:
        super().crop(*args, **kwargs)
        if self._rooms:
            self._show(self.keys.shape[2])

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._each(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._each(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._each(lambda x: x[indices, ...].contiguous())

    def offload(self) -> None:
        self._each(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        self._each(lambda x: x.to(self.device, non_blocking=True))

    def reset(self) -> None:
        self._forget()

    def cumulative(self) -> tuple[torch.Tensor, torch.Tensor]:
        """c as (rounded, what that lost), each (B, H, S) float32."""
        high, low = self.sums[..., 0].chunk(2, 1)
        return high, low


class GateCache:
    """One attention call's view of a transformers cache (or of none) that keeps the gates beside each key.

    In a cache that grows, they are summed up once, in a `GrowingLayer`. In any other (static, with a sliding window,
    offloaded) the float32 bits of log f, one number per query head of the key's group, are appended to the key as
    G * 4 / itemsize channels of the key's dtype (float64 keys take the number itself), so that static buffers, windows,
    beam reorder, batch select and offload treat gates and keys as one. Unwritten slots of a static cache read as
    log f = 0.

    Key and value shift need the previous token's projections: `carried` holds this call's, and each is appended to
    the key as head_dim further channels (a cache with both shifts is 2 x the size of one without).

    Attributes:
        hidden_states: (B, T, hidden), what entered the attention block.
        position_ids: (B, T) or (1, T), None where the model was given none; native forwards don't all pass them on.
        carried: (B, T, Hkv, D) tensors that the next call will need.
        layer: the GrowingLayer that `update` has appended to, or None.

    Raises:
        ValueError: the cache quantises its keys, which would destroy the bits; it is offloaded and something is
            carried; gates are to be trained through a static cache; or another model filled the cache.
    """

    def __init__(
        self,
        cache: Any,
        log_f: torch.Tensor,
        hidden_states: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ):
        self._cache = cache
        self._log_f = log_f
        self.hidden_states = hidden_states
        self.position_ids = position_ids
        self.carried: list[torch.Tensor] = []
        self.layer: GrowingLayer | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    @property
    def new_log_f(self) -> torch.Tensor:
        """(B, T, H) float32 of this call's tokens alone."""
        return self._log_f

    @property
    def log_f(self) -> torch.Tensor:
        """(B, S, H) float32 for all keys that `update` returned."""
        new, layer = self._log_f, self.layer
        if layer is None or layer.get_seq_length() == new.shape[1]:
            return new
        old = layer.get_seq_length() - new.shape[1]
        high, low = layer.cumulative()
        c = (high[..., :old].double() + low[..., :old].double()) / LOG2_E
        before = torch.diff(c, dim=-1, prepend=torch.zeros_like(c[..., :1])).clamp_max(0.0)
        return torch.cat([before.transpose(1, 2).to(new.dtype), new], dim=1)

    def cumulative(self) -> tuple[torch.Tensor, torch.Tensor]:
        """log2(e) times the running sum of log_f, (B, H, S) as (rounded, what that lost)."""
        if torch.is_grad_enabled() and self._log_f.requires_grad:
            c = _summed(self.log_f)
            return c, torch.zeros_like(c)
        return _two_floats(_summed(self._log_f)) if self.layer is None else self.layer.cumulative()

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        if self._cache is None:
            return keys, values
        _refuse_quantised(self._cache, layer_idx)
        head_dim = keys.shape[-1]
        carried = [x.transpose(1, 2).to(keys.dtype) for x in self.carried]
        growing = growing_layer(self._cache, layer_idx)
        if growing is not None:
            # Under autocast the rotary's float32 widens keys, which the attention takes in the values' dtype.
            wide = torch.cat([keys, *carried], dim=-1).to(values.dtype) if carried else keys.to(values.dtype)
            wide, values = growing.update(wide, values, log_f=self._log_f, head_dim=head_dim)
            self.layer = growing
            return wide[..., :head_dim], values
        new = self._log_f
        bits = _to_channels(new, keys)
        wide = torch.cat([keys, bits, *carried], dim=-1)
        wide, values = self._cache.update(wide, values, layer_idx, *args, **kwargs)
        self._log_f = _from_channels(wide[..., head_dim : head_dim + bits.shape[-1]], new.shape[-1])
        if torch.is_grad_enabled() and new.requires_grad:
            # bits carry no gradient: this call's gates take their place again, at the end where caches append
            if hasattr(self._cache.layers[layer_idx], "max_cache_len"):
                raise ValueError("gates can't be trained through a static cache: use the default cache, or none")
            self._log_f = torch.cat([self._log_f[:, : -new.shape[1]], new], dim=1)
        return wide[..., :head_dim], values

    def previous(self, layer_idx: int, width: int) -> torch.Tensor | None:
        """(B, Hkv, width): the last `width` channels of the newest cached token, None when the cache is empty."""
        layers = () if self._cache is None else self._cache.layers
        own = layers[layer_idx] if layer_idx < len(layers) else None
        if isinstance(own, GrowingLayer) and own.clock is not None:
            return own.newest(width)  # type: ignore[attr-defined]
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


def growing_layer(cache: Any, layer_idx: int) -> GrowingLayer | None:
    """The layer's GrowingLayer, put in the place of an empty DynamicLayer; None for a cache of another kind."""
    if type(cache).update is not Cache.update or getattr(cache, "offloading", False):
        return None
    if getattr(cache, "layer_class_to_replicate", None) is DynamicLayer:
        while len(cache.layers) <= layer_idx:
            cache.layers.append(GrowingLayer())
    layer = cache.layers[layer_idx]
    if type(layer) is DynamicLayer:
        if layer.get_seq_length():
            raise ValueError(
                "the cache holds keys without forget gates (of another model, or copied out of a cache): start with an "
                "empty one"
            )
        layer = cache.layers[layer_idx] = GrowingLayer()
        layer.reserve = getattr(cache, "tokens_to_reserve", 0)
    return layer if isinstance(layer, GrowingLayer) else None


def _summed(log_f: torch.Tensor) -> torch.Tensor:
    """(B, T, H) -> (B, H, T) float64 in base 2."""
    log_f = log_f.transpose(1, 2).clamp_min(LOG_F_MIN)
    return torch.cumsum(log_f, -1, dtype=torch.float64) * LOG2_E


def _two_floats(c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    high = c.float()
    return high, (c - high).float()


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
