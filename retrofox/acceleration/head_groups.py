"""kv heads of similar length in one GrowingLayer, as rows of a batch with padding in front."""

from __future__ import annotations

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


def packed(rows: list[list[Tensor]], lengths: list[int], firsts: list[int], sink: int, spare: int) -> GrowingLayer:
    """A GrowingLayer of kv heads: the `sink` keys from each one's first on, and its newest `lengths` keys.

        [sinks | padding | the newest keys, without gaps]     c = NEVER in front of the newest keys

    spare: tokens to have room for beside them. rows: [keys (S, width), values (S, width), c (2 G, S)] of each.
    """
    end = sink + max(lengths)
    fits = end + spare
    keys, values, sums = rows[0]
    buffers = [x.new_empty(len(rows), 1, fits, x.shape[-1]) for x in (keys, values)]
    buffers.append(sums.new_empty(len(rows), len(sums), fits, 1))
    for i, ((keys, values, sums), length, first) in enumerate(zip(rows, lengths, firsts, strict=True)):
        newest = end - length
        for new, old in zip(buffers, (keys, values), strict=False):
            new[i, 0, :sink] = old[first : first + sink]
            new[i, 0, sink:newest] = 0
            new[i, 0, newest:end] = old[-length:]
        c = buffers[2][i, :, :, 0]
        c[: len(c) // 2, :newest], c[len(c) // 2 :, :newest] = NEVER, 0
        c[:, newest:end] = sums[:, -length:]
    return GrowingLayer.holding(buffers, end)
