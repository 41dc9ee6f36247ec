"""Forgetting Attention of rows whose tokens lie zigzag on a ring of processes.

A chunk's queries of documents that begin in the chunk need nothing from elsewhere: they take the operator as on one
device. Those of the document that began earlier see, part by part,

    the document's sinks (summed up once over the ring), its keys in the same chunk, and its keys in earlier chunks

and the parts merge by their log-sum-exp. Keys of other processes come in R - 1 hops, at hop h from h places back; a hop
carries only what documents, windows and, with pruning, the gates leave to be seen (`offsets`), so it may carry nothing.
The backward fetches the keys again and sends their gradients back, in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from retrofox.parallel.mesh import Mesh
from retrofox.parallel.messages import Exchange, KeyRing, Keys, swap
from retrofox.parallel.offsets import LOG_F_MIN, Summary, clamped
from retrofox.parallel.part import Part, attend_part, differentiate_part, merge
from retrofox.parallel.plan import Head, RingPlan

__all__ = ["RingPlan", "ring_attention"]


def ring_attention(
    mesh: Mesh,
    plan: RingPlan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_f: torch.Tensor,
    options: dict[str, Any],
    locally: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """Attention over whole rows, this process giving and getting two chunks of each.

    Args:
        q: (B, t, H, D); k, v: (B, t, Hkv, D); log_f: (B, t, H) float32, the chunks one after the other.
        options, locally: as in `Shards.attend`.

    Returns:
        (B, t, H, D) in q's dtype.
    """
    options = {**options, "scale": q.shape[-1] ** -0.5 if options["scale"] is None else options["scale"]}
    shared = None if plan.local else _Ring.apply(q, k, v, log_f, mesh, plan, options)
    rows = []
    for row in range(q.shape[0]):
        pieces = []
        for slot, chunk in enumerate(mesh.degrees.chunks_of(mesh.ring_rank)):
            begin, (skipped, cu_seqlens) = slot * plan.chunk, plan.rest(row, chunk, q.device)
            if shared is not None and skipped:
                pieces.append(shared[row : row + 1, begin : begin + skipped])
            if skipped < plan.chunk:
                own = slice(begin + skipped, begin + plan.chunk)
                part = (x[row : row + 1, own].transpose(1, 2) for x in (q, k, v))
                pieces.append(locally(*part, log_f[row : row + 1, own], cu_seqlens, options))
        rows.append(torch.cat(pieces, 1))
    return torch.cat(rows)


class _Ring(torch.autograd.Function):
    """The queries of documents that began in an earlier chunk; zeros for the others."""

    @staticmethod
    def forward(ctx: Any, q, k, v, log_f, mesh: Mesh, plan: RingPlan, options: dict[str, Any]) -> torch.Tensor:
        with torch.autocast(q.device.type, enabled=False):
            summary = Summary(mesh, plan, q, k, log_f, options)
            walk = _Walk(mesh, plan, options, summary, q, k, v, log_f)
            o = torch.zeros(q.shape, dtype=walk.dtype, device=q.device)
            lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=walk.dtype, device=q.device)
            sinks = walk.gathered_sinks()
            for task in walk.tasks():
                for _, part in walk.own_parts(task, sinks):
                    task.add(o, lse, part)
            under_way = walk.ring.start(1)
            for hop in range(1, mesh.degrees.ring):
                arrived = walk.ring.finish(hop, under_way)
                if hop + 1 < mesh.degrees.ring:
                    under_way = walk.ring.start(hop + 1)
                for keys in arrived:
                    for task, part, _, _ in walk.parts_of(keys):
                        task.add(o, lse, part)
        ctx.save_for_backward(q, k, v, log_f, o, lse, sinks)
        ctx.walk, ctx.summary = (mesh, plan, options), summary
        return o.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor):  # type: ignore[override]
        q, k, v, log_f, o, lse, sinks = ctx.saved_tensors
        mesh, plan, _ = ctx.walk
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            walk = _Walk(*ctx.walk, ctx.summary, q, k, v, log_f)
            sums = _Sums(walk, o, lse, do)
            d_sinks = torch.zeros_like(sinks)
            for task in walk.tasks():
                for kind, part in walk.own_parts(task, sinks):
                    sums.add_own(task, kind, part, d_sinks)
            under_way, back = walk.ring.start(1), []
            for hop in range(1, mesh.degrees.ring):
                arrived = walk.ring.finish(hop, under_way)
                if hop + 1 < mesh.degrees.ring:
                    under_way = walk.ring.start(hop + 1)
                gradients = [sums.of_keys(keys, walk.parts_of(keys)) for keys in arrived]
                back.append((hop, sums.send_back(hop, gradients)))
            for hop, exchange in back:
                sums.add_returned(hop, exchange)
            sums.add_sinks(d_sinks)
            d_log_f = sums.gate_gradient(log_f)
        return sums.dq.to(q.dtype), sums.dk.to(k.dtype), sums.dv.to(v.dtype), d_log_f, None, None, None


class _Task:
    """The head document's queries of one chunk in one row."""

    def __init__(self, walk: _Walk, row: int, slot: int, chunk: int, head: Head):
        self.row, self.slot, self.chunk, self.head = row, slot, chunk, head
        self.where = slice(slot * walk.plan.chunk, slot * walk.plan.chunk + head.tokens)
        self.q = walk.grouped(walk.q[row, self.where])

    def add(self, o: torch.Tensor, lse: torch.Tensor, part: tuple[Part, list[int] | slice]) -> None:
        """Merges a part into o (B, t, H, D) and lse (B, H, t)."""
        what, heads = part
        part_o, part_lse = attend_part(what)
        kv_heads = self.q.shape[0]
        here_o = o[self.row, self.where].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)  # views of both
        here_lse = lse[self.row, :, self.where].unflatten(0, (kv_heads, -1))
        here_o[heads], here_lse[heads] = merge(here_o[heads], here_lse[heads], part_o, part_lse)


class _Walk:
    """What both passes go through: tasks, and the parts that each is made of."""

    def __init__(self, mesh: Mesh, plan: RingPlan, options: dict[str, Any], summary: Summary, q, k, v, log_f):
        self.mesh, self.plan, self.options, self.summary = mesh, plan, options, summary
        self.q, self.k, self.v = q, k, v
        self.dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.kv_heads = k.shape[2]
        self.chunks = mesh.degrees.chunks_of(mesh.ring_rank)
        gates = clamped(log_f).transpose(1, 2).unflatten(2, (-1, plan.chunk)).cumsum(-1)
        self.c = gates.unflatten(1, (self.kv_heads, -1))  # (B, Hkv, G, slot, chunk), from the chunk's start on
        self.ring = KeyRing(mesh, plan, summary.needed, k, v, log_f)

    def tasks(self) -> list[_Task]:
        """This process's, in order."""
        found = []
        for row, heads in enumerate(self.plan.heads):
            for slot, chunk in enumerate(self.chunks):
                head = heads[chunk]
                if head is not None:
                    found.append(_Task(self, row, slot, chunk, head))
        return found

    def grouped(self, x: torch.Tensor) -> torch.Tensor:
        """(T, H, D) -> (Hkv, G, T, D) in the computing dtype."""
        return x.to(self.dtype).unflatten(1, (self.kv_heads, -1)).permute(1, 2, 0, 3)

    def part(self, task: _Task, k, v, rows, cols, positions: torch.Tensor, heads: Any = slice(None)) -> Part:
        """Keys k, v (S, heads, D) for a task's queries of some kv heads."""
        k, v = (x.to(self.dtype).transpose(0, 1) for x in (k, v))
        first, given = task.chunk * self.plan.chunk, self.options
        return Part(
            task.q[heads], k, v, rows, cols, first, positions, given["scale"], given["softcap"], given["window"]
        )

    def places(self, low: int, high: int) -> torch.Tensor:
        """Positions of keys, on the device."""
        return torch.arange(low, high, device=self.q.device)

    def own_parts(self, task: _Task, sinks: torch.Tensor) -> list[tuple[str, tuple[Part, Any]]]:
        """("sinks", "own" or "earlier", (part, kv heads)) of what lies here: sinks, the same chunk, the lower one."""
        found: list[tuple[str, tuple[Part, Any]]] = []
        plan, every = self.plan, slice(None)
        known = plan.sinks.get((task.row, task.head.start))
        if known is not None:
            k, v = sinks[known.first : known.first + len(known.positions)].unbind(1)
            positions = torch.tensor(known.positions, device=self.q.device)
            found.append(("sinks", (self.part(task, k, v, None, None, positions), every)))
        begin = task.chunk * plan.chunk
        low, end = plan.own_low(task.row, task.chunk), begin + task.head.tokens
        if low < end:
            where = slice(task.where.start + low - begin, task.where.stop)
            c = self.c[task.row, :, :, task.slot]
            cols = -c[..., low - begin : task.head.tokens]
            part = self.part(
                task, self.k[task.row, where], self.v[task.row, where], c[..., : task.head.tokens], cols,
                self.places(low, end),
            )  # fmt: skip
            found.append(("own", (part, every)))
        if task.slot:
            low_chunk = self.chunks[0]
            heads = self.summary.needed[task.row, task.chunk, low_chunk].nonzero()[:, 0].tolist()
            low = plan.low(task.row, task.chunk, low_chunk)
            if heads and low is not None:
                where = slice(low - low_chunk * plan.chunk, plan.chunk)
                c = self.c[task.row, :, :, 0]
                cols = (c[..., -1:] - c[..., where])[heads]
                part = self.part(
                    task, self.k[task.row, where][:, heads], self.v[task.row, where][:, heads],
                    self.rows(task, low_chunk, heads), cols, self.places(low, (low_chunk + 1) * plan.chunk), heads,
                )  # fmt: skip
                found.append(("earlier", (part, heads)))
        return found

    def rows(self, task: _Task, keys: int, heads: list[int]) -> torch.Tensor:
        """(heads, G, T) float64: the decay from the end of a chunk of keys to each query."""
        between = self.summary.between(keys, task.chunk)[task.row].unflatten(0, (self.kv_heads, -1))
        return (self.c[task.row, :, :, task.slot, : task.head.tokens] + between[..., None])[heads]

    def parts_of(self, keys: Keys) -> list[tuple[_Task, tuple[Part, Any], slice, list[int]]]:
        """(task, (part, kv heads), where among the keys, which of their heads) for every chunk that asked for them."""
        found, item = [], keys.item
        log_f = clamped(keys.log_f).permute(1, 2, 0)  # (heads, G, tokens)
        behind = log_f.flip(-1).cumsum(-1).flip(-1) - log_f
        for task in self.tasks():
            low = self.plan.low(task.row, task.chunk, item.chunk)
            if task.row != item.row or low is None:
                continue
            wanted = self.summary.needed[task.row, task.chunk, item.chunk]
            heads = [head for head in item.heads if wanted[head]]
            if not heads:
                continue
            which, where = [item.heads.index(head) for head in heads], slice(low - item.low, item.high - item.low)
            part = self.part(
                task, keys.k[where][:, which], keys.v[where][:, which], self.rows(task, item.chunk, heads),
                behind[which][..., where], self.places(low, item.high), heads,
            )  # fmt: skip
            found.append((task, (part, heads), where, which))
        return found

    def gathered_sinks(self) -> torch.Tensor:
        """(sinks, 2, Hkv, D): keys and values of all sinks that chunks share, the same on every process of the ring."""
        found = torch.zeros(self.plan.num_sinks, 2, *self.k.shape[2:], dtype=self.dtype, device=self.q.device)
        for row, at, number in self.own_sinks():
            found[number, 0], found[number, 1] = self.k[row, at], self.v[row, at]
        return self.summed(found)

    def own_sinks(self) -> list[tuple[int, int, int]]:
        """(row, place among this process's tokens, number in the buffer) of the sinks that lie here."""
        found = []
        for known in self.plan.sinks.values():
            for number, position in enumerate(known.positions):
                chunk, inside = divmod(position, self.plan.chunk)
                if chunk in self.chunks:
                    found.append((known.row, self.chunks.index(chunk) * self.plan.chunk + inside, known.first + number))
        return found

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ring, in place."""
        if x.numel():
            dist.all_reduce(x, group=self.mesh.ring_group)
            self.mesh.traffic.add("summaries", x)
        return x


class _Sums:
    """Gradients of one backward, added up part by part: dq, dk, dv (B, t, heads, D), dc (B, H, t) float64."""

    def __init__(self, walk: _Walk, o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor):
        self.walk, self.lse = walk, lse
        self.do = do.to(walk.dtype)
        self.delta = (self.do * o).sum(-1)  # (B, t, H)
        self.dq = torch.zeros_like(o)
        self.dk, self.dv = (torch.zeros(x.shape, dtype=walk.dtype, device=x.device) for x in (walk.k, walk.v))
        self.dc = torch.zeros(lse.shape, dtype=torch.float64, device=lse.device)

    def _differentiate(self, task: _Task, part: Part, heads: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Adds to dq and to the queries' dc; returns dk, dv (S, heads, D) and the sums of ds by key (heads, G, S)."""
        walk, kv_heads = self.walk, self.walk.kv_heads
        lse = self.lse[task.row, :, task.where].unflatten(0, (kv_heads, -1))[heads]
        delta = self.delta[task.row, task.where].T.unflatten(0, (kv_heads, -1))[heads]
        do = walk.grouped(self.do[task.row, task.where])[heads]
        dq, dk, dv, by_query, by_key = differentiate_part(part, lse, delta, do)
        self.dq[task.row, task.where].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)[heads] += dq
        if part.rows is not None:
            self.dc[task.row, :, task.where].unflatten(0, (kv_heads, -1))[heads] += by_query
        return dk.transpose(0, 1), dv.transpose(0, 1), by_key

    def add_own(self, task: _Task, kind: str, part: tuple[Part, Any], d_sinks: torch.Tensor) -> None:
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
                for start, stop in zip(ends[:-1], ends[1:], strict=True):
                    sums = dc[row, :, slot, start:stop].flip(-1).cumsum(-1).flip(-1)
                    result[row, :, slot, start:stop] = sums + later[:, None] if stop == plan.chunk else sums
        d_log_f = result.flatten(2).transpose(1, 2)
        return d_log_f.masked_fill(log_f < LOG_F_MIN, 0.0).to(log_f.dtype)

    def _bounds(self, row: int, chunk: int) -> list[int]:
        """Document starts inside a chunk, counted from its own."""
        plan = self.walk.plan
        begin = chunk * plan.chunk
        return [start - begin for start in plan.documents[row] if begin < start < begin + plan.chunk]
