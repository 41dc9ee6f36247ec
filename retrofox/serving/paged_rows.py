"""The rows of an engine's cache on a GPU: new tokens are written with c beside them, a past is copied out.

A row of the cache is one token of one kv head, D the head's channels, G its query heads:

    D channels of the key, D of the value, then G float32 numbers hi and G float32 numbers lo, hi + lo = c

with c the running sum of log f that `lanes.py` explains. So a row is 8 or 16 channels longer for key and value each
than without gates, and whatever moves or drops pages takes c along.

A step whose requests have one new token each, as a CUDA graph holds it, takes one kernel and needs no value on the
host. A prompt of whole pages that were found and one token may stand behind a page that another request's token fills
in that very step: the kernel looks for it among the slots.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from fox_kernels.decoding.elementwise import gate_rows
from fox_kernels.host.launch import cdiv, launch, power_of_2
from fox_kernels.layer.gate import gate_and_logit

from retrofox.serving.prefill import KeyValueRows, Links

FEW = 256
"""Rows up to which a gate takes a program for each row and head."""
TOKENS = 128
"""Tokens that a program adds up at once."""
CHUNK = 512
"""Tokens of one request that a program walks through."""


@dataclass(frozen=True)
class Paged:
    """The rows of a layer's cache; see the module.

    Args:
        groups: query heads per kv head, G.
        dim: channels of a head, D.
        dtype: bfloat16 or float32, the cache's.
    """

    groups: int
    dim: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def per_float(self) -> int:
        """Numbers of the cache that take as many bytes as a float32 one."""
        return 4 // self.dtype.itemsize

    @property
    def extra(self) -> int:
        """Channels that a head is longer by: half of what c takes, in steps of 8 as kernels want them."""
        return -(-self.groups * self.per_float // 8) * 8

    def row(self, page: int, least: int = 1) -> Row:
        """Constants of kernels for a page of so many tokens; groups are padded to `least` or more."""
        padded = max(least, power_of_2(self.groups))
        return Row(self.groups, padded, self.dim, power_of_2(self.dim), self.per_float, page)


def log_f_of(hidden_states: torch.Tensor, gate: Any) -> torch.Tensor:
    """log sigmoid(W x + b) - bounds (T, H) float32 of hidden states (T, K), as a `ForgetGate` in a kernel."""
    if 0 < hidden_states.shape[0] <= FEW:
        log_f = gate_rows(hidden_states.contiguous(), gate.weight, gate.bias)
    else:
        log_f, _ = gate_and_logit(hidden_states, gate.weight, gate.bias, keeps_logit=False)
    return log_f if gate.bounds is None else log_f.sub_(gate.bounds)


class Row(NamedTuple):
    """Constants of kernels for a `Paged` row; `padded` and `channels` are groups and dim as powers of two."""

    groups: int
    padded: int
    dim: int
    channels: int
    per_float: int
    page: int  # tokens


class Pages(NamedTuple):
    """An engine's cache, its numbers also as float32 ones, and its strides."""

    rows: Any
    floats: Any
    block: int
    head: int
    token: int


class Requests(NamedTuple):
    """A step's requests: where their new tokens begin, their lengths with these, their pages."""

    start: Any
    length: Any
    table: Any
    table_row: int


def pages_of(kv_cache: torch.Tensor) -> Pages:
    return Pages(kv_cache, kv_cache.view(torch.float32), *kv_cache.stride()[:3])


def requests_of(batch: Any) -> Requests:
    return Requests(batch.query_start_loc, batch.seq_lens, batch.block_table, batch.block_table.stride(0))


@triton.jit
def row_of(pages, table, at, real, head, ROW: tl.constexpr):
    """Where the rows of a text's tokens `at` begin in the cache; in page 0 where not real."""
    page = tl.load(table + at // ROW.page, mask=real, other=0).to(tl.int64)
    return page * pages.block + head * pages.head + (at % ROW.page) * pages.token


@triton.jit
def c_of(pages, row, ROW: tl.constexpr):
    """Where c of a row lies: its G numbers hi, and behind them lo."""
    return pages.floats + (row + 2 * ROW.dim) // ROW.per_float


@triton.jit(do_not_specialize=["requests"])
def _sums_kernel(
    log_f, sums, query_start, log_f_token, requests, heads, ROW: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """One request, kv head and chunk: the sum of its log f."""
    request, head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(query_start + request).to(tl.int64) + chunk * CHUNK
    end = tl.minimum(tl.load(query_start + request + 1).to(tl.int64), start + CHUNK)
    total = _sum_of(log_f, None, request, start, end, log_f_token, requests, head, heads, ROW, CHUNK, BLOCK)
    g = tl.arange(0, ROW.padded)
    to = sums + ((chunk * requests + request) * heads + head) * ROW.groups + g
    tl.store(to, total, mask=g < tl.where(start < end, ROW.groups, 0))


@triton.jit
def _sum_of(
    log_f, sums, request, first, stop, log_f_token, requests, head, heads,
    ROW: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum (padded,) float64 of log f of a request's tokens from `first` up to `stop`; sums: those of whole chunks."""
    PADDED: tl.constexpr = ROW.padded
    g = tl.arange(0, PADDED)
    inside = g < ROW.groups
    total = tl.zeros((PADDED,), tl.float64)
    if sums is not None:
        whole = (stop - first) // CHUNK
        for some in range(0, whole, 16):
            chunk = some + tl.arange(0, 16)
            where = sums + ((chunk[:, None] * requests + request) * heads + head) * ROW.groups + g[None, :]
            total += tl.sum(tl.load(where, mask=(chunk < whole)[:, None] & inside[None, :], other=0.0), 0)
        first += whole * CHUNK
    for start in range(first, stop, BLOCK):
        token = start + tl.arange(0, BLOCK)
        where = log_f + token[:, None] * log_f_token + head * ROW.groups + g[None, :]
        found = tl.load(where, mask=(token < stop)[:, None] & inside[None, :], other=0.0)
        total += tl.sum(found.to(tl.float64), 0)
    return total


@triton.jit
def _filler(slots, requests, request, count, PAGE: tl.constexpr):
    """The request that writes the row before this one's only new token in this step, where that begins a page; -1."""
    filler = tl.full((), -1, tl.int64)
    past = tl.load(requests.length + request) - 1
    if (past > 0) & (past % PAGE == 0):
        page = tl.load(requests.table + request.to(tl.int64) * requests.table_row + past // PAGE - 1).to(tl.int64)
        for some in range(0, count, 64):
            other = some + tl.arange(0, 64)
            there = other < count
            begin = tl.load(requests.start + other, mask=there, other=0)
            there = there & (begin < tl.load(requests.start + other + 1, mask=there, other=0))
            slot = tl.load(slots + begin, mask=there, other=-1).to(tl.int64)
            found = tl.where(there & (slot == page * PAGE + PAGE - 1), other, -1)
            filler = tl.maximum(filler, tl.max(found, 0).to(tl.int64))
    return filler


@triton.jit(do_not_specialize=["count"])
def _write_kernel(
    key, key_strides, value, value_strides, log_f, log_f_token, sums, slots, requests, links, pages, count, heads,
    ROW: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """One of `count` requests, kv head and chunk of its new tokens: keys, values and c into their rows.

    SINGLE: one token each, requests without one come last; then there are no links.
    """
    request, head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = tl.load(requests.start + request).to(tl.int64)
    end = tl.load(requests.start + request + 1).to(tl.int64)
    start = begin + chunk * CHUNK
    if start >= end:
        return
    PADDED: tl.constexpr = ROW.padded
    g = tl.arange(0, PADDED)
    inside = g < ROW.groups
    before = tl.zeros((PADDED,), tl.float64)
    writer, first = request.to(tl.int64), begin  # of the request whose cached token c goes on from
    if not SINGLE:
        before += _sum_of(log_f, sums, writer, begin, start, log_f_token, count, head, heads, ROW, CHUNK, BLOCK)
    if SINGLE:
        filler = _filler(slots, requests, request, count, ROW.page)
        if filler >= 0:
            writer, first = filler, tl.load(requests.start + filler).to(tl.int64)
            theirs = log_f + first * log_f_token + head * ROW.groups + g
            before += tl.load(theirs, mask=inside, other=0.0).to(tl.float64)
    if links is not None:
        at = tl.load(links.token + writer).to(tl.int64)
        while at >= 0:  # written in this step, by another request
            writer = tl.load(links.request + writer).to(tl.int64)
            first = tl.load(requests.start + writer).to(tl.int64)
            before += _sum_of(log_f, sums, writer, first, at + 1, log_f_token, count, head, heads, ROW, CHUNK, BLOCK)
            at = tl.load(links.token + writer).to(tl.int64)
    new = tl.load(requests.start + writer + 1).to(tl.int64) - first
    past = tl.load(requests.length + writer).to(tl.int64) - new
    table, last = requests.table + writer * requests.table_row, tl.maximum(past - 1, 0)
    cached = c_of(pages, row_of(pages, table, last, True, head, ROW), ROW) + g
    known = g < tl.where(past > 0, ROW.groups, 0)
    before += tl.load(cached, mask=known, other=0.0).to(tl.float64)
    before += tl.load(cached + ROW.groups, mask=known, other=0.0).to(tl.float64)
    channel = tl.arange(0, ROW.channels)
    for some in range(start, tl.minimum(end, start + CHUNK), BLOCK):
        token = some + tl.arange(0, BLOCK)
        alive = token < end
        real = alive[:, None] & inside[None, :]
        gate = tl.load(log_f + token[:, None] * log_f_token + head * ROW.groups + g[None, :], mask=real, other=0.0)
        gate = gate.to(tl.float64)
        if SINGLE:
            c = before[None, :] + gate
        else:
            c = before[None, :] + tl.cumsum(gate, 0)
            before += tl.sum(gate, 0)
        slot = tl.load(slots + token, mask=alive, other=-1).to(tl.int64)
        to = slot // ROW.page * pages.block + head * pages.head + slot % ROW.page * pages.token
        placed = alive & (slot >= 0)
        whole = placed[:, None] & (channel < ROW.dim)[None, :]
        keys = key + token[:, None] * key_strides[0] + head * key_strides[1] + channel[None, :]
        tl.store(pages.rows + to[:, None] + channel[None, :], tl.load(keys, mask=whole, other=0.0), mask=whole)
        values = value + token[:, None] * value_strides[0] + head * value_strides[1] + channel[None, :]
        values_to = pages.rows + to[:, None] + ROW.dim + channel[None, :]
        tl.store(values_to, tl.load(values, mask=whole, other=0.0), mask=whole)
        kept = placed[:, None] & inside[None, :]
        high = c.to(tl.float32)
        floats_to = c_of(pages, to, ROW)[:, None] + g[None, :]
        tl.store(floats_to, high, mask=kept)
        tl.store(floats_to + ROW.groups, (c - high.to(tl.float64)).to(tl.float32), mask=kept)


@triton.jit(do_not_specialize=["sinks", "first", "length"])
def _gather_kernel(
    pages, table, key, value, log_f, sinks, first, length, heads, ROW: tl.constexpr, BLOCK: tl.constexpr
):
    """BLOCK of a text's first `sinks` tokens and those from `first` on: keys, values, log f as c's differences."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1)
    real = token < length
    at = tl.where(token < sinks, token, first + token - sinks)
    row = row_of(pages, table, at, real, head, ROW)
    before = row_of(pages, table, tl.maximum(at - 1, first), real, head, ROW)
    channel = tl.arange(0, ROW.channels)
    inside = real[:, None] & (channel < ROW.dim)[None, :]
    to = (token.to(tl.int64) * heads + head)[:, None]
    found = tl.load(pages.rows + row[:, None] + channel[None, :], mask=inside, other=0.0)
    tl.store(key + to * ROW.dim + channel[None, :], found, mask=inside)
    found = tl.load(pages.rows + row[:, None] + ROW.dim + channel[None, :], mask=inside, other=0.0)
    tl.store(value + to * ROW.dim + channel[None, :], found, mask=inside)
    g = tl.arange(0, ROW.padded)
    inside = real[:, None] & (g < ROW.groups)[None, :]
    here = c_of(pages, row, ROW)[:, None] + g[None, :]
    there = c_of(pages, before, ROW)[:, None] + g[None, :]
    fall = tl.load(here, mask=inside, other=0.0).to(tl.float64) - tl.load(there, mask=inside, other=0.0).to(tl.float64)
    fall += tl.load(here + ROW.groups, mask=inside, other=0.0).to(tl.float64)
    fall -= tl.load(there + ROW.groups, mask=inside, other=0.0).to(tl.float64)
    tl.store(log_f + to * ROW.groups + g[None, :], tl.minimum(fall, 0.0).to(tl.float32), mask=inside)


def write(
    paged: Paged,
    key: torch.Tensor,
    value: torch.Tensor,
    log_f: torch.Tensor,
    kv_cache: torch.Tensor,
    batch: Any,
    links: Links | None,
) -> None:
    """Writes new tokens into their rows, c going on from the cache.

    Shapes: key, value (T, Hkv, D) in the rows' dtype, log_f (T, H) float32, each of unit last stride; kv_cache
    (blocks, Hkv, tokens, 2 (D + extra)); batch has query_start_loc (R + 1,), seq_lens (R,), block_table (R, pages)
    int32, slot_mapping (T,) int64, negative for padding, and max_query_len.
    """
    heads, requests = value.shape[1], batch.query_start_loc.shape[0] - 1
    single = batch.max_query_len == 1 and links is None
    chunks = cdiv(batch.max_query_len, CHUNK)
    grid = (requests, heads, chunks)
    warps = 1 if single else 4
    sizes = (paged.row(kv_cache.shape[2]), CHUNK, 1 if single else TOKENS)
    sums = None
    if chunks > 1:
        sums = torch.empty(chunks, requests, heads, paged.groups, dtype=torch.float64, device=key.device)
        summed = (log_f, sums, batch.query_start_loc, log_f.stride(0), requests, heads)
        launch(_sums_kernel, grid, summed, sizes, warps=warps)
    launch(
        _write_kernel, grid,
        (
            key, key.stride()[:2], value, value.stride()[:2], log_f, log_f.stride(0), sums, batch.slot_mapping,
            requests_of(batch), links, pages_of(kv_cache), requests, heads,
        ),
        (*sizes, single), warps=warps,
    )  # fmt: skip


def gather(
    paged: Paged, kv_cache: torch.Tensor, pages: torch.Tensor, first: int, length: int, sinks: int = 0
) -> KeyValueRows:
    """Tokens `first` to `length` of a text out of its pages (pages,) int32, behind those of its `sinks` before `first`.

    log f of the first is 0, of a sink any: it doesn't decay.
    """
    _, heads, page, _ = kv_cache.shape
    sinks = min(sinks, first)
    rows = sinks + length - first
    made = kv_cache.new_empty(2, rows, heads, paged.dim)
    log_f = torch.empty(rows, heads * paged.groups, dtype=torch.float32, device=kv_cache.device)
    row = paged.row(page)
    block = 4096 // row.channels
    arguments = (pages_of(kv_cache), pages, made[0], made[1], log_f, sinks, first, rows, heads)
    launch(_gather_kernel, (cdiv(rows, block), heads), arguments, (row, block))
    return KeyValueRows(made[0], made[1], log_f)
