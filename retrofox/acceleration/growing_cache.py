"""A dynamic cache layer that grows in place and keeps the running sum of the gates, so that decoding copies nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer
from transformers.modeling_outputs import BaseModelOutputWithPast

from retrofox.acceleration.installed_kernels import append, appends, available, cumulative

CACHE = "cache" if hasattr(BaseModelOutputWithPast, "cache") else "past_key_values"
"""transformers' name of a model's cache, as an argument and in outputs: "cache" from 5.24 on."""
LOG2_E = 1.4426950408889634
LOG_F_MIN = -1e4  # as in the operator: exp underflows long before
INTERRUPTED = "an interrupted call left some layers of this cache without its tokens: start a new one"
SPARE_TOKENS, SPARE_PART = 64, 16  # room for more tokens, or a sixteenth of those there: new memory costs time


class GrowingLayer(DynamicLayer):
    """A dynamic cache layer that keeps c beside the keys, and room for more: a new token is written, nothing copied.

        c_t = log2(e) * sum_{l <= t} log f_l, in two floats

    It replaces a cache's empty `DynamicLayer` and has its interface; where gradients are recorded it copies as that
    does. Projections that key and value shift need of a token's predecessor lie behind the channels of its key.

    Attributes:
        keys, values: (B, Hkv, S, width), views of the first S tokens of what is allocated.
        sums: (B, 2 * gates, S, 1) float32, likewise: c per gate as two floats, all rounded ones, then their residuals.

    Raises:
        ValueError: keys arrive without gates, `keys` was replaced from outside, or the first layer holds other tokens.
    """

    length: Any = None  # of a `static_cache.StaticLayer`
    incoming: Any = None  # (log f (B, T, gates), [projections (B, T, Hkv, D) the next call needs]) of the running call
    reserve = 0  # tokens to have room for from the first on
    leader: Any = None  # the cache's first layer, of the others

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.reset()

    @classmethod
    def holding(cls, buffers: list[torch.Tensor], tokens: int) -> GrowingLayer:
        """A layer whose keys, values and sums are the first `tokens` of `buffers`."""
        layer: Any = cls()
        layer.dtype, layer.device, layer.is_initialized = buffers[0].dtype, buffers[0].device, True
        layer._buffers, layer._writable = buffers, True
        layer._show(tokens)
        return layer

    def reset(self) -> None:
        self.is_initialized = False
        self.keys: Any = None
        self.values: Any = None
        self.sums: Any = None
        self._buffers: list[torch.Tensor] = []  # keys, values and sums, each (B, heads, tokens that fit, width)
        self._length, self._writable = 0, False

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any):  # type: ignore[override]
        log_f, wide, head_dim = self._taken_in(key_states)
        if not self.is_initialized:
            self.lazy_initialization(wide, value_states)
        self._check(wide)
        end = self._length + wide.shape[2]
        if self.leader is not None and self.leader.get_seq_length() != end:
            raise ValueError(INTERRUPTED)
        if self._fits(end) and appends(wide, value_states, log_f):
            append(self._buffers, self._length, wide, value_states, log_f)
            self._show(end)
        else:
            self._append([wide, value_states, self._continued(log_f)], end)
        return self.keys[..., :head_dim], self.values

    def _taken_in(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        """(log f (B, T, gates), keys with what they carry (B, Hkv, T, width), channels of a key)."""
        incoming, self.incoming = self.incoming, None
        if incoming is None:
            raise ValueError("this cache holds the forget gates of a converted model: give another model a new cache")
        self.newest_log_f, carried = incoming
        wide = torch.cat([keys, *(x.transpose(1, 2).to(keys.dtype) for x in carried)], -1) if carried else keys
        return self.newest_log_f, wide, keys.shape[-1]

    def _fits(self, end: int) -> bool:
        """Whether tokens up to `end` may be written where they belong."""
        if not self._writable or torch.is_grad_enabled() or end > self._buffers[0].shape[2]:
            return False
        return torch.is_inference_mode_enabled() or not self._buffers[0].is_inference()

    def _check(self, new_keys: torch.Tensor) -> None:
        self._check_length()
        if not self._buffers:
            return
        kept = self._buffers[0].shape
        if new_keys.shape[:2] != kept[:2] or new_keys.shape[3] != kept[3]:
            raise ValueError(
                f"keys (rows, heads, tokens, width) of {tuple(new_keys.shape)} don't fit a cache of {tuple(kept)}: "
                "see batch_repeat_interleave and batch_select_indices"
            )
        if self._buffers[0].device != new_keys.device:
            self._each(lambda x: x.to(new_keys.device))

    def _check_length(self) -> None:
        if self.get_seq_length() != self._length:
            raise ValueError(
                f"the cache has keys of {self.get_seq_length()} tokens and gates of {self._length}: something replaced "
                "them from outside; use its methods (crop, reorder_cache, batch_select_indices)"
            )

    def _continued(self, log_f: torch.Tensor) -> torch.Tensor:
        """The sums of new gates (B, T, gates), as (B, 2 * gates, T, 1)."""
        if not self._length and type(log_f) is torch.Tensor and not torch.compiler.is_compiling() and available(log_f):
            with torch.cuda.device_of(log_f):
                return torch.cat(cumulative(log_f.detach()), 1)[..., None]
        c = summed(log_f.detach())
        return stored(c + restored(self.sums[:, :, -1:]) if self._length else c)

    def _move(self, like: list[torch.Tensor], end: int) -> None:
        """Moves the tensors into buffers for `end` tokens and some more, with the width and dtype of `like`."""
        fits = -(-max(end + max(SPARE_TOKENS, end // SPARE_PART), self.reserve) // 64) * 64
        buffers = [x.new_empty((*x.shape[:2], fits, x.shape[3])) for x in like]
        for buffer, old in zip(buffers, self._buffers, strict=False):
            buffer[:, :, : self._length] = old[:, :, : self._length]
        self._buffers, self._writable = buffers, True  # at once: Ctrl-C may come in between

    def _append(self, new: list[torch.Tensor], end: int) -> None:
        recorded = torch.is_grad_enabled()
        if not self._fits(end):
            if recorded:
                old = [buffer[:, :, : self._length] for buffer in self._buffers]
                self._buffers = [torch.cat(pair, 2) for pair in zip(old, new, strict=True)] if old else new
                self._writable = False
            else:
                self._move(new, end)
        if not recorded:
            for buffer, x in zip(self._buffers, new, strict=True):
                buffer.narrow(2, self._length, end - self._length).copy_(x)
        self._show(end)

    def _show(self, length: int) -> None:
        keys, values, sums = (buffer.narrow(2, 0, length) for buffer in self._buffers)
        self._length, self.keys, self.values, self.sums = length, keys, values, sums

    def _each(self, change: Any) -> None:
        """Applies `change` to every tensor kept; the first dimension of each is the batch."""
        if self._buffers:
            self._check_length()
            self._buffers = [change(buffer) for buffer in self._buffers]
            self._writable = not torch.is_grad_enabled()
            self._show(self._length)

    def crop(self, *args: Any, **kwargs: Any) -> None:
        super().crop(*args, **kwargs)
        if self._buffers:
            self._show(self.keys.shape[2])

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._each(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._each(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._each(lambda x: x[indices, ...].contiguous())

    def cumulative(self) -> tuple[torch.Tensor, torch.Tensor]:
        """c as two floats (rounded, residual), each (B, gates, S) float32."""
        if torch.is_grad_enabled() and self.newest_log_f.requires_grad:
            c = summed(self.log_f())
            return c, torch.zeros_like(c)
        high, low = self.sums[..., 0].chunk(2, 1)
        return high, low

    def log_f(self) -> torch.Tensor:
        """(B, S, gates) float32 of all keys, with the gradients of those of the last `update`."""
        new = self.newest_log_f
        old = self._length - new.shape[1]
        if not old:
            return new
        c = restored(self.sums[:, :, :old]) / LOG2_E
        before = torch.diff(c, dim=-1, prepend=torch.zeros_like(c[..., :1])).clamp_max(0.0)
        return torch.cat([before.transpose(1, 2).to(new.dtype), new], dim=1)

    def previous(self, count: int, head_dim: int) -> list[torch.Tensor] | None:
        """`count` projections (B, Hkv, D) that the newest token carries, None where there is no token."""
        if not self._length:
            return None
        return list(self.keys[:, :, -1, -count * head_dim :].split(head_dim, -1))


def with_gates(slow: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """`with_gates` by a GrowingLayer for a DynamicLayer; other layers and offloaded caches as before."""

    def with_gates(layer: Any, cache: Any) -> Any:
        plain = type(layer) is DynamicLayer and type(cache).update is Cache.update
        if not plain or getattr(cache, "offloading", False):
            return slow(layer, cache)
        growing = GrowingLayer()
        growing.reserve = getattr(cache, "tokens_to_reserve", 0)
        growing.leader = None if layer is cache.layers[0] else cache.layers[0]
        return growing

    return with_gates


def summed(log_f: torch.Tensor) -> torch.Tensor:
    """(B, T, H) -> (B, H, T) float64 in base 2."""
    return torch.cumsum(log_f.transpose(1, 2).clamp_min(LOG_F_MIN), -1, dtype=torch.float64) * LOG2_E


def stored(c: torch.Tensor) -> torch.Tensor:
    """c (B, H, T) float64 as layers keep it, (B, 2 * H, T, 1) float32: rounded, then the residuals."""
    high = c.float()
    return torch.cat([high, (c - high).float()], 1)[..., None]


def restored(sums: torch.Tensor) -> torch.Tensor:
    """c (B, H, T) float64 of what a layer keeps."""
    high, low = sums[..., 0].double().chunk(2, 1)
    return high + low
