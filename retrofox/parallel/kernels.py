"""Parts of a softmax by the Triton kernels, which take keys of other devices as they are (see `partial_softmax`).

The kernels give a query past its keys the c of the last key. What its own c adds is the same for all keys, so it leaves
o alone and is added to lse here; in the backward it is taken off again.
"""

from __future__ import annotations

import functools
import math
from types import SimpleNamespace
from typing import Any

import torch
from fox_kernels.host.device import triton_unsupported

from retrofox.parallel.partial_softmax import Part, attend_part, differentiate_part

LOG2_E = 1 / math.log(2)


@functools.cache
def _launchers() -> Any:
    """What needs Triton, imported on first use."""
    from fox_kernels.common.horizon import first_seen
    from fox_kernels.host.device import on_device
    from fox_kernels.options import Documents, Options, Saved, Shard
    from fox_kernels.plain.backward import launch_backward
    from fox_kernels.plain.forward import launch_forward

    return SimpleNamespace(
        forward=launch_forward, backward=launch_backward, first_seen=first_seen, Documents=Documents, Options=Options,
        Saved=Saved, Shard=Shard, on=on_device,
    )  # fmt: skip


def attend(part: Part) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend_part`, by the kernels where they can run."""
    if not _runs(part):
        return attend_part(part)
    launchers, given = _launchers(), _Given(part)
    with launchers.on(part.q):
        o, lse2 = launchers.forward(
            *given.qkv, *given.c, given.options, given.documents, shard=given.shard, out_dtype=torch.float32
        )
    hk, groups, queries, width = part.q.shape
    full_o = o.new_zeros(hk, groups, queries, width)
    full_lse = o.new_full((hk, groups, queries), -math.inf)
    full_o[:, :, given.seeing] = o[0].unflatten(1, (hk, groups)).permute(1, 2, 0, 3)
    full_lse[:, :, given.seeing] = (lse2[0].unflatten(0, (hk, groups)).double() / LOG2_E + given.shift).float()
    return full_o, full_lse


def differentiate(
    part: Part, o: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor, do: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`differentiate_part`, by the kernels where they can run; o (hk, G, T, D) is the merged output."""
    if not _runs(part):
        return differentiate_part(part, lse, delta, do)
    launchers, given = _launchers(), _Given(part)
    hk, groups, queries, _ = part.q.shape
    seeing = given.seeing
    lse2 = ((lse[:, :, seeing].double() - given.shift) * LOG2_E).float().flatten(0, 1)[None].contiguous()
    saved = launchers.Saved(_flat(o[:, :, seeing]).contiguous(), lse2, *given.c)
    row_sum = torch.empty_like(lse2)
    with launchers.on(part.q):
        dq, dk, dv, dc = launchers.backward(
            _flat(do[:, :, seeing].to(part.q.dtype)), None, *given.qkv, saved, given.options, given.documents,
            shard=given.shard, row_sum=row_sum, gradient_dtype=torch.float32,
        )  # fmt: skip
    by_query = row_sum[0].double()
    by_key = -dc[0].double()
    own = min(max(by_key.shape[-1] - given.offset, 0), by_query.shape[-1])  # queries whose own key is among the keys
    by_key[:, given.offset : given.offset + own] += by_query[:, :own]
    by_key[:, -1] += by_query[:, own:].sum(-1)
    d_q = dq.new_zeros(part.q.shape)
    d_q[:, :, seeing] = dq[0].unflatten(1, (hk, groups)).permute(1, 2, 0, 3)
    rows = by_query.new_zeros(hk, groups, queries)
    rows[:, :, seeing] = by_query.unflatten(0, (hk, groups))
    return d_q, dk[0].transpose(0, 1), dv[0].transpose(0, 1), rows, by_key.unflatten(0, (hk, groups))


def _runs(part: Part) -> bool:
    """Whether the kernels can run a part; sinks, a handful of keys without decay, are not worth a launch."""
    return part.rows is not None and triton_unsupported(part.q) is None


class _Given:
    """A part as the launchers take it."""

    def __init__(self, part: Part):
        assert part.rows is not None, "sinks have no decay"
        assert part.cols is not None, "sinks have no decay"
        launchers, first_key, keys = _launchers(), part.first_key, part.k.shape[1]
        self.offset = max(part.first_query - first_key, 0)
        skipped = max(first_key - part.first_query, 0)  # queries before the first key see none
        self.seeing = slice(skipped, None)
        q = _flat(part.q[:, :, self.seeing])
        self.qkv = q, part.k.transpose(0, 1)[None], part.v.transpose(0, 1)[None]
        self.c = _two_floats(-part.cols)
        self.options = launchers.Options(part.scale, part.window, 0, part.softcap, part.horizon)
        self.shard = launchers.Shard(self.offset)
        first = None
        if part.horizon is not None:
            with launchers.on(part.q):
                queries = _two_floats(part.rows[:, :, self.seeing])
                first = launchers.first_seen(*self.c, q.shape[1], self.options, q_offset=self.offset, queries=queries)
        self.documents = launchers.Documents(first_seen=first)
        own = torch.arange(self.offset, self.offset + q.shape[1], device=q.device).clamp_max(keys - 1)
        self.shift = part.rows[:, :, self.seeing] + part.cols[:, :, own]


def _two_floats(c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(hk, G, n) float64, natural units -> (1, hk G, n) in base 2, as two floats."""
    c = (c.flatten(0, 1) * LOG2_E)[None]
    high = c.float()
    return high.contiguous(), (c - high).float().contiguous()


def _flat(x: torch.Tensor) -> torch.Tensor:
    """(hk, G, T, D) -> (1, T, hk G, D)."""
    return x.permute(2, 0, 1, 3).flatten(1, 2)[None]
