"""Extra lanes of keys, queries and values that carry the running sum of log f through an attention that knows no gates.

vLLM on a CPU is served so; on a GPU `paged_kernels.py` attends.

A paged attention computes softmax_j(scale * q_i . k_j) v_j. With c_t = sum_{l <= t} log f_l the logits of Forgetting
Attention, scale * q_i . k_j + (c_i - c_j), are such a product too, of longer vectors. Each kv head serves G query
heads; a number x is held by n lanes in the cache's dtype whose sum is x (`split`):

    lane t (G + 1) + g     key: term t of -c_j / scale of the group's query head g      query: 1 for its own g, else 0
    lane t (G + 1) + G     key: 1, or 0 for a token exempt from decay (a sink)          query: term t of c_i / scale

c counts from the first token that decays: it is 0 at sinks, whose lanes are all 0, so their logits stay as they are.
Lanes stand before the head's own channels and term by term: where a kernel adds channels in their order, -c_j and c_i
cancel before anything small is added. A value's lanes hold c itself, in more terms, for whoever goes on from there: the
next chunk, a decoded token, another request that shares the prefix. Nothing else remembers c, so whatever moves or
drops pages of the cache does the right thing.

Error: three bfloat16 terms are exact to 24 bits at least, two float32 terms to 48; the product then has float32's own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

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

    def incoming(self, log_f: torch.Tensor, decays: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A key's lanes before its place in the cache is known: log f where -c / scale will be; see `outgoing`.

        Shapes: log_f (T, Hkv, G) float32; decays (T,) bool, False for sinks -> (T, Hkv, width) in `dtype`.
        """
        log_f = torch.where(decays[:, None, None], log_f, 0.0)
        flag = decays[:, None, None].to(log_f.dtype).expand(-1, log_f.shape[1], 1)
        terms = [torch.cat([term, flag], -1) for term in split(log_f, self.terms, dtype)]
        return self._filled(torch.cat(terms, -1), dtype)

    def outgoing(self, incoming: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(log f (T, Hkv, G) float64, flags (T, Hkv, 1)) of `incoming`'s lanes."""
        terms = incoming[..., : self.terms * (self.groups + 1)].unflatten(-1, (self.terms, self.groups + 1))
        return terms[..., : self.groups].double().sum(-2), terms[..., 0, self.groups :]

    def key(self, c: torch.Tensor, flag: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
        """A key's lanes. Shapes: c (T, Hkv, G) float64, flag (T, Hkv, 1) -> (T, Hkv, width)."""
        terms = [torch.cat([term, flag.to(term.dtype)], -1) for term in split(c / -scale, self.terms, dtype)]
        return self._filled(torch.cat(terms, -1), dtype)

    def query(self, c: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
        """A query's lanes. Shapes: c (T, Hkv, G) float64 -> (T, Hkv, G, width)."""
        own = torch.eye(self.groups, dtype=dtype, device=c.device).expand(*c.shape[:2], -1, -1)
        terms = [torch.cat([own, term.to(dtype)[..., None]], -1) for term in split(c / scale, self.terms, dtype)]
        return self._filled(torch.cat(terms, -1), dtype)

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

    Raises:
        ValueError: there is no such width up to twice the head's, or the dtype can't hold c.
    """
    if dtype not in TERMS:
        raise ValueError(f"a converted model is served in bfloat16 or float32, got {dtype}: add --dtype bfloat16")
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
) -> torch.Tensor:
    """c of the tokens of a batch of requests, each going on from where its cache ends.

    Needs no value on the host, so that a CUDA graph can hold it; tokens past the last request get some c, unused.

    Shapes: log_f (T, Hkv, G) float64; query_start (R + 1,) int32, where each request's new tokens start; seq_lens (R,)
    int32, its tokens with the new ones; before (R, Hkv, G) float64, c of the last token in the cache (anything where
    there is none) -> (T, Hkv, G) float64.

    Args:
        links: where that last token is written in this very step, by another request (`prompts.Links`), `before` is
            not yet its c.
    """
    sums = log_f.cumsum(0)
    starts = query_start[:-1].long().clamp_max(log_f.shape[0] - 1)
    ends = query_start[1:].contiguous()
    token = torch.arange(log_f.shape[0], device=log_f.device, dtype=ends.dtype)
    request = torch.searchsorted(ends, token, right=True).clamp_max(len(ends) - 1)
    continued = seq_lens[: len(ends)] > query_start[1:] - query_start[:-1]
    offset = torch.where(continued[:, None, None], before, 0.0)
    if links is not None:
        linked, writer = links[0] >= 0, links[1]
        offset = torch.where(linked[:, None, None], sums[links[0].clamp_min(0)], offset)
    offset = offset - sums[starts] + log_f[starts]  # c = offset of the request + sums
    if links is not None:
        for _ in range(len(ends).bit_length()):  # a request's writer may be linked itself
            offset = torch.where(linked[:, None, None], offset + offset[writer], offset)
            linked, writer = linked & linked[writer], writer[writer]
    return sums + offset[request]
