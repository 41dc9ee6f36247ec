"""Gradients of a ring's backward: queries' stay, keys' go back to their owners, gates' run over all chunks."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from retrofox.parallel.kernels import differentiate
from retrofox.parallel.messages import Exchange, Keys, swap
from retrofox.parallel.offsets import LOG_F_MIN
from retrofox.parallel.partial_softmax import Part
from retrofox.parallel.ring_tasks import Task, Walk


class Sums:
    """Gradients of one backward, added up part by part: dq, dk, dv (B, t, heads, D), dc (B, H, t) float64."""

    def __init__(self, walk: Walk, o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor):
        self.walk, self.o, self.lse = walk, o, lse
        self.do = do.to(walk.dtype)
        self.delta = (self.do * o).sum(-1)  # (B, t, H)
        self.dq = torch.zeros_like(o)
        self.dk, self.dv = (torch.zeros(x.shape, dtype=walk.dtype, device=x.device) for x in (walk.k, walk.v))
        self.dc = torch.zeros(lse.shape, dtype=torch.float64, device=lse.device)

    def _differentiate(self, task: Task, part: Part, heads: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Adds to dq and to the queries' dc; returns dk, dv (S, heads, D) and the sums of ds by key (heads, G, S)."""
        walk, kv_heads = self.walk, self.walk.kv_heads
        lse = self.lse[task.row, :, task.where].unflatten(0, (kv_heads, -1))[heads]
        delta = self.delta[task.row, task.where].T.unflatten(0, (kv_heads, -1))[heads]
        do = walk.grouped(self.do[task.row, task.where])[heads]
        o = walk.grouped(self.o[task.row, task.where])[heads]
        dq, dk, dv, by_query, by_key = differentiate(part, o, lse, delta, do)
        self.dq[task.row, task.where].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)[heads] += dq
        if part.rows is not None:
            self.dc[task.row, :, task.where].unflatten(0, (kv_heads, -1))[heads] += by_query
        return dk.transpose(0, 1), dv.transpose(0, 1), by_key

    def add_own(self, task: Task, kind: str, part: tuple[Part, Any], d_sinks: torch.Tensor) -> None:
        """A part whose keys lie here, or are sinks."""
        walk, (what, heads) = self.walk, part
        dk, dv, by_key = self._differentiate(task, what, heads)
        if kind == "sinks":
            known = walk.plan.sinks[task.row, task.head.start]
            d_sinks[known.first : known.first + len(known.positions)] += torch.stack((dk, dv), 1)
            return
        stop = task.where.stop if kind == "own" else walk.plan.chunk
        where = slice(stop - dk.shape[0], stop)
        self.dk[task.row, where, heads] += dk
        self.dv[task.row, where, heads] += dv
        self.dc[task.row, :, where].unflatten(0, (walk.kv_heads, -1))[heads] -= by_key

    def of_keys(self, keys: Keys, parts: list) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of keys that came: (2, tokens, heads, D) of k and v, (heads, G, tokens) float64 of -c."""
        d_kv = torch.zeros(2, *keys.k.shape, dtype=self.walk.dtype, device=keys.k.device)
        d_c = torch.zeros(keys.log_f.shape[1:] + keys.log_f.shape[:1], dtype=torch.float64, device=keys.k.device)
        for task, (part, heads), where, which in parts:
            dk, dv, by_key = self._differentiate(task, part, heads)
            d_kv[0, where][:, which] += dk
            d_kv[1, where][:, which] += dv
            d_c[which, :, where] += by_key
        return d_kv, d_c

    def send_back(self, hop: int, gradients: list[tuple[torch.Tensor, torch.Tensor]]) -> Exchange:
        """Begins to send gradients to the keys' owner, and to receive those of what this process sent at that hop."""
        walk, mine = self.walk, self.walk.mesh.ring_rank
        width, groups = walk.k.shape[-1], walk.q.shape[2] // walk.kv_heads
        tokens = sum((item.high - item.low) * len(item.heads) for item in walk.ring.sent(hop))
        sizes = [(2 * tokens * width, walk.dtype), (tokens * groups, torch.float64)]
        keys = torch.cat([self.dk.new_empty(0), *(x.flatten() for x, _ in gradients)])
        gates = torch.cat([self.dc.new_empty(0), *(x.flatten() for _, x in gradients)])
        return swap(walk.mesh, "gradients", mine - hop, [keys, gates], mine + hop, sizes)

    def add_returned(self, hop: int, exchange: Exchange) -> None:
        """Takes the gradients of what this process sent at a hop."""
        walk = self.walk
        keys, gates = exchange.wait()
        width, groups, at, gate_at = walk.k.shape[-1], walk.q.shape[2] // walk.kv_heads, 0, 0
        for item in walk.ring.sent(hop):
            tokens, heads, where = item.high - item.low, list(item.heads), walk.ring.where(item)
            size, gate_size = tokens * len(heads) * width, tokens * len(heads) * groups
            dk, dv = keys[at : at + 2 * size].view(2, tokens, len(heads), width)
            self.dk[item.row, where, heads] += dk
            self.dv[item.row, where, heads] += dv
            d_c = gates[gate_at : gate_at + gate_size].view(len(heads), groups, tokens)
            self.dc[item.row, :, where].unflatten(0, (walk.kv_heads, -1))[heads] -= d_c
            at, gate_at = at + 2 * size, gate_at + gate_size

    def add_sinks(self, d_sinks: torch.Tensor) -> None:
        """Takes the gradients of the sinks that lie here, from all processes of the ring."""
        self.walk.summed(d_sinks)
        for row, at, number in self.walk.own_sinks():
            self.dk[row, at] += d_sinks[number, 0]
            self.dv[row, at] += d_sinks[number, 1]

    def gate_gradient(self, log_f: torch.Tensor) -> torch.Tensor:
        """dL/dlog_f (B, t, H): sums of dc from each token to the end of its document, over all chunks it lies in."""
        walk, plan, mesh = self.walk, self.walk.plan, self.walk.mesh
        dc = self.dc.unflatten(2, (-1, plan.chunk))  # (B, H, slot, chunk)
        firsts = torch.zeros(dc.shape[:3], dtype=torch.float64, device=dc.device)  # of the head documents
        for task in walk.tasks():
            firsts[task.row, :, task.slot] = dc[task.row, :, task.slot, : task.head.tokens].sum(-1)
        found = mesh.gathered(firsts, ring_only=True)
        result = torch.zeros_like(dc)
        for row in range(dc.shape[0]):
            for slot, chunk in enumerate(walk.chunks):
                head = plan.heads[row][chunk]
                skipped = 0 if head is None else head.tokens
                later = torch.zeros_like(dc[row, :, 0, 0])
                for number in plan.follows(row, chunk):
                    place = min(number, mesh.degrees.chunks - 1 - number)
                    later = later + found[place, row, :, mesh.degrees.chunks_of(place).index(number)]
                ends = sorted({0, skipped, plan.chunk, *self._bounds(row, chunk)})
                for start, stop in itertools.pairwise(ends):
                    sums = dc[row, :, slot, start:stop].flip(-1).cumsum(-1).flip(-1)
                    result[row, :, slot, start:stop] = sums + later[:, None] if stop == plan.chunk else sums
        d_log_f = result.flatten(2).transpose(1, 2)
        return d_log_f.masked_fill(log_f < LOG_F_MIN, 0.0).to(log_f.dtype)

    def _bounds(self, row: int, chunk: int) -> list[int]:
        """Document starts inside a chunk, counted from its own."""
        plan = self.walk.plan
        begin = chunk * plan.chunk
        return [start - begin for start in plan.documents[row] if begin < start < begin + plan.chunk]
