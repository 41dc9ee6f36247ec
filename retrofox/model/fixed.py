"""A cache whose length lives on the device, so that one decoding step is the same launches at every length."""

from __future__ import annotations

from typing import Any

import torch

from .cache import GrowingLayer, _from_channels, _summed, _to_channels, _two_floats, append, appends

try:
    from fox_kernels.decoding.fixed import decode_at, decodes_at
except ImportError:  # no fox_kernels, an older one, or no Triton
    decode_at: Any = None

    def decodes_at(q: torch.Tensor, k: torch.Tensor) -> bool:
        """No kernel that reads the length on the device is installed."""
        return False


LEAST_ROOM = 256
SHIFT_EVERY = 256  # tokens, at least: how often what has left a sliding window is written over


class Bank:
    """The device's side of all clocks of a cache, which advance together; a length is 16 bytes from the next.

    Args:
        most: clocks there may be.
        tokens: of the text so far, dropped ones and padding included.
    """

    def __init__(self, most: int, tokens: int, device: torch.device):
        self.lengths = torch.zeros(most, 4, dtype=torch.int32, device=device)
        self.position = torch.tensor([[tokens]], dtype=torch.int64, device=device)
        self.taken = 0

    def length(self, tokens: int) -> torch.Tensor:
        self.taken += 1
        return self.lengths[self.taken - 1, :1].fill_(tokens)

    def advance(self) -> None:
        """Counts one more token, on the device."""
        self.lengths.add_(1)
        self.position.add_(1)


class Clock:
    """How many tokens some layers hold: on the device for their kernels, on the host between steps.

    Attributes:
        length: (1,) int32: tokens cached before those of the running step.
        position: (1, 1) int64: place of the running step's token in its row, padding included.
        seq_start: (B,) int32: first visible token of each row; None without padding.
        tokens: `length` as the host knows it.
        reads: how much of the rooms a step reads, in tokens; a captured graph holds for one value.
    """

    def __init__(self, bank: Bank, tokens: int, dropped: int, seq_start: torch.Tensor | None):
        self.tokens, self.reads = tokens, 0
        self.length, self.position = bank.length(tokens), bank.position
        self.seq_start = None if seq_start is None else (seq_start - dropped).clamp_min_(0)

    def shift(self, tokens: int) -> None:
        """The first `tokens` are gone from the rooms."""
        self.tokens -= tokens
        self.length.fill_(self.tokens)
        if self.seq_start is not None:
            self.seq_start.copy_((self.seq_start - tokens).clamp_min_(0))


class FixedLayer(GrowingLayer):
    """A cache layer in rooms of a fixed size: `update` writes where the clock's device-side length says.

    It takes the place of a GrowingLayer, whose rooms it uses where they are large enough, or of a transformers layer
    with a sliding window, and gives back what it holds with `returned`. In the latter's place it keeps the window and
    up to `SHIFT_EVERY` tokens (or a quarter of the window) that have left it.

    Args:
        source: the layer to stand in for, not empty.
        clock: shared by all layers of one length.
        room: tokens to have room for.
        heads, head_dim: query heads; channels of a key.
    """

    def __init__(self, source: Any, clock: Clock, room: int, heads: int, head_dim: int):
        super().__init__()
        self.source, self.clock, self.head_dim, self.heads = source, clock, head_dim, heads
        self.window = getattr(source, "sliding_window", None)
        held = self._taken(source)
        self.dtype, self.device, self.is_initialized = held[0].dtype, held[0].device, True
        self._rooms, self._length = held, clock.tokens
        self.grow(room)

    def _taken(self, source: Any) -> list[torch.Tensor]:
        """The source's keys, values and sums."""
        if isinstance(source, GrowingLayer):
            source._check_length()
            return list(source._rooms)
        bits = self.heads // source.keys.shape[1] * max(1, 4 // source.keys.element_size())
        key, channels, carried = source.keys.split(
            [self.head_dim, bits, source.keys.shape[-1] - self.head_dim - bits], dim=-1
        )
        c = _summed(_from_channels(channels, self.heads))
        return [torch.cat([key, carried], -1), source.values, torch.cat(_two_floats(c), 1)[..., None]]

    def grow(self, room: int) -> None:
        """Makes room for at least `room` tokens; what is not yet written is 0."""
        kept = self.clock.tokens
        usable = isinstance(self.source, GrowingLayer) and self.source._writable
        usable = usable and (torch.is_inference_mode_enabled() or not self._rooms[0].is_inference())
        if self._rooms[0].shape[2] >= room and usable:
            rooms = self._rooms
        else:
            fits = -(-room // 64) * 64
            rooms = [x.new_empty((*x.shape[:2], fits, x.shape[3])) for x in self._rooms]
            for new, old in zip(rooms, self._rooms, strict=True):
                new[:, :, :kept] = old[:, :, :kept]
        for x in rooms:
            x[:, :, kept:] = 0
        self._rooms = rooms
        if isinstance(self.source, GrowingLayer):  # the old ones go now, not at the end
            self.source._rooms, self.source._writable = rooms, True
            self.source._show(kept)

    @property
    def room(self) -> int:
        return self._rooms[0].shape[2]

    def get_seq_length(self) -> int:
        return self.clock.tokens

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any):  # type: ignore[override]
        log_f = kwargs["log_f"]
        if appends(key_states, value_states, log_f):
            append(self._rooms, self.clock.length, key_states, value_states, log_f, None, self.head_dim)
        else:
            self._write(key_states, value_states, log_f)
        self.keys, self.values, self.sums = (x[:, :, : self.clock.reads] for x in self._rooms)
        return self.keys, self.values

    def _write(self, keys: torch.Tensor, values: torch.Tensor, log_f: torch.Tensor) -> None:
        length = self.clock.length.long()
        high, low = self._rooms[2].index_select(2, (length - 1).clamp_min(0))[..., 0].chunk(2, 1)
        before = torch.where(length > 0, high.double() + low.double(), 0.0)
        c = torch.cat(_two_floats(_summed(log_f) + before), 1)[..., None]
        at = length + torch.arange(keys.shape[2], device=keys.device)
        for room, x in zip(self._rooms, (keys, values, c), strict=True):
            room.index_copy_(2, at, x)

    def newest(self, width: int) -> torch.Tensor:
        """(B, Hkv, width): the last `width` channels of the newest cached token."""
        return self._rooms[0].index_select(2, self.clock.length.long() - 1)[:, :, 0, -width:]

    def shift(self, tokens: int) -> None:
        """Drops the first `tokens` from the rooms; the clock is told by the caller."""
        kept = self.clock.tokens - tokens
        for room in self._rooms:
            room[:, :, :kept] = room[:, :, tokens : tokens + kept].clone()

    def returned(self, tokens: int, ahead: int) -> Any:
        """The source, with what has been written since: `tokens` in all, the last `ahead` in the rooms left out."""
        source = self.source
        if isinstance(source, GrowingLayer):
            source._show(tokens)
            return source
        end = self.clock.tokens - ahead
        begin = max(0, end - self.window + 1)
        keys, values, sums = (x[:, :, begin:end] for x in self._rooms)
        high, low = sums[..., 0].double().chunk(2, 1)
        c = high + low
        log_f = torch.diff(c, dim=-1, prepend=c[..., :1]).clamp_max(0.0) / 1.4426950408889634
        key, carried = keys[..., : self.head_dim], keys[..., self.head_dim :]
        bits = _to_channels(log_f.transpose(1, 2).float(), key)
        source.keys, source.values = torch.cat([key, bits, carried], -1), values.clone()
        source.cumulative_length = tokens
        return source


def visible_at(clock: Clock, num_queries: int, window: int | None) -> torch.Tensor:
    """(B or 1, 1, T, reads) bool: what the running step's queries see."""
    j = torch.arange(clock.reads, device=clock.length.device)
    i = clock.length + torch.arange(num_queries, device=j.device)[:, None]
    mask = (j <= i)[None, None]
    if window is not None:
        mask = mask & (i - j < window)
    return mask if clock.seq_start is None else mask & (j >= clock.seq_start[:, None, None, None])
