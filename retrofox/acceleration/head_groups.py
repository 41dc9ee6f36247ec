"""kv heads of unlike length: as segments one behind another, or in GrowingLayers, as rows with padding in front."""

from __future__ import annotations

from typing import Any

import torch

from retrofox.acceleration.growing_cache import GrowingLayer

SPLIT = 2048  # keys of padding that another group must save: its calls take a CPU as long as 4,000, but bytes count
NEVER = 2.0**30  # c of a key that has decayed to nothing
Tensor = torch.Tensor


def partition(lengths: list[int]) -> list[list[int]]:
    """Indices of `lengths`, longest first, cut into groups where that saves SPLIT keys of padding or more."""

    def cut(part: list[int]) -> list[list[int]]:
        saved = [(lengths[part[0]] - lengths[part[at]]) * (len(part) - at) for at in range(len(part))]
        at = max(range(len(part)), key=lambda x: saved[x])
        return [part] if saved[at] < SPLIT else [*cut(part[:at]), *cut(part[at:])]

    return cut(sorted(range(len(lengths)), key=lambda i: -lengths[i]))


def slots_of(begin: Tensor, held: Tensor, device: torch.device, skip: Any = 0, sink: int = 0) -> tuple[Tensor, Tensor]:
    """(slots of all keys of segments, one segment's behind another's; the part of each), int64 on the device.

    Segments begin at `begin` (n,) and hold `held` (n,), on the host, leaving out `skip` slots behind the first `sink`.
    Segment i is part 2 i, its sinks, and part 2 i + 1.
    """
    sinks = held.clamp_max(sink)
    lengths = torch.stack([sinks, held - sinks], 1).flatten()  # two parts of each segment
    begins = torch.stack([begin, begin + sinks + skip], 1).flatten()
    made = torch.stack([begins - (lengths.cumsum(0) - lengths), lengths])
    if device.type == "cuda":
        made = made.pin_memory()  # from other memory a copy waits for all that the GPU has still to do
    shift, length = made.to(device, non_blocking=made.is_pinned())
    part = torch.repeat_interleave(length, output_size=int(lengths.sum()))
    return torch.arange(len(part), device=device) + shift[part], part


def at_slots(buffers: list[Tensor], slots: Tensor) -> tuple[Tensor, ...]:
    """Keys (n, 1, S, width), values and both floats of c (n, G, S) of slots (n, S) of segments' buffers."""
    keys, values = (x[0, 0][slots][:, None] for x in buffers[:2])
    return keys, values, *buffers[2][0, ..., 0][:, slots].transpose(0, 1).chunk(2, 1)


def packed(buffers: list[Tensor], begin: Tensor, held: Tensor, sink: int, spare: int) -> GrowingLayer:
    """A GrowingLayer of segments of `buffers`, which begin at `begin` (n,) and hold `held` (n,) keys, on the host.

        [sinks | padding | the newest keys, without gaps]     c = NEVER in front of the newest keys

    spare: tokens to have room for beside them.
    """
    end = int(held.max())
    begin, count = torch.stack([begin, held])[..., None].to(buffers[0].device)
    place = torch.arange(end + spare, device=begin.device)
    hidden = place < end - count + sink  # sinks and padding, which may be any key
    nth = torch.where(hidden, place.clamp_max(max(sink - 1, 0)), place - end + count)
    keys, values, high, low = at_slots(buffers, begin + torch.minimum(nth, count - 1))
    hidden = hidden[:, None]
    sums = torch.cat([high.masked_fill(hidden, NEVER), low.masked_fill(hidden, 0.0)], 1)[..., None]
    return GrowingLayer.holding([keys, values, sums], end)
