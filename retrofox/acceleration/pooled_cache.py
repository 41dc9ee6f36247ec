"""Captured decoding over a cache that forgets: a step that reads, and keeps in memory, live keys alone.

A CUDA graph reads and writes at fixed addresses. So while one decodes, a layer's keys lie in a pool. Each row's kv head
has a segment of it: its sinks, its newest keys and room for more, for all tokens to come where these are few. Otherwise
the host frees keys that no query sees any more every ROOM tokens, between replays, and moves the others together. Only
where the pool is too small does it get a larger one, and the step is captured again.

Kernels see the segments as the rows of a batch with one kv head each, all ending at one length, and padding in front
that takes no memory: position j of row b lies in slot offset[b] + j.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

from retrofox.acceleration import forgetting_cache
from retrofox.acceleration.captured_step import Decoding, reads_for
from retrofox.acceleration.forgetting_cache import MARGIN, ForgettingLayer
from retrofox.acceleration.growing_cache import LOG2_E, GrowingLayer, restored, stored, summed
from retrofox.acceleration.head_groups import at_slots, slots_of
from retrofox.acceleration.installed_kernels import append, appends
from retrofox.acceleration.static_cache import DeviceLengths, SharedLength

ALIGN = 128  # slots: the most keys that a kernel's block has, and blocks begin at multiples of their size
MOST, ROOM = 1024, 512  # tokens that get room at once; where more are to come: tokens between two lay-outs
SPARE = 384  # slots for each segment to grow: a capture takes about as long as 70 tokens
FILLS = 1 << 16  # slots of a pool that has work for every processor of a GPU
Tensor = torch.Tensor


class PooledLayer(GrowingLayer):
    """Stands in for a ForgettingLayer while steps are captured, and empties it; `returned` fills that one again.

    There is room for `room` of the `left` tokens to come. seq_start (B,): the first visible token of each row.

    Attributes:
        offset, first, starts: (B * Hkv,) int32 on the device: offset, first and seq_start of `fixed.decode_at`.
        begin, held: (B * Hkv,) int64 on the host: where segments begin, keys in them when they were last laid out.
        fits: slots of the pool.
        crops_to: the shortest text that a crop may leave.
    """

    offset: Tensor
    starts: Tensor

    def __init__(self, source: ForgettingLayer, lengths: DeviceLengths, seq_start: Tensor | None, room: int, left: int):
        super().__init__()
        self.source, self.options = source, source.options
        self.sink: int = self.options["sink"]
        self.fits = 0
        self.dtype, self.device, self.is_initialized = source.dtype, source.device, True
        begun = source.begun(seq_start).cpu()
        self.crops_to, self.padding = source.begin, source.first
        if source.starts is None:
            self.crops_to, self.padding = int(begun.max()), seq_start
        self.places = torch.zeros(3, len(source), dtype=torch.int32, device=self.device)
        self.offset, self.first, self.starts = self.places
        self.length = SharedLength(lengths, source.seen, 0, None)
        self.length.seq_start = self.starts
        moved, begin, held = source.segments(begun, begun)
        source.reset()
        self._lay_out(moved, held, begin.argsort(), room, left)

    def _now(self) -> Tensor:
        """(B * Hkv,) int64: keys held by now."""
        return self.held + (self.length.tokens - self.longest)

    def _segments(self, held: Tensor, room: int) -> tuple[Tensor, int]:
        """(where segments of so many keys begin, slots that they take with room for more)."""
        skew = (held.max() - held) % ALIGN  # position and slot alike modulo ALIGN
        sizes = (skew + held + room + ALIGN - 1) // ALIGN * ALIGN
        return sizes.cumsum(0) - sizes + skew, int(sizes.sum())

    def _lay_out(self, moved: list[Tensor], held: Tensor, order: Tensor, room: int, left: int) -> None:
        """Writes keys, values and sums, segment behind segment, where they belong; in a new pool unless `left` is 0."""
        buffers, self._buffers = self._buffers, []  # Ctrl-C may come in between
        self.begin, need = self._segments(held, room)
        if left:
            spare = max(SPARE * len(held), need // 8 if self.fits else 0)  # one that had to grow may have to again
            spare = min(spare, (left - room) * len(held))
            self.fits = -(-(need + spare) // ALIGN) * ALIGN
            buffers = []  # freed first
            buffers = [x.new_empty((*x.shape[:2], self.fits, x.shape[3])) for x in moved]
        slots, _ = slots_of(self.begin[order], held[order], self.device)
        for buffer, x in zip(buffers, moved, strict=True):
            buffer.index_copy_(2, slots, x)
        self.held, self.longest = held, int(held.max())
        start = self.longest - held
        self.length.dropped += self.length.tokens - self.longest
        self.length.tokens = self.longest
        self.length.on_device.fill_(self.longest)
        self.places.copy_(torch.stack([self.begin - start, start + self.sink, start]))
        if self.longest + room > self.length.reads:
            self.length.reads = reads_for(self.longest + room + min(SPARE, left))
        self._buffers = buffers

    def get_seq_length(self) -> int:
        return self.length.tokens

    def unseen(self, page: int) -> Tensor:
        """(B * Hkv,) int64: keys behind the sinks that no query from the newest `page` tokens on sees."""
        held, horizon, window = self._now(), self.options["horizon"], self.options["window"]
        gone = torch.zeros(len(held), dtype=torch.int64, device=self.device)
        if horizon is not None:
            slots, part = slots_of(self.begin, held, self.device)
            segment = part // 2
            last = (self.begin + (held - page).clamp_min(1) - 1).to(self.device)[segment]
            high, low = self._buffers[2][0, ..., 0].chunk(2)
            fall = (high[:, last] - high[:, slots]) + (low[:, last] - low[:, slots])
            gone.index_add_(0, segment, (fall <= -horizon * LOG2_E - MARGIN).all(0).long())  # c falls: the first keys
        most = (held - page).to(self.device)
        if window is not None:
            gone = torch.maximum(gone, most - window + 1)
        return (torch.minimum(gone, most) - self.sink).clamp_min(0)

    def forget(self, unseen: Tensor, room: int, left: int) -> None:
        """Frees so many keys behind each segment's sinks; makes room, in a new pool if `left` tokens are to come."""
        held = self._now() - unseen
        slots, _ = slots_of(self.begin, held, self.device, unseen, self.sink)
        moved = [x.index_select(2, slots) for x in self._buffers]
        self._lay_out(moved, held, torch.arange(len(held)), room, left)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any):  # type: ignore[override]
        log_f, wide, _ = self._taken_in(key_states)
        if log_f is not None:  # else `fused_projections.appended` has written them
            write = append if appends(wide, value_states, log_f) else self._write
            write(self._buffers, self.length.on_device, wide, value_states, log_f, offset=self.offset)
        return key_states, value_states

    def _newest(self) -> Tensor:
        """(B * Hkv,) int64: the slot of each segment's newest key."""
        return self.offset.long() + self.length.on_device.long() - 1

    def _write(self, buffers: Any, _: Any, keys: Tensor, values: Tensor, log_f: Tensor, offset: Any) -> None:
        newest = self._newest()
        new = summed(log_f.reshape(len(newest), 1, -1)).transpose(0, 2)
        sums = stored(new + restored(buffers[2].index_select(2, newest)))
        for buffer, x in zip(buffers, (keys, values, sums), strict=True):
            buffer.index_copy_(2, newest + 1, x.reshape(*buffer.shape[:2], -1, buffer.shape[3]))

    def previous(self, count: int, head_dim: int) -> list[Tensor]:
        carried = self._buffers[0][0, 0].index_select(0, self._newest())[:, -count * head_dim :]
        return [x.view(self.source.batch, -1, head_dim) for x in carried.split(head_dim, -1)]

    def pooled(self, dim: int) -> tuple[Tensor, ...]:
        """Keys (B * Hkv, 1, slots, dim), values and both floats of c (B * Hkv, G, slots): the pool, for every row."""
        keys, values, sums = (x.expand(len(self.held), -1, -1, -1) for x in self._buffers)
        high, low = sums[..., 0].chunk(2, 1)
        return keys[..., :dim], values, high, low

    def gathered(self, dim: int) -> tuple[Tensor, ...]:
        """The same of each row alone, as many positions as are read; the newest key where there is none."""
        place = torch.arange(self.length.reads, device=self.device)
        slots = self.offset[:, None] + torch.minimum(torch.maximum(place, self.starts[:, None]), self.length.on_device)
        keys, *rest = at_slots(self._buffers, slots)
        return keys[..., :dim], *rest

    def returned(self, tokens: int) -> ForgettingLayer:
        """The source with the first `tokens` tokens of the text; what was written behind them is left out.

        It stays empty where an interruption came while keys were moved.
        """
        source, held = self.source, self.held + (tokens - self.length.dropped - self.longest)
        if not self._buffers:
            return source
        source.begin, source.seen, source.is_initialized = tokens + 1, tokens, True  # refused until it is filled
        segments, starts = (self._buffers, self.begin, held), self.sink + tokens - held
        source.hold(segments, starts, self.padding, self.options["horizon"], self.crops_to)
        source.next_check = tokens + forgetting_cache.PAGE
        self._buffers = []
        source._show()  # as groups: without the room that a pool has
        return source


class PooledDecoding(Decoding):
    """A `Decoding` over a ForgettingCache, which is empty inside `with`: PooledLayers hold the text."""

    def __enter__(self) -> PooledDecoding:
        self.lengths = DeviceLengths(len(self.cache.layers), self.fed, self.tokens.device)
        self.running = DynamicCache()
        room, left = self._room()
        layers: list[Any] = self.cache.layers
        for layer in layers:
            layer.find(self.seq_start)
        self.cache.settle()
        layers = [PooledLayer(source, self.lengths, self.seq_start, room, left) for source in layers]
        self.running.layers = layers
        self.by_window = {number: layer.length for number, layer in enumerate(layers)}
        self.next_check = self.fed + room
        return self

    def _room(self) -> tuple[int, int]:
        """(tokens to make room for, tokens to come)."""
        left = self.capacity - self.fed
        return left if left <= MOST else ROOM, left

    def _make_room(self) -> None:
        """Where there is none: frees keys that no query sees, and makes room for more tokens."""
        if self.fed < self.next_check:
            return
        layers: list[Any] = self.running.layers
        page, (room, left) = forgetting_cache.PAGE, self._room()
        found = torch.cat([layer.unseen(page) for layer in layers]).cpu()
        unseen = found.split([len(layer.held) for layer in layers])
        needs = [layer._segments(layer._now() - x, room)[1] for layer, x in zip(layers, unseen, strict=True)]
        grows = any(need > layer.fits for need, layer in zip(needs, layers, strict=True))
        ran = _kernels(layers)
        for layer, x, need in zip(layers, unseen, needs, strict=True):
            # those that are nearly full grow along, to share the capture
            layer.forget(x, room, left if grows and need * 17 // 16 > layer.fits else 0)
            if bool(x.any()):
                layer.crops_to = self.fed - page
        self.warm = self.warm and _kernels(layers) <= ran  # otherwise a step runs uncaptured, to load others
        if grows or not self.warm:
            self.graph = None
        self.next_check = self.fed + room


def _kernels(layers: list[Any]) -> set[tuple[int, int]]:
    """(keys read, slots while they are too few for all processors) of each layer, by which kernels are chosen."""
    return {(layer.length.reads, reads_for(min(layer.fits, FILLS))) for layer in layers}
