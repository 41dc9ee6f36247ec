"""A cache whose length lives on the device, so that one decoding step is the same launches at every length."""

from __future__ import annotations

from typing import Any

import torch

from retrofox.acceleration.growing_cache import LOG2_E, GrowingLayer, restored, stored, summed
from retrofox.acceleration.installed_kernels import append, appends

LEAST_CAPACITY = 256
SHIFT_EVERY = 256  # tokens, at least: how often what has left a sliding window is written over


class DeviceLengths:
    """The device's side of all lengths of a cache, which advance together; a length is 16 bytes from the next.

    Args:
        most: lengths there may be.
        tokens: of the text so far, dropped ones and padding included.
    """

    def __init__(self, most: int, tokens: int, device: torch.device):
        self.lengths = torch.zeros(most, 4, dtype=torch.int32, device=device)
        self.position = torch.tensor([[tokens]], dtype=torch.int64, device=device)
        self.taken = 0

    def one(self, tokens: int) -> torch.Tensor:
        """(1,) int32 on the device, set to `tokens`."""
        self.taken += 1
        return self.lengths[self.taken - 1, :1].fill_(tokens)

    def advance(self) -> None:
        """Counts one more token, on the device."""
        self.lengths.add_(1)
        self.position.add_(1)


class SharedLength:
    """How many tokens some layers hold: on the device for their kernels, on the host between steps.

    Attributes:
        on_device: (1,) int32: tokens cached before those of the running step.
        position: (1, 1) int64: place of the running step's token in its row, padding included.
        seq_start: (B,) int32: first visible token of each row; None without padding.
        tokens: `on_device` as the host knows it; dropped: tokens of the text before these.
        reads: how much of the buffers a step reads, in tokens; a captured graph holds for one value.
    """

    def __init__(self, lengths: DeviceLengths, tokens: int, dropped: int, seq_start: torch.Tensor | None):
        self.tokens, self.dropped, self.reads = tokens, dropped, 0
        self.on_device, self.position = lengths.one(tokens), lengths.position
        self.seq_start = None if seq_start is None else (seq_start - dropped).clamp_min_(0)

    def shift(self, tokens: int) -> None:
        """The first `tokens` are gone from the buffers."""
        self.tokens -= tokens
        self.dropped += tokens
        self.on_device.fill_(self.tokens)
        if self.seq_start is not None:
            self.seq_start.copy_((self.seq_start - tokens).clamp_min_(0))


class FixedLayer(GrowingLayer):
    """A cache layer in buffers of a fixed size: `update` writes where the device-side length says.

    It replaces a GrowingLayer, whose buffers it uses where they are large enough, or a transformers layer with a
    sliding window; `returned` gives the tokens back. For a sliding-window layer it keeps up to `window + SHIFT_EVERY`
    tokens, or `window` and a quarter where that is more.

    Args:
        source: the layer to stand in for, not empty.
        length: shared by all layers of one length.
        capacity: tokens to have room for.
        head_dim: channels of a key.

    Attributes:
        first: (B * Hkv,) int32, or None before the first step: where the horizon of each kv head begins (`decode_at`).
    """

    first: torch.Tensor | None = None
    offset = None  # rows share no room

    def __init__(self, source: Any, length: SharedLength, capacity: int, head_dim: int):
        super().__init__()
        self.source, self.length, self.head_dim = source, length, head_dim
        self.window, self.position = getattr(source, "sliding_window", None), length.position
        held = self._taken(source)
        self.dtype, self.device, self.is_initialized = held[0].dtype, held[0].device, True
        self._buffers, self._length = held, length.tokens
        self.grow(capacity)

    def _taken(self, source: Any) -> list[torch.Tensor]:
        """The source's keys, values and sums."""
        if isinstance(source, GrowingLayer):
            source._check_length()
            return list(source._buffers)
        batch, heads, tokens, _ = source.keys.shape
        count = source.twin.values.shape[-1] // (heads * self.head_dim)
        carried = source.twin.values[:, 0].view(batch, tokens, count, heads, self.head_dim).permute(0, 3, 1, 2, 4)
        sums = stored(summed(source.twin.keys[:, 0]))
        return [torch.cat([source.keys, carried.flatten(3).to(source.keys.dtype)], -1), source.values, sums]

    def grow(self, capacity: int) -> None:
        """Makes room for at least `capacity` tokens; what is not yet written is 0."""
        kept = self.length.tokens
        usable = isinstance(self.source, GrowingLayer) and self.source._writable
        usable = usable and (torch.is_inference_mode_enabled() or not self._buffers[0].is_inference())
        if self._buffers[0].shape[2] >= capacity and usable:
            buffers = self._buffers
        else:
            fits = -(-capacity // 64) * 64
            buffers = [x.new_empty((*x.shape[:2], fits, x.shape[3])) for x in self._buffers]
            for new, old in zip(buffers, self._buffers, strict=True):
                new[:, :, :kept] = old[:, :, :kept]
        for x in buffers:
            x[:, :, kept:] = 0
        self._buffers = buffers
        if isinstance(self.source, GrowingLayer):  # the old ones go now, not at the end
            self.source._buffers, self.source._writable = buffers, True
            self.source._show(kept)

    @property
    def capacity(self) -> int:
        return self._buffers[0].shape[2]

    def get_seq_length(self) -> int:
        return self.length.tokens

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any):  # type: ignore[override]
        log_f, wide, head_dim = self._taken_in(key_states)
        if log_f is None:  # `fused_projections.appended` has written them
            pass
        elif appends(wide, value_states, log_f):
            append(self._buffers, self.length.on_device, wide, value_states, log_f)
        else:
            self._write(wide, value_states, log_f)
        self.keys, self.values, self.sums = (x[:, :, : self.length.reads] for x in self._buffers)
        return self.keys[..., :head_dim], self.values

    def _write(self, keys: torch.Tensor, values: torch.Tensor, log_f: torch.Tensor) -> None:
        length = self.length.on_device.long()
        newest = restored(self._buffers[2].index_select(2, (length - 1).clamp_min(0)))
        c = stored(summed(log_f) + torch.where(length > 0, newest, 0.0))
        at = length + torch.arange(keys.shape[2], device=keys.device)
        for buffer, x in zip(self._buffers, (keys, values, c), strict=True):
            buffer.index_copy_(2, at, x)

    def previous(self, count: int, head_dim: int) -> list[torch.Tensor]:
        newest = self._buffers[0].index_select(2, self.length.on_device.long() - 1)[:, :, 0, -count * head_dim :]
        return list(newest.split(head_dim, -1))

    def shift(self, tokens: int) -> None:
        """Drops the first `tokens` from the buffers; the caller tells the length."""
        kept = self.length.tokens - tokens
        for buffer in self._buffers:
            buffer[:, :, :kept] = buffer[:, :, tokens : tokens + kept].clone()
        if self.first is not None:
            self.first.sub_(tokens).clamp_min_(0)

    def returned(self, tokens: int) -> Any:
        """The source with the first `tokens` tokens of the text; what was written behind them is left out."""
        source = self.source
        if isinstance(source, GrowingLayer):
            source._show(tokens)
            return source
        end = tokens - self.length.dropped
        begin = max(0, end - self.window + 1)
        keys, values, sums = (x[:, :, begin:end] for x in self._buffers)
        c = restored(sums)
        log_f = torch.diff(c, dim=-1, prepend=c[..., :1]).clamp_max(0.0) / LOG2_E
        count = keys.shape[-1] // self.head_dim - 1
        carried = keys[..., self.head_dim :].unflatten(-1, (count, self.head_dim)).permute(0, 2, 3, 1, 4).flatten(2)
        source.keys, source.values = keys[..., : self.head_dim].clone(), values.clone()
        source.twin.keys, source.twin.values = log_f.transpose(1, 2)[:, None].float(), carried[:, None].contiguous()
        source.cumulative_length = source.twin.cumulative_length = tokens
        return source


def visible_at(length: SharedLength, num_queries: int, window: int | None) -> torch.Tensor:
    """(B or 1, 1, T, reads) bool: what the running step's queries see."""
    j = torch.arange(length.reads, device=length.on_device.device)
    i = length.on_device + torch.arange(num_queries, device=j.device)[:, None]
    mask = (j <= i)[None, None]
    if window is not None:
        mask = mask & (i - j < window)
    return mask if length.seq_start is None else mask & (j >= length.seq_start[:, None, None, None])
