"""Attention of some queries to some keys: one part of a softmax, whose outputs merge and whose gradients add.

    s_ij = cap(scale * q_i.k_j) + rows_i + cols_j      rows_i + cols_j = c_i - c_j <= 0, the decay between i and j
    lse_i = ln sum_j exp(s_ij)                         o_i = sum_j exp(s_ij - lse_i) v_j

Outputs and log-sum-exps stay in float32 (float64 for float64) until all parts are merged; decays are formed in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

SCORES = 1 << 24
"""Elements of a score matrix at a time: 64 MB in float32."""


@dataclass
class Part:
    """Queries of one document and keys before them. hk kv heads, G query heads each.

    Attributes:
        q: (hk, G, T, D); k, v: (hk, S, D), in the model's dtype.
        rows: (hk, G, T) float64, cols: (hk, G, S) float64, natural units; None: no decay (sinks).
        first_query, first_key: places in the row, which say what is causal and inside the window.
        horizon: nats by which a key that is seen has decayed less; not for sinks.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    rows: torch.Tensor | None
    cols: torch.Tensor | None
    first_query: int
    first_key: int
    scale: float
    softcap: float | None
    window: int | None
    horizon: float | None = None

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    def spans(self) -> list[slice]:
        """Queries, some at a time."""
        hk, groups, queries, _ = self.q.shape
        step = max(1, SCORES // max(1, hk * groups * self.k.shape[1]))
        return [slice(start, min(start + step, queries)) for start in range(0, queries, step)]

    def scores(self, span: slice) -> tuple[torch.Tensor, torch.Tensor | None]:
        """s (hk, G, queries of the span, S), -inf where hidden, and what tanh gave where there is a cap."""
        s = torch.einsum("hgtd,hsd->hgts", self.q[:, :, span].to(self.dtype), self.k.to(self.dtype)) * self.scale
        capped = None
        if self.softcap is not None:
            capped = torch.tanh(s / self.softcap)
            s = self.softcap * capped
        beyond = None
        if self.rows is not None and self.cols is not None:
            decay = self.rows[:, :, span, None] + self.cols[:, :, None]
            s = s + decay.to(s.dtype)
            beyond = None if self.horizon is None else decay <= -self.horizon  # NaN is to be seen
        positions = torch.arange(self.first_query + span.start, self.first_query + span.stop, device=s.device)[:, None]
        keys = torch.arange(self.first_key, self.first_key + self.k.shape[1], device=s.device)
        hidden = keys > positions
        if self.window is not None and self.rows is not None:
            hidden = hidden | (positions - keys >= self.window)
        hidden = hidden if beyond is None else hidden | beyond
        return s.masked_fill(hidden, -math.inf), capped


def attend_part(part: Part) -> tuple[torch.Tensor, torch.Tensor]:
    """(o (hk, G, T, D), lse (hk, G, T)); o = 0 and lse = -inf for queries that see none of the keys."""
    outputs, sums = [], []
    for span in part.spans():
        s, _ = part.scores(span)
        lse = torch.logsumexp(s, -1)
        weights = torch.exp(s - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
        outputs.append(torch.einsum("hgts,hsd->hgtd", weights, part.v.to(part.dtype)))
        sums.append(lse)
    return torch.cat(outputs, 2), torch.cat(sums, 2)


def differentiate_part(
    part: Part, lse: torch.Tensor, delta: torch.Tensor, do: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """This part's share of the gradients, given the merged log-sum-exp.

        p_ij = exp(s_ij - lse_i)      ds_ij = p_ij (do_i.v_j - delta_i)      delta_i = do_i.o_i

    Args:
        lse, delta: (hk, G, T); do: (hk, G, T, D).

    Returns:
        dq (hk, G, T, D), dk, dv (hk, S, D), and float64 the sums of ds over keys (hk, G, T) and queries (hk, G, S).
    """
    q, k, v = (x.to(part.dtype) for x in (part.q, part.k, part.v))
    d_k, d_v = torch.zeros_like(k), torch.zeros_like(v)
    by_key = torch.zeros(*part.q.shape[:2], part.k.shape[1], dtype=torch.float64, device=part.q.device)
    d_q, by_query = [], []
    for span in part.spans():
        s, capped = part.scores(span)
        weights = torch.exp(s - lse[:, :, span, None])
        given = do[:, :, span]
        d_v += torch.einsum("hgts,hgtd->hsd", weights, given)
        ds = weights * (torch.einsum("hgtd,hsd->hgts", given, v) - delta[:, :, span, None])
        by_query.append(ds.sum(-1, dtype=torch.float64))
        by_key += ds.sum(2, dtype=torch.float64)
        if capped is not None:
            ds = ds * (1 - capped.square())
        ds = ds * part.scale
        d_q.append(torch.einsum("hgts,hsd->hgtd", ds, k))
        d_k += torch.einsum("hgts,hgtd->hsd", ds, q[:, :, span])
    return torch.cat(d_q, 2), d_k, d_v, torch.cat(by_query, 2), by_key


def merge(
    o: torch.Tensor, lse: torch.Tensor, part_o: torch.Tensor, part_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two parts of one softmax as one: o (..., T, D), lse (..., T)."""
    total = torch.logaddexp(lse, part_lse)
    finite = total.masked_fill(total == -math.inf, 0.0)
    return o * torch.exp(lse - finite)[..., None] + part_o * torch.exp(part_lse - finite)[..., None], total
