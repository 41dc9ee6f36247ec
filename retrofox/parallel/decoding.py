"""Decoding over keys that processes share: a query meets each process's keys where they lie, and the parts merge.

    o = sum_r w_r o_r,   w_r = exp(lse_r - lse),   lse = ln sum_r exp(lse_r)      over the processes r

o_r and lse_r are the attention to the keys of process r (`part`), in float32. The prompt is read as in training
(`shards`), and every process keeps the keys, values and gates of its own part of it. From then on all processes compute
every new token alike; its key goes to one of them in turn. A step moves (D + 1) floats a head, layer and process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from fox_kernels.host.device import triton_unsupported
from fox_kernels.options import Options

from retrofox.parallel.mesh import Mesh
from retrofox.parallel.offsets import clamped
from retrofox.parallel.part import Part, attend_part, merge
from retrofox.parallel.shards import Rows, Shards

LN_2 = 0.6931471805599453


class KeyShard:
    """One layer's keys on one process, in the order of their positions, with room for those that will come.

    c is the running sum of log f over the whole text in base 2, as two floats; `total` is that of its last token.

    Args:
        k, v: (B, Hkv, S, D); c: (B, H, S) float64; positions: (S,) int64 on the CPU; total: (B, H) float64.
        room: tokens that may be appended.
    """

    def __init__(self, k: torch.Tensor, v: torch.Tensor, c: torch.Tensor, positions: torch.Tensor, room: int):
        self.length = k.shape[2]
        fits = self.length + room
        self.k, self.v = (x.new_empty(*x.shape[:2], fits, x.shape[3]) for x in (k, v))
        self.high, self.low = (torch.empty(*c.shape[:2], fits, device=c.device) for _ in range(2))
        self.positions = torch.empty(fits, dtype=torch.int64)
        self._write(slice(self.length), k, v, c, positions)

    def _write(self, at: slice, k: torch.Tensor, v: torch.Tensor, c: torch.Tensor, positions: Any) -> None:
        self.k[:, :, at], self.v[:, :, at] = k, v
        self.high[..., at] = c.float()
        self.low[..., at] = c - c.float()
        self.positions[at] = positions

    def append(self, k: torch.Tensor, v: torch.Tensor, c: torch.Tensor, position: int) -> None:
        """Takes a new token: k, v (B, Hkv, 1, D), c (B, H, 1) float64."""
        self._write(slice(self.length, self.length + 1), k, v, c, position)
        self.length += 1

    def attend(
        self, q: torch.Tensor, c: torch.Tensor, position: int, options: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of one query, (o (B, H, D), lse (B, H)), zeros and -inf where it sees none of these keys.

        Args:
            q: (B, H, 1, D) of the token at `position`; c: (B, H) float64 of that token, base 2.
        """
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        scale = q.shape[-1] ** -0.5 if options["scale"] is None else options["scale"]
        o, lse = q.new_zeros(q[:, :, 0].shape, dtype=dtype), q.new_full(q.shape[:2], -torch.inf, dtype=dtype)
        for where, decays in self._stretches(position, options):
            if decays and _runs(q, self.k, where):
                found = self._by_kernel(q, c, where, scale, options["softcap"])
            else:
                found = self._by_formula(q, c, where, decays, scale, options["softcap"])
            o, lse = merge(o, lse, *found)
        return o, lse

    def _stretches(self, position: int, options: dict[str, Any]) -> list[tuple[slice, bool]]:
        """(keys, whether they decay) of the sinks and of what else a query sees."""
        low, known = 0, self.positions[: self.length]
        if options["window"] is not None:
            low = int(torch.searchsorted(known, position - options["window"] + 1))
        sinks = int(torch.searchsorted(known, options["sink"])) if options["sink"] else 0
        both = [(slice(low, sinks), False), (slice(max(low, sinks), self.length), True)]
        return [(where, decays) for where, decays in both if where.start < where.stop]

    def _by_kernel(self, q: torch.Tensor, c: torch.Tensor, where: slice, scale: float, softcap: float | None) -> Any:
        """As `_by_formula`. The kernel gives the query c of its last key; the rest of its c is added to lse here."""
        high, low = (x[..., where] for x in (self.high, self.low))
        k, v = (x[:, :, where].transpose(1, 2) for x in (self.k, self.v))
        kernel = _kernel()
        with kernel.on(q):
            o, lse2 = kernel.decode(
                q.transpose(1, 2), k, v, high, low, Options(scale, softcap=softcap), out_dtype=torch.float32
            )
        ahead = c - high[..., -1].double() - low[..., -1].double()
        return o[:, 0], ((lse2[..., 0].double() + ahead) * LN_2).float()

    def _by_formula(
        self, q: torch.Tensor, c: torch.Tensor, where: slice, decays: bool, scale: float, softcap: float | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        outputs, sums, kv_heads = [], [], self.k.shape[1]
        for row in range(q.shape[0]):
            rows = cols = None
            if decays:
                rows = (c[row] * LN_2).unflatten(0, (kv_heads, -1))[..., None]
                own = self.high[row, :, where].double() + self.low[row, :, where].double()
                cols = (-own * LN_2).unflatten(0, (kv_heads, -1))
            last = where.stop - where.start - 1  # the query sees all of these keys
            grouped = q[row].unflatten(0, (kv_heads, -1))
            k, v = self.k[row, :, where], self.v[row, :, where]
            o, lse = attend_part(Part(grouped, k, v, rows, cols, last, 0, scale, softcap, None))
            outputs.append(o[:, :, 0].flatten(0, 1))
            sums.append(lse[..., 0].flatten())
        return torch.stack(outputs), torch.stack(sums)


@functools.cache
def _kernel() -> Any:
    """What needs Triton, imported on first use."""
    from fox_kernels.decoding.planner import MAX_ROWS, launch_decode, pays
    from fox_kernels.host.device import on_device

    return SimpleNamespace(decode=launch_decode, pays=pays, most_rows=MAX_ROWS, on=on_device)


def _runs(q: torch.Tensor, k: torch.Tensor, where: slice) -> bool:
    if triton_unsupported(q) is not None or k.dtype != q.dtype:
        return False
    return _kernel().pays(q.transpose(1, 2), k[:, :, where].transpose(1, 2))


class Reading(Shards):
    """The forward over a prompt: shared rows, of which every process keeps what decoding will need of its own part.

    Args:
        length: tokens of the prompt; the rows may be longer, padded at their end.
    """

    def __init__(self, mesh: Mesh, rows: Rows, device: torch.device, length: int):
        super().__init__(mesh, rows, device)
        self.prompt = length
        positions = [torch.arange(*each) for each in mesh.degrees.segments(mesh.rank, rows.length)]
        self.parts = [len(each) for each in positions]
        self.positions = torch.cat(positions)
        self.kept = int((self.positions < length).sum())  # what lies behind is padding
        self.layers: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self.newest: dict[Any, torch.Tensor] = {}

    @property
    def last(self) -> int | None:
        """Where the prompt's last token is among this process's, None if another holds it."""
        found = (self.positions == self.prompt - 1).nonzero()
        return int(found[0, 0]) if len(found) else None

    def attend(self, query, key, value, log_f, options: dict[str, Any], locally: Callable[..., torch.Tensor]):
        output = super().attend(query, key, value, log_f, options, locally)
        first = 0  # later queries see no key before it
        if options["window"] is not None:
            first = int(torch.searchsorted(self.positions, self.prompt - options["window"] + 1))
        keys = slice(min(first, self.kept), self.kept)
        self.layers.append((key[:, :, keys].clone(), value[:, :, keys].clone(), log_f))
        return output

    def shifted(self, shift, states, hidden_states, position_ids) -> torch.Tensor:
        last = self.last
        self.newest[shift] = torch.zeros_like(states[:, 0]) if last is None else states[:, last].clone()
        return super().shifted(shift, states, hidden_states, position_ids)

    def decoding(self, new_tokens: int) -> Decoding:
        """What attention asks from now on, with room for so many tokens; every process must call it."""
        room, shards = -(-new_tokens // self.mesh.size), []
        while self.layers:  # one by one, so that no two layers exist twice
            k, v, log_f = self.layers.pop(0)
            c, total = self._sums(log_f)
            keys = slice(self.kept - k.shape[2], self.kept)
            shards.append((KeyShard(k, v, c[..., keys], self.positions[keys], room), total))
        newest = {shift: self.mesh.sum(x) for shift, x in self.newest.items()}  # zeros but for one process
        return Decoding(self.mesh, shards, newest, self.prompt)

    def _sums(self, log_f: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(c (B, H, t) float64 of this process's tokens, total (B, H) float64 of the prompt), in base 2."""
        gates = clamped(log_f).transpose(1, 2) / LN_2
        real = (self.positions < self.prompt).to(gates.device)
        within = [x.cumsum(-1) for x in (gates * real).split(self.parts, -1)]
        mine = gates.new_zeros(*gates.shape[:2], 2)  # of at most two stretches
        for number, x in enumerate(within):
            mine[..., number] = x[..., -1]
        found = self.mesh.gathered(mine)
        every = [self.mesh.degrees.segments(process, self.rows.length) for process in range(self.mesh.size)]
        starts = {start: found[p, ..., n] for p, segments in enumerate(every) for n, (start, _) in enumerate(segments)}
        before, running = {}, torch.zeros_like(mine[..., 0])
        for start in sorted(starts):
            before[start], running = running, running + starts[start]
        own = [start for start, _ in every[self.mesh.rank]]
        return torch.cat([x + before[s][..., None] for x, s in zip(within, own, strict=True)], -1), running


class Decoding:
    """What attention asks in a forward over one new token: `FoxModelMixin.forward(shards=...)`, on every process alike.

    Attributes:
        position: of the next token.
    """

    def __init__(
        self, mesh: Mesh, layers: list[tuple[KeyShard, torch.Tensor]], newest: dict[Any, torch.Tensor], position: int
    ):
        self.mesh, self.newest, self.position = mesh, newest, position
        self.layers = [shard for shard, _ in layers]
        self.totals = [total for _, total in layers]
        self._layer = 0

    def attend(self, query, key, value, log_f, options: dict[str, Any], locally: Callable[..., torch.Tensor]):
        """Attention of one token to all that is there, itself included; shapes as in `Shards.attend`, t = 1."""
        shard = self.layers[self._layer]
        c = self.totals[self._layer] = self.totals[self._layer] + clamped(log_f)[:, 0] / LN_2
        if self.position % self.mesh.size == self.mesh.rank:
            shard.append(key, value, c[..., None], self.position)
        o, lse = shard.attend(query, c, self.position, options)
        found = self.mesh.gathered(torch.cat([o, lse[..., None]], -1))
        o, lse = found[0, ..., :-1], found[0, ..., -1]
        for part in found[1:]:
            o, lse = merge(o, lse, part[..., :-1], part[..., -1])
        self._layer = (self._layer + 1) % len(self.layers)
        self.position += self._layer == 0
        return o[:, None].to(query.dtype)

    def shifted(self, shift, states, hidden_states, position_ids) -> torch.Tensor:
        """Key or value shift of one token, whose predecessor's states every process keeps."""
        before, self.newest[shift] = self.newest[shift], states[:, -1].clone()
        return shift(states, before, None, hidden_states)
