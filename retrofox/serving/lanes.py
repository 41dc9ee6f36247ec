"""Extra lanes of keys, queries and values that carry the running sum of log f through an attention that knows no gates.

vLLM on a CPU is served so; on a GPU `paged_attention.py` attends.

A paged attention computes softmax_j(scale * q_i . k_j) v_j. With c_t = sum_{l <= t} log f_l the logits of Forgetting
Attention, scale * q_i . k_j + (c_i - c_j), are such a product too, of longer vectors. Each kv head serves G query
heads; a number x is held by n lanes in the cache's dtype whose sum is x (`split`):

    lane t (G + 1) + g     key: term t of -c_j / scale of the group's query head g      query: 1 for its own g, else 0
    lane t (G + 1) + G     key: 1, or 0 for a token exempt from decay (a sink)          query: term t of c_i / scale

A sink's lanes are all 0, so its logits stay as they are. Lanes stand before the head's own channels and term by term:
where a kernel adds channels in their order, -c_j and c_i cancel before anything small is added. A value's lanes hold c
itself, in more terms, for whoever goes on from there: the next chunk, a decoded token, another request that shares the
prefix. Nothing else remembers c, so whatever moves or drops pages of the cache does the right thing.

Error: three bfloat16 terms are exact to 24 bits at least, two float32 terms to 48; the product then has float32's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from retrofox.serving.prefill import KeyValueRows, run_prefills

TERMS = {torch.bfloat16: 3, torch.float32: 2}
"""Dtype of a key -> lanes per number. float16 is missing: -c / scale leaves its range of 65504."""
STATE_TERMS = 4
"""Most lanes per number of a value: c is read back and added to once per decoded token, so it needs the bits."""
STEP = 16
"""Widths of keys are multiples of it, as kernels want them."""


@dataclass(frozen=True)
class Lanes:
    """Where c lies in a key, a query and a value.

    Args:
        groups: query heads per kv head, G.
        terms: lanes per number, n.
        width: lanes of a head, n (G + 1) and what fills it up to a width the kernels know.
    """

    groups: int
    terms: int
    width: int

    @property
    def state_terms(self) -> int:
        """Lanes per number of a value, m."""
        return min(STATE_TERMS, self.width // self.groups)

    def key(self, c: torch.Tensor, decays: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
        """A key's lanes. Shapes: c (T, Hkv, G) float64, decays (T,) bool, False for sinks -> (T, Hkv, width)."""
        flag = torch.ones_like(c[..., :1])
        terms = [torch.cat([term, flag], -1) for term in split(c / -scale, self.terms, dtype)]
        return self._filled(torch.cat(terms, -1) * decays[:, None, None], dtype)

    def query(self, c: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
        """A query's lanes. Shapes: c (T, Hkv, G) float64 -> (T, Hkv G, width)."""
        own = torch.eye(self.groups, dtype=dtype, device=c.device).expand(*c.shape[:2], -1, -1)
        terms = [torch.cat([own, term.to(dtype)[..., None]], -1) for term in split(c / scale, self.terms, dtype)]
        return self._filled(torch.cat(terms, -1), dtype).flatten(1, 2)

    def value(self, c: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A value's lanes, which `state` reads. Shapes: c (T, Hkv, G) float64 -> (T, Hkv, width)."""
        return self._filled(torch.cat(split(c, self.state_terms, dtype), -1), dtype)

    def state(self, value: torch.Tensor) -> torch.Tensor:
        """c (..., G) float64 of a value's lanes (..., width or more)."""
        return value[..., : self.state_terms * self.groups].double().unflatten(-1, (self.state_terms, -1)).sum(-2)

    def _filled(self, lanes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.nn.functional.pad(lanes.to(dtype), (0, self.width - lanes.shape[-1]))


def plan_lanes(groups: int, head_dim: int, dtype: torch.dtype, fits: Callable[[int], bool]) -> Lanes:
    """The fewest lanes, in steps of 16, with which a head's width is one that the engine's kernels have.

    Args:
        groups: query heads per kv head.
        fits: whether a kernel exists for a head of so many channels.
    """
    terms = TERMS[dtype]
    needed = terms * (groups + 1)
    first = -(-(head_dim + needed) // STEP) * STEP
    for width in range(first, 2 * head_dim + needed + 8 * STEP, STEP):
        if fits(width):
            return Lanes(groups, terms, width - head_dim)
    raise ValueError(
        f"no attention kernel here takes heads of {head_dim} channels and the {needed} lanes that gates need beside "
        "them: try another --attention-backend"
    )


def split(x: torch.Tensor, terms: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """`terms` tensors in x's dtype, each exact in `dtype`, whose sum is x but for the last one's rounding."""
    parts = []
    for _ in range(terms):
        part = x.to(dtype).to(x.dtype)
        parts.append(part)
        x = x - part
    return parts


def running_sum(
    log_f: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    before: torch.Tensor,
    links: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(c, place in its text) of each token of a batch of requests that go on from where their caches end.

    Padding gets some c, unused.

    Shapes: log_f (T, Hkv, G) float64; query_start (R + 1,) int32, where each request's new tokens start; seq_lens (R,)
    int32, its tokens with the new ones; before (R, Hkv, G) float64, c of the last token in the cache (anything where
    there is none) -> (T, Hkv, G) float64, (T,) int32.

    Args:
        links: where that last token is written in this very step, by another request (`prefill.Links`), `before` is
            not yet its c.
    """
    sums = log_f.cumsum(0)
    starts = query_start[:-1].long().clamp_max(log_f.shape[0] - 1)
    ends = query_start[1:].contiguous()
    token = torch.arange(log_f.shape[0], device=log_f.device, dtype=ends.dtype)
    request = torch.searchsorted(ends, token, right=True).clamp_max(len(ends) - 1)
    continued = seq_lens[: len(ends)] > query_start[1:] - query_start[:-1]
    offset = torch.where(continued[:, None, None], before, 0.0)
    linked = torch.zeros_like(continued)
    if links is not None:
        linked, writer = links[0] >= 0, links[1]
        offset = torch.where(linked[:, None, None], sums[links[0].clamp_min(0)], offset)
    offset = offset - sums[starts] + log_f[starts]  # c = offset of the request + sums
    while linked.any():  # a request's writer may be linked itself
        offset = torch.where(linked[:, None, None], offset + offset[writer], offset)
        linked, writer = linked & linked[writer], writer[writer]
    position = token - ends[request] + seq_lens[: len(ends)][request]
    return sums + offset[request], position


def gather(lanes: Lanes, kv_cache: torch.Tensor, pages: torch.Tensor, first: int, length: int) -> KeyValueRows:
    """Tokens `first` to `length` of a text out of its pages, without lanes; log f of the first is 0.

    Shapes: kv_cache (blocks, Hkv, tokens, 2 (width + D)), as `_write_rows` leaves it; pages (pages,) integers.
    """
    page = kv_cache.shape[2]
    mine = kv_cache[pages[first // page : -(-length // page)].long()]
    key, value = mine.transpose(1, 2).flatten(0, 1)[first % page :][: length - first].chunk(2, -1)
    c = lanes.state(value).flatten(1)
    log_f = torch.diff(c, dim=0, prepend=c[:1]).clamp_max(0.0).float()
    return KeyValueRows(key[..., lanes.width :], value[..., lanes.width :], log_f)


class LanesImpl:
    """Mixin of the CPU backend's implementation with lanes; T tokens, H heads on Hkv, D channels, `width` lanes.

    Where logits are soft-capped (Gemma 2) the decay stands outside the cap and no product of vectors can carry it:
    there every request, decoding ones too, is read by `forgetting_attention`.
    """

    layout: Lanes
    options: dict[str, Any]  # of `forgetting_attention`
    scale: float

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Writes lanes, keys, values (T, Hkv, D), then attends: by vLLM's kernels or by `forgetting_attention`.

        output_scale: log f, the gates of `vllm_attention.attend`.
        """
        batch, lanes = attn_metadata, self.layout
        if batch is None:
            return output.zero_()
        assert output_scale is not None
        links, prefills, _, _ = batch.fox  # prefills of all requests, or none: `StepBuilder.least`
        before = lanes.state(_values_before(kv_cache, batch, rows=bool(prefills)))
        log_f = output_scale.double().view(len(output_scale), -1, lanes.groups)
        c, position = running_sum(log_f, batch.query_start_loc, batch.seq_lens, before, links)
        lanes_of_key = lanes.key(c, position >= self.options["sink"], self.scale, key.dtype)
        wide_key = torch.cat([lanes_of_key, key], -1)
        wide_value = torch.cat([lanes.value(c, value.dtype), value], -1)
        if not prefills:
            wide_query = torch.cat([lanes.query(c, self.scale, query.dtype), query], -1)
            wide = torch.empty_like(wide_query)
            super().do_kv_cache_update(layer, wide_key, wide_value, kv_cache, batch.slot_mapping)  # type: ignore[misc]
            super().forward(layer, wide_query, wide_key, wide_value, kv_cache, batch, wide)  # type: ignore[misc]
            return output.copy_(wide[..., lanes.width :])
        _write_rows(kv_cache, batch.slot_mapping, wide_key, wide_value)

        def past(request: int, first: int, length: int) -> KeyValueRows:
            return gather(lanes, kv_cache, batch.block_table[request], first, length)

        run_prefills(
            prefills, query, KeyValueRows(key, value, output_scale), past, output, self.options, self.options["window"]
        )
        return output


def _values_before(kv_cache: torch.Tensor, batch: Any, rows: bool) -> torch.Tensor:
    """The cached values (R, Hkv, width + D) of each request's last token in the cache; any where there is none."""
    block = kv_cache.shape[2]
    new = batch.query_start_loc[1:] - batch.query_start_loc[:-1]
    last = (batch.seq_lens[: len(new)] - new - 1).clamp_min(0).long()
    page = batch.block_table.gather(1, (last // block)[:, None]).long()[:, 0]
    values = kv_cache.chunk(2, -1)[1]
    if not rows:  # vLLM's kernels have a page's keys channel by channel, then its values
        values = kv_cache.flatten(2).chunk(2, -1)[1].unflatten(2, (block, -1))
    return values[page, :, last % block]


def _write_rows(kv_cache: torch.Tensor, slot_mapping: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Writes (T, Hkv, width + D) keys and values beside each other into (blocks, Hkv, tokens, 2 (width + D))."""
    slots = slot_mapping.long()
    real = slots >= 0  # padding has slot -1
    slots = slots[real]
    rows = torch.cat([key, value], -1)[: len(real)][real]
    kv_cache[slots // kv_cache.shape[2], :, slots % kv_cache.shape[2]] = rows
