"""A cache whose length lives on the device, so that one decoding step is the same launches at every length."""

from __future__ import annotations

from typing import Any

import torch

from .cache import GrowingLayer, _from_channels, _summed, _to_channels, _two_floats, append, appends
from .forgetting import split

try:
    from fox_kernels.decoding.fixed import decode_at, decodes_at
except ImportError:  # no fox_kernels, an older one, or no Triton
    decode_at: Any = None

    def decodes_at(q: torch.Tensor, k: torch.Tensor) -> bool:
        """No kernel that reads the length on the device is installed."""
        return False


LEAST_ROOM = 256
PART_ROOM = 1024  # tokens, and a quarter of those there: until a step is captured anew
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
        held, self._bound = self._taken(source)
        self.dtype, self.device, self.is_initialized = held[0].dtype, held[0].device, True
        self._rooms, self._length = held, clock.tokens
        self.grow(room)

    def _taken(self, source: Any) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """The source's tensors, and a bound on its keys if one is kept."""
        if isinstance(source, GrowingLayer):
            source._check_length()
            bound = None if source._bounded < source._length else source._bound
            return list(source._rooms), bound
        bits = self.heads // source.keys.shape[1] * max(1, 4 // source.keys.element_size())
        key, channels, carried = source.keys.split(
            [self.head_dim, bits, source.keys.shape[-1] - self.head_dim - bits], dim=-1
        )
        c = _summed(_from_channels(channels, self.heads))
        return [torch.cat([key, carried], -1), source.values, torch.cat(_two_floats(c), 1)[..., None]], None

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

    def bound_keys(self) -> None:
        """Starts to keep a bound on the norms of the keys, which pruning reads."""
        if self._bound is None:
            held = self._rooms[0][:, :, : self.clock.tokens, : self.head_dim]
            self._bound = torch.linalg.vector_norm(held, dim=-1, dtype=torch.float32).amax(-1)
        assert self._bound is not None
        self._bound = self._bound.contiguous()

    def get_seq_length(self) -> int:
        return self.clock.tokens

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any):  # type: ignore[override]
        log_f = kwargs["log_f"]
        if appends(key_states, value_states, log_f):
            append(self._rooms, self.clock.length, key_states, value_states, log_f, self._bound, self.head_dim)
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
        if self._bound is not None:
            new = torch.linalg.vector_norm(keys[..., : self.head_dim], dim=-1, dtype=torch.float32).amax(-1)
            self._bound.copy_(torch.maximum(self._bound, new))

    def key_bound(self, head_dim: int) -> torch.Tensor:
        assert self._bound is not None, "bound_keys comes first"
        return self._bound

    def newest(self, width: int) -> torch.Tensor:
        """(B, Hkv, width): the last `width` channels of the newest cached token."""
        return self._rooms[0].index_select(2, self.clock.length.long() - 1)[:, :, 0, -width:]

    def shift(self, tokens: int, sink: int = 0) -> None:
        """Drops as many tokens from the rooms, the first after the sink tokens; the clock is told by the caller."""
        kept = self.clock.tokens - tokens
        for room in self._rooms:
            room[:, :, sink:kept] = room[:, :, sink + tokens : tokens + kept].clone()

    def returned(self, tokens: int, ahead: int) -> Any:
        """The source, with what has been written since: `tokens` in all, the last `ahead` in the rooms left out."""
        source = self.source
        if isinstance(source, GrowingLayer):
            source._bound = self._bound
            source._show(tokens)
            source._bounded = tokens if self._bound is not None else 0
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


class FixedParts(GrowingLayer):
    """A ForgettingLayer whose parts are FixedLayers, each with a clock of its own.

    A part that splits takes new clocks, so a layer may take twice as many as it has kv heads.

    Args:
        source: the ForgettingLayer to stand in for.
        clock: that of the text, dropped tokens included.
        bank: where the parts' lengths are.
        most: tokens the text may have.
    """

    def __init__(self, source: Any, clock: Clock, bank: Bank, most: int):
        super().__init__()
        self.source, self.clock, self.most, self.head_dim = source, clock, most, source.head_dim
        self.bank, self.is_initialized = bank, True
        self.parts = [self._fixed(part) for part in source.parts]

    def _fixed(self, part: GrowingLayer) -> FixedLayer:
        clock = Clock(self.bank, part._length, 0, None)
        return FixedLayer(part, clock, self._enough(clock), part.sums.shape[1] // 2, self.head_dim)

    def _enough(self, clock: Clock) -> int:
        return min(self.most, clock.tokens + clock.tokens // 4 + PART_ROOM)

    def see(self) -> None:
        for part in self.parts:
            part.grow(self._enough(part.clock))
            part.clock.reads = min(part.room, self._enough(part.clock))

    def full(self) -> bool:
        return any(part.clock.tokens >= part.clock.reads for part in self.parts)

    def get_seq_length(self) -> int:
        return self.clock.tokens

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any):  # type: ignore[override]
        states = split(self.source.parts, key_states, value_states, kwargs["log_f"])
        for part, k, v, log_f in zip(self.parts, *states, strict=True):
            part.update(k, v, log_f=log_f.contiguous(), head_dim=self.head_dim)
        return key_states, value_states

    def newest(self, width: int) -> torch.Tensor:
        return torch.cat([part.newest(width) for part in self.parts], 1)

    def forget(self) -> None:
        """Not within a step: `drop` does it between steps."""

    def drop(self) -> bool:
        """Drops what has become irrelevant to all tokens but the newest, which may be taken back.

        Returns whether parts were split: a step is another one then.
        """
        source, changed = self.source, False
        seen = self.clock.tokens - 1
        if seen - source.looked_at < source.every:
            return False
        source.looked_at = seen
        for part in self.parts:
            part.source._show(part.clock.tokens - 1)
        parts: list[FixedLayer] = []
        for part, (held, runs) in zip(self.parts, source.look()[0], strict=True):
            count = runs[0][2]
            if any(n for *_, n in runs):
                source.dropped_at = seen
            if len(runs) == 1:
                if count:
                    part.shift(count, source.sink)
                    part.clock.shift(count)
                parts.append(part)
                continue
            held._show(part.clock.tokens)
            held._bound, held._bounded = part._bound, 0 if part._bound is None else held._length
            for piece in source.pieces(held, runs):
                parts.append(self._fixed(piece))
            changed = True
        self.parts, source.parts = parts, [part.source for part in parts]
        return changed

    def returned(self, tokens: int, ahead: int) -> Any:
        self.source.parts = [part.returned(part.clock.tokens - ahead, ahead) for part in self.parts]
        self.source.seen = tokens
        return self.source


def visible_at(clock: Clock, num_queries: int, window: int | None) -> torch.Tensor:
    """(B or 1, 1, T, reads) bool: what the running step's queries see."""
    j = torch.arange(clock.reads, device=clock.length.device)
    i = clock.length + torch.arange(num_queries, device=j.device)[:, None]
    mask = (j <= i)[None, None]
    if window is not None:
        mask = mask & (i - j < window)
    return mask if clock.seq_start is None else mask & (j >= clock.seq_start[:, None, None, None])
