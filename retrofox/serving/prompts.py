"""Which requests of a step are read by retrofox's operator instead of the engine's attention, and how.

Long pieces of text are read by `forgetting_attention` over the heads' own channels: the new keys where a text begins
in this step, else rows copied out of the text's pages. What decodes, and short pieces, attend to the pages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from fox_kernels import forgetting_attention

from retrofox.serving.lanes import Lanes

LONG = 32
"""New tokens of a request from which the operator reads them; fewer attend one by one, each to all of the past."""


@dataclass(frozen=True)
class Reading:
    """One call of the operator: a request that has a past, or requests that begin, one after the other.

    Args:
        request: the first of them.
        edges: where the new tokens of each begin, and where the last one's end.
        past: tokens of the request in the cache before this step.
        cu_seqlens: (requests + 1,) int32, `edges` from 0 on, on the device; None for one request.
    """

    request: int
    edges: tuple[int, ...]
    past: int
    cu_seqlens: torch.Tensor | None = None

    @property
    def new(self) -> slice:
        """The new tokens."""
        return slice(self.edges[0], self.edges[-1])


class Rows(NamedTuple):
    """Tokens of a text: key, value (S, Hkv, D), log_f (S, H) float32."""

    key: torch.Tensor
    value: torch.Tensor
    log_f: torch.Tensor


class Links(NamedTuple):
    """Requests that go on from a token which another request writes in the same step: a prefix they share.

    token: (R,) where in the batch that token is, or -1; request: (R,) whose it is; int64, on the device.
    """

    token: torch.Tensor
    request: torch.Tensor


def plan(starts: list[int], lengths: list[int], least: int) -> tuple[int, list[Reading]]:
    """(how many of the first requests the engine keeps, readings of all others).

    The engine puts requests with few new tokens first; all from the first one with `least` on are read by the operator.

    Args:
        starts: where each request's new tokens begin in the batch, and where the last one's end.
        lengths: tokens of each with the new ones.
    """
    spans = list(pairwise(starts))
    kept = next((number for number, (begin, end) in enumerate(spans) if end - begin >= least), len(spans))
    readings: list[Reading] = []
    for number, (begin, end) in enumerate(spans[kept:], kept):
        if begin == end:  # padding
            continue
        past = lengths[number] - (end - begin)
        last = readings[-1] if readings else None
        if last is not None and last.past == past == 0 and last.request + len(last.edges) - 1 == number:
            readings[-1] = replace(last, edges=(*last.edges, end))
        else:
            readings.append(Reading(number, (begin, end), past))
    return kept, readings


def owners(starts: list[int]) -> torch.Tensor:
    """(tokens,) int32: the request of each new token, from where each request's begin and where the last one's end."""
    counts = torch.tensor(starts).diff()
    return torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int32), counts)


def placed(reading: Reading, query_start: torch.Tensor) -> Reading:
    """The reading with `cu_seqlens` taken from the engine's query_start (R + 1,) int32 on the device."""
    if len(reading.edges) == 2:
        return reading
    mine = query_start[reading.request : reading.request + len(reading.edges)]
    return replace(reading, cu_seqlens=mine - reading.edges[0])


def find_links(
    query_start: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor, slots: torch.Tensor, page: int
) -> Links:
    """Who goes on from a token of this very step; needs no value on the host.

    Shapes: query_start (R + 1,), seq_lens (R,), block_table (R, pages) int32; slots (T,) int64, where each new token
    goes: page number * `page` + place in the page, negative for padding.
    """
    past = seq_lens - (query_start[1:] - query_start[:-1])
    last = (past - 1).clamp_min(0).long()
    slot = block_table.gather(1, (last // page)[:, None])[:, 0].long() * page + last % page
    same = (slot[:, None] == slots[None, :]) & (past > 0)[:, None]
    found, token = same.max(1)
    request = torch.searchsorted(query_start[1:].contiguous(), token.to(query_start.dtype), right=True)
    return Links(torch.where(found, token, -1), request.clamp_max(len(past) - 1))


def gather(
    lanes: Lanes, keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor, first: int, length: int
) -> Rows:
    """Tokens `first` to `length` of a text out of its pages, without lanes; log f of the first is 0.

    Shapes: keys, values (blocks, Hkv, tokens, width + D); pages (pages,) integers.
    """
    page = keys.shape[2]
    mine = pages[first // page : -(-length // page)].long()
    key, value = (rows[mine].transpose(1, 2).flatten(0, 1)[first % page :][: length - first] for rows in (keys, values))
    c = lanes.state(value).flatten(1)
    log_f = torch.diff(c, dim=0, prepend=c[:1]).clamp_max(0.0).float()
    return Rows(key[..., lanes.width :], value[..., lanes.width :], log_f)


def first_seen(past: int, window: int | None) -> int:
    """The first token that the first new one sees: pages before it are another text's by now."""
    return 0 if window is None else max(0, past - window + 1)


def read(query: torch.Tensor, rows: Rows, cu_seqlens: torch.Tensor | None, options: dict[str, Any]) -> torch.Tensor:
    """Forgetting Attention (T, H, D) of `query` (T, H, D), the last of the rows' tokens, or of texts from their start.

    Args:
        options: scale, window, sink, softcap, horizon of `fox_kernels.forgetting_attention`.
    """
    key, value, log_f = (x[None] for x in rows)
    return forgetting_attention(query[None], key, value, log_f, cu_seqlens=cu_seqlens, **options)[0]
