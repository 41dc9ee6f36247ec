"""What both passes of a ring go through: the queries that need keys from elsewhere, and the parts of their softmax."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from retrofox.parallel.kernels import attend
from retrofox.parallel.mesh import Mesh
from retrofox.parallel.messages import KeyRing, Keys
from retrofox.parallel.offsets import Summary, clamped
from retrofox.parallel.partial_softmax import Part, merge
from retrofox.parallel.plan import Head, RingPlan


class Task:
    """The head document's queries of one chunk in one row."""

    def __init__(self, walk: Walk, row: int, slot: int, chunk: int, head: Head):
        self.row, self.slot, self.chunk, self.head = row, slot, chunk, head
        self.where = slice(slot * walk.plan.chunk, slot * walk.plan.chunk + head.tokens)
        self.q = walk.grouped(walk.q[row, self.where])

    def add(self, o: torch.Tensor, lse: torch.Tensor, part: tuple[Part, list[int] | slice]) -> None:
        """Merges a part into o (B, t, H, D) and lse (B, H, t)."""
        what, heads = part
        part_o, part_lse = attend(what)
        kv_heads = self.q.shape[0]
        here_o = o[self.row, self.where].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)  # views of both
        here_lse = lse[self.row, :, self.where].unflatten(0, (kv_heads, -1))
        here_o[heads], here_lse[heads] = merge(here_o[heads], here_lse[heads], part_o, part_lse)


class Walk:
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

    def tasks(self) -> list[Task]:
        """This process's, in order."""
        found = []
        for row, heads in enumerate(self.plan.heads):
            for slot, chunk in enumerate(self.chunks):
                head = heads[chunk]
                if head is not None:
                    found.append(Task(self, row, slot, chunk, head))
        return found

    def grouped(self, x: torch.Tensor) -> torch.Tensor:
        """(T, H, D) -> (Hkv, G, T, D)."""
        return x.unflatten(1, (self.kv_heads, -1)).permute(1, 2, 0, 3)

    def part(self, task: Task, k, v, rows, cols, first_key: int, heads: Any = slice(None)) -> Part:
        """Keys k, v (S, heads, D) for a task's queries of some kv heads."""
        k, v = (x.to(self.q.dtype).transpose(0, 1) for x in (k, v))
        first, given = task.chunk * self.plan.chunk, self.options
        return Part(
            task.q[heads],
            k,
            v,
            rows,
            cols,
            first,
            first_key,
            given["scale"],
            given["softcap"],
            given["window"],
            given["horizon"],
        )

    def own_parts(self, task: Task, sinks: torch.Tensor) -> list[tuple[str, tuple[Part, Any]]]:
        """("sinks", "own" or "earlier", (part, kv heads)) of what lies here: sinks, the same chunk, the lower one."""
        found: list[tuple[str, tuple[Part, Any]]] = []
        plan, every = self.plan, slice(None)
        known = plan.sinks.get((task.row, task.head.start))
        if known is not None:
            k, v = sinks[known.first : known.first + len(known.positions)].unbind(1)
            found.append(("sinks", (self.part(task, k, v, None, None, known.start), every)))
        begin = task.chunk * plan.chunk
        low, end = plan.own_low(task.row, task.chunk), begin + task.head.tokens
        if low < end:
            where = slice(task.where.start + low - begin, task.where.stop)
            c = self.c[task.row, :, :, task.slot]
            cols = -c[..., low - begin : task.head.tokens]
            part = self.part(
                task, self.k[task.row, where], self.v[task.row, where], c[..., : task.head.tokens], cols, low
            )
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
                    self.rows(task, low_chunk, heads), cols, low, heads,
                )  # fmt: skip
                found.append(("earlier", (part, heads)))
        return found

    def rows(self, task: Task, keys: int, heads: list[int]) -> torch.Tensor:
        """(heads, G, T) float64: the decay from the end of a chunk of keys to each query."""
        between = self.summary.between(keys, task.chunk)[task.row].unflatten(0, (self.kv_heads, -1))
        return (self.c[task.row, :, :, task.slot, : task.head.tokens] + between[..., None])[heads]

    def parts_of(self, keys: Keys) -> list[tuple[Task, tuple[Part, Any], slice, list[int]]]:
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
                behind[which][..., where], low, heads,
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
