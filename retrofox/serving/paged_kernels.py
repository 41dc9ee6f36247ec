"""Forgetting Attention over an engine's pages on a GPU: new tokens are written with c beside them, then attended to.

A row of the cache is one token of one kv head, D the head's channels, G its query heads:

    D channels of the key, D of the value, then G float32 numbers hi and G float32 numbers lo, hi + lo = c

with c the running sum of log f that `lanes.py` explains. So a row is 8 or 16 channels longer for key and value each
than without gates, and whatever moves or drops pages takes c along. Logits are scale * q_i . k_j + (c_i - c_j).

A step whose requests have one new token each, as a CUDA graph holds it, takes one kernel to write and two to attend
(one where the keys are not split); it needs no value on the host. A prompt of whole pages that were found and one token
may stand behind a page that another request's token fills in that very step: the kernel looks for it among the slots.
With a horizon each program first finds where the group's live keys begin; blocks before are not read, but for sinks.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportCallIssue=false
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from fox_kernels.decoding.lean import gate_rows
from fox_kernels.host.launch import cdiv, launch, power_of_2
from fox_kernels.layer.gate import gate_and_logit

from retrofox.serving.prompts import Links, Rows

FEW = 256
"""Rows up to which a gate takes a program for each row and head."""
TOKENS = 128
"""Tokens that a program adds up at once."""
CHUNK = 512
"""Tokens of one request that a program walks through."""
PROGRAMS = 1056
"""Programs that fill a GPU with attention: keys are split until there are as many, or `MOST_PARTS` parts."""
MOST_PARTS = 64
KEYS, WARPS, STAGES = 64, 2, 3
"""Keys that a program of attention reads at once, half as many of heads of over 256 bytes; its warps and stages."""
WAYS = tl.constexpr(64)
"""Lots of blocks that a step of the search for live keys looks at."""


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
        """Numbers of the cache that take the room of a float32 one."""
        return 4 // self.dtype.itemsize

    @property
    def extra(self) -> int:
        """Channels that a head is longer by: half of what c takes, in steps of 8 as kernels want them."""
        return -(-self.groups * self.per_float // 8) * 8


def log_f_of(hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """log sigmoid(W x + b) (T, H) float32 of hidden states (T, K), as a `ForgetGate` in a kernel."""
    if 0 < hidden_states.shape[0] <= FEW:
        return gate_rows(hidden_states.contiguous(), weight, bias)
    return gate_and_logit(hidden_states, weight, bias)[0]


@triton.jit
def _row(table, at, real, head, cache_block, cache_head, cache_token, PAGE: tl.constexpr):
    """Where the rows of a text's tokens `at` begin in the cache; in page 0 where not real."""
    page = tl.load(table + at // PAGE, mask=real, other=0).to(tl.int64)
    return page * cache_block + head * cache_head + (at % PAGE) * cache_token


@triton.jit(do_not_specialize=["requests"])
def _sums_kernel(
    log_f, sums, query_start, log_f_token, requests, heads,
    GROUPS: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One request, kv head and chunk: the sum of its log f."""
    request, head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(query_start + request).to(tl.int64) + chunk * CHUNK
    end = tl.minimum(tl.load(query_start + request + 1).to(tl.int64), start + CHUNK)
    g = tl.arange(0, PADDED)
    total = tl.zeros((PADDED,), tl.float64)
    for first in range(start, end, BLOCK):
        token = first + tl.arange(0, BLOCK)
        where = log_f + token[:, None] * log_f_token + head * GROUPS + g[None, :]
        found = tl.load(where, mask=(token < end)[:, None] & (g < GROUPS)[None, :], other=0.0)
        total += tl.sum(found.to(tl.float64), 0)
    tl.store(
        sums + ((chunk * requests + request) * heads + head) * GROUPS + g,
        total,
        mask=g < tl.where(start < end, GROUPS, 0),
    )


@triton.jit
def _sum_of(
    log_f, sums, request, first, stop, log_f_token, requests, head, heads,
    GROUPS: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum (PADDED,) float64 of log f of a request's tokens from its first new one up to `stop`."""
    g = tl.arange(0, PADDED)
    inside = g < GROUPS
    total = tl.zeros((PADDED,), tl.float64)
    whole = (stop - first) // CHUNK
    for some in range(0, whole, 16):
        chunk = some + tl.arange(0, 16)
        where = sums + ((chunk[:, None] * requests + request) * heads + head) * GROUPS + g[None, :]
        total += tl.sum(tl.load(where, mask=(chunk < whole)[:, None] & inside[None, :], other=0.0), 0)
    for start in range(first + whole * CHUNK, stop, BLOCK):
        token = start + tl.arange(0, BLOCK)
        where = log_f + token[:, None] * log_f_token + head * GROUPS + g[None, :]
        found = tl.load(where, mask=(token < stop)[:, None] & inside[None, :], other=0.0)
        total += tl.sum(found.to(tl.float64), 0)
    return total


@triton.jit
def _filler(slots, query_start, seq_lens, block_table, request, table_row, requests, PAGE: tl.constexpr):
    """The request that writes the row before this one's only new token in this step, where that begins a page; -1."""
    filler = tl.full((), -1, tl.int64)
    past = tl.load(seq_lens + request) - 1
    if (past > 0) & (past % PAGE == 0):
        page = tl.load(block_table + request.to(tl.int64) * table_row + past // PAGE - 1).to(tl.int64)
        for some in range(0, requests, 64):
            other = some + tl.arange(0, 64)
            there = other < requests
            begin = tl.load(query_start + other, mask=there, other=0)
            there = there & (begin < tl.load(query_start + other + 1, mask=there, other=0))
            slot = tl.load(slots + begin, mask=there, other=-1).to(tl.int64)
            found = tl.where(there & (slot == page * PAGE + PAGE - 1), other, -1)
            filler = tl.maximum(filler, tl.max(found, 0).to(tl.int64))
    return filler


@triton.jit(do_not_specialize=["requests"])
def _write_kernel(
    key, value, log_f, cache, floats, sums, slots, query_start, seq_lens, block_table, source, source_request,
    key_token, key_head, value_token, value_head, log_f_token, cache_block, cache_head, cache_token, table_row,
    requests, heads,
    GROUPS: tl.constexpr, PADDED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr,
    CHANNELS: tl.constexpr, PER: tl.constexpr, PAGE: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """One request, kv head and chunk of its new tokens: keys, values and c into their rows.

    SINGLE: one token each, requests without one come last; then there is no source.
    """
    request, head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = tl.load(query_start + request).to(tl.int64)
    end = tl.load(query_start + request + 1).to(tl.int64)
    start = begin + chunk * CHUNK
    if start >= end:
        return
    g = tl.arange(0, PADDED)
    inside = g < GROUPS
    before = tl.zeros((PADDED,), tl.float64)
    writer, first = request.to(tl.int64), begin  # of the request whose cached token c goes on from
    if not SINGLE:
        before += _sum_of(
            log_f, sums, writer, begin, start, log_f_token, requests, head, heads, GROUPS, PADDED, CHUNK, BLOCK
        )
    if SINGLE:
        filler = _filler(slots, query_start, seq_lens, block_table, request, table_row, requests, PAGE)
        if filler >= 0:
            writer, first = filler, tl.load(query_start + filler).to(tl.int64)
            before += tl.load(log_f + first * log_f_token + head * GROUPS + g, mask=inside, other=0.0).to(tl.float64)
    if source is not None:
        at = tl.load(source + writer).to(tl.int64)
        while at >= 0:  # written in this step, by another request
            writer = tl.load(source_request + writer).to(tl.int64)
            first = tl.load(query_start + writer).to(tl.int64)
            before += _sum_of(
                log_f, sums, writer, first, at + 1, log_f_token, requests, head, heads, GROUPS, PADDED, CHUNK, BLOCK
            )
            at = tl.load(source + writer).to(tl.int64)
    new = tl.load(query_start + writer + 1).to(tl.int64) - first
    past = tl.load(seq_lens + writer).to(tl.int64) - new
    table, last = block_table + writer * table_row, tl.maximum(past - 1, 0)
    row = _row(table, last, True, head, cache_block, cache_head, cache_token, PAGE)
    row = floats + (row + 2 * DIM) // PER
    known = g < tl.where(past > 0, GROUPS, 0)
    before += tl.load(row + g, mask=known, other=0.0).to(tl.float64)
    before += tl.load(row + GROUPS + g, mask=known, other=0.0).to(tl.float64)
    channel = tl.arange(0, CHANNELS)
    for some in range(start, tl.minimum(end, start + CHUNK), BLOCK):
        token = some + tl.arange(0, BLOCK)
        alive = token < end
        real = alive[:, None] & inside[None, :]
        gate = tl.load(log_f + token[:, None] * log_f_token + head * GROUPS + g[None, :], mask=real, other=0.0)
        gate = gate.to(tl.float64)
        if SINGLE:
            c = before[None, :] + gate
        else:
            c = before[None, :] + tl.cumsum(gate, 0)
            before += tl.sum(gate, 0)
        slot = tl.load(slots + token, mask=alive, other=-1).to(tl.int64)
        to = slot // PAGE * cache_block + head * cache_head + slot % PAGE * cache_token
        placed = alive & (slot >= 0)
        whole = placed[:, None] & (channel < DIM)[None, :]
        keys = key + token[:, None] * key_token + head * key_head + channel[None, :]
        tl.store(cache + to[:, None] + channel[None, :], tl.load(keys, mask=whole, other=0.0), mask=whole)
        values = value + token[:, None] * value_token + head * value_head + channel[None, :]
        tl.store(cache + to[:, None] + DIM + channel[None, :], tl.load(values, mask=whole, other=0.0), mask=whole)
        kept = placed[:, None] & inside[None, :]
        high = c.to(tl.float32)
        floats_to = floats + ((to + 2 * DIM) // PER)[:, None] + g[None, :]
        tl.store(floats_to, high, mask=kept)
        tl.store(floats_to + GROUPS, (c - high.to(tl.float64)).to(tl.float32), mask=kept)


@triton.jit
def _decay(own_high, own_low, floats, row, g, known, GROUPS: tl.constexpr, DIM: tl.constexpr, PER: tl.constexpr):
    """c_i - c_j (heads, keys) float32 of one query and the keys in `row`."""
    c = floats + ((row + 2 * DIM) // PER)[None, :] + g[:, None]
    decay = own_high[:, None] - tl.load(c, mask=known, other=0.0)
    return decay + (own_low[:, None] - tl.load(c + GROUPS, mask=known, other=0.0))


@triton.jit
def _attend_kernel(
    query, cache, floats, output, parts, weights, query_start, seq_lens, block_table, owner,
    scale, softcap, horizon, query_token, query_head, output_token, output_head,
    cache_block, cache_head, cache_token, table_row, heads,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, CHANNELS: tl.constexpr, PER: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, WINDOW: tl.constexpr, SINK: tl.constexpr,
    CAP: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """One token, kv head and part of its keys: all query heads of the group attend.

    SEARCH: with a horizon the steps in which its first block is found, else 0.
    """
    part, head, token = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    request = token
    if owner is not None:
        request = tl.load(owner + token)
    stop = tl.load(query_start + request + 1)
    length = tl.where(token < stop, tl.load(seq_lens + request) - (stop - 1 - token), 0)  # 0: padding
    low = length * 0
    if WINDOW > 0:
        low = tl.maximum(length - WINDOW, 0)
    g, channel, step = tl.arange(0, ROWS), tl.arange(0, CHANNELS), tl.arange(0, BLOCK)
    inside = g < GROUPS
    whole = channel < DIM
    queries = query + token.to(tl.int64) * query_token + (head * GROUPS + g)[:, None] * query_head + channel[None, :]
    q = tl.load(queries, mask=inside[:, None] & whole[None, :], other=0.0)
    table = block_table + request.to(tl.int64) * table_row
    last = tl.maximum(length - 1, 0)
    own = _row(table, last, length > 0, head, cache_block, cache_head, cache_token, PAGE)  # padding may have page -1
    own = floats + (own + 2 * DIM) // PER
    own_high = tl.load(own + g, mask=inside, other=0.0)
    own_low = tl.load(own + GROUPS + g, mask=inside, other=0.0)
    first = low // BLOCK
    if SEARCH > 0:  # c falls: a block is dead where its last key is, and all before it are
        dead, width = length * 0, 1
        for _ in tl.static_range(SEARCH - 1):
            width *= WAYS
        for _ in tl.static_range(SEARCH):
            at = (dead + (1 + tl.arange(0, WAYS)) * width) * BLOCK - 1
            row = _row(table, at, at < length, head, cache_block, cache_head, cache_token, PAGE)
            known = inside[:, None] & (at < length)[None, :]
            decay = _decay(own_high, own_low, floats, row, g, known, GROUPS, DIM, PER)
            near = known & ((decay <= 0.0 - horizon) == 0)  # NaN is to be seen
            dead += tl.sum(((tl.max(near.to(tl.int32), 0) == 0) & (at < length)).to(tl.int32), 0) * width
            width = width // WAYS
        first = tl.maximum(first, dead)
    sinks = tl.minimum(tl.cdiv(SINK, BLOCK), first)  # blocks of sinks come before those from the first on
    blocks = sinks + tl.cdiv(length, BLOCK) - first
    mine = tl.cdiv(blocks, PARTS)
    begin = part * mine
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    made = tl.zeros([ROWS, CHANNELS], tl.float32)
    for block in range(begin, tl.minimum(begin + mine, blocks)):
        at = tl.where(block < sinks, block, first + block - sinks) * BLOCK + step
        seen = (at >= low) & (at < length)
        row = _row(table, at, at < length, head, cache_block, cache_head, cache_token, PAGE)
        k = tl.load(cache + row[None, :] + channel[:, None], mask=seen[None, :] & whole[:, None], other=0.0)
        v = tl.load(cache + row[:, None] + DIM + channel[None, :], mask=seen[:, None] & whole[None, :], other=0.0)
        known = inside[:, None] & seen[None, :]
        decay = _decay(own_high, own_low, floats, row, g, known, GROUPS, DIM, PER)
        if SINK > 0:
            decay = tl.where((at < SINK)[None, :], 0.0, decay)
        if SEARCH > 0:  # a sink's decay is 0, the own key's too
            known = known & ((decay <= 0.0 - horizon) == 0)
        logits = tl.dot(q, k, input_precision="ieee") * scale
        if CAP:
            logits = softcap * (1.0 - 2.0 / (tl.exp2(2.0 * logits / softcap * 1.4426950408889634) + 1.0))
        logits = tl.where(known, (logits + decay) * 1.4426950408889634, float("-inf"))
        above = tl.maximum(top, tl.max(logits, 1))
        base = tl.where(above == float("-inf"), 0.0, above)
        p = tl.exp2(logits - base[:, None])
        old = tl.exp2(top - base)
        total = total * old + tl.sum(p, 1)
        made = tl.dot(p.to(v.dtype), v, made * old[:, None], input_precision="ieee")
        top = above
    safe = tl.where(total == 0, 1.0, total)
    made = made / safe[:, None]
    if PARTS == 1:
        to = output + token.to(tl.int64) * output_token + (head * GROUPS + g)[:, None] * output_head + channel[None, :]
        tl.store(to, made.to(output.dtype.element_ty), mask=inside[:, None] & whole[None, :])
    else:
        to = ((token.to(tl.int64) * heads + head) * GROUPS + g) * PARTS + part
        tl.store(parts + to[:, None] * CHANNELS + channel[None, :], made, mask=inside[:, None])
        tl.store(weights + to, tl.where(total == 0, float("-inf"), top + tl.log2(safe)), mask=inside)


@triton.jit
def _merge_kernel(
    parts, weights, output, output_token, output_head, query_heads,
    DIM: tl.constexpr, CHANNELS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """One token and query head: its parts, each weighed by the exponents that it added up."""
    head, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    part, channel = tl.arange(0, PARTS), tl.arange(0, CHANNELS)
    row = (token * query_heads + head) * PARTS + part
    weight = tl.load(weights + row)
    made = tl.load(parts + row[:, None] * CHANNELS + channel[None, :])
    top = tl.max(weight, 0)
    weight = tl.exp2(weight - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weight, 0)
    made = tl.sum(made * weight[:, None], 0) / tl.where(total == 0, 1.0, total)
    to = output + token * output_token + head * output_head + channel
    tl.store(to, made.to(output.dtype.element_ty), mask=channel < DIM)


@triton.jit(do_not_specialize=["first", "length"])
def _gather_kernel(
    cache, floats, pages, key, value, log_f, first, length, cache_block, cache_head, cache_token, heads,
    GROUPS: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr, CHANNELS: tl.constexpr, PER: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK cached tokens of one kv head: their keys and values, and log f as c's differences."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1)
    real = token < length
    at = first + token
    row = _row(pages, at, real, head, cache_block, cache_head, cache_token, PAGE)
    before = _row(pages, tl.maximum(at - 1, first), real, head, cache_block, cache_head, cache_token, PAGE)
    channel = tl.arange(0, CHANNELS)
    inside = real[:, None] & (channel < DIM)[None, :]
    to = (token.to(tl.int64) * heads + head)[:, None]
    found = tl.load(cache + row[:, None] + channel[None, :], mask=inside, other=0.0)
    tl.store(key + to * DIM + channel[None, :], found, mask=inside)
    found = tl.load(cache + row[:, None] + DIM + channel[None, :], mask=inside, other=0.0)
    tl.store(value + to * DIM + channel[None, :], found, mask=inside)
    g = tl.arange(0, PADDED)
    inside = real[:, None] & (g < GROUPS)[None, :]
    here = floats + ((row + 2 * DIM) // PER)[:, None] + g[None, :]
    there = floats + ((before + 2 * DIM) // PER)[:, None] + g[None, :]
    fall = tl.load(here, mask=inside, other=0.0).to(tl.float64) - tl.load(there, mask=inside, other=0.0).to(tl.float64)
    fall += tl.load(here + GROUPS, mask=inside, other=0.0).to(tl.float64)
    fall -= tl.load(there + GROUPS, mask=inside, other=0.0).to(tl.float64)
    tl.store(log_f + to * GROUPS + g[None, :], tl.minimum(fall, 0.0).to(tl.float32), mask=inside)


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
    sizes = (paged.groups, power_of_2(paged.groups), CHUNK, 1 if single else TOKENS)
    sums = None
    if not single:
        sums = torch.empty(chunks, requests, heads, paged.groups, dtype=torch.float64, device=key.device)
        summed = (log_f, sums, batch.query_start_loc, log_f.stride(0), requests, heads)
        launch(_sums_kernel, grid, summed, sizes, warps=warps)
    source, source_request = (None, None) if links is None else links
    arguments = (
        key, value, log_f, kv_cache, kv_cache.view(torch.float32), sums, batch.slot_mapping, batch.query_start_loc,
        batch.seq_lens, batch.block_table, source, source_request, key.stride(0), key.stride(1), value.stride(0),
        value.stride(1), log_f.stride(0), *kv_cache.stride()[:3], batch.block_table.stride(0), requests, heads,
    )  # fmt: skip
    row = (paged.dim, power_of_2(paged.dim), paged.per_float, kv_cache.shape[2], single)
    launch(_write_kernel, grid, arguments, sizes + row, warps=warps)


def attend(
    paged: Paged,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    batch: Any,
    output: torch.Tensor,
    options: dict[str, Any],
    owner: torch.Tensor | None = None,
) -> None:
    """Forgetting Attention of tokens over the rows of their texts, which are written, into `output`.

    A token of a request that has none (padding) gets zeros.

    Args:
        query: (T, H, D) in the rows' dtype, of unit last stride, as `output` (T, H, D).
        kv_cache: as in `write`.
        batch: query_start_loc, seq_lens, block_table of `write`.
        options: scale, window, sink, softcap and horizon of `fox_kernels.forgetting_attention`.
        owner: (T,) int32, the request of each token; None where the number of both is the same.
    """
    tokens, query_heads, dim = query.shape
    heads = query_heads // paged.groups
    parts = min(power_of_2(cdiv(PROGRAMS, max(tokens * heads, 1))), MOST_PARTS)
    channels = power_of_2(dim)
    made = weights = output
    if parts > 1:
        made = torch.empty(tokens, query_heads, parts, channels, dtype=torch.float32, device=query.device)
        weights = torch.empty(tokens, query_heads, parts, dtype=torch.float32, device=query.device)
    softcap, horizon = options["softcap"], options["horizon"]
    arguments = (
        query, kv_cache, kv_cache.view(torch.float32), output, made, weights, batch.query_start_loc, batch.seq_lens,
        batch.block_table, owner, float(options["scale"]), float(softcap or 0.0), float(horizon or 0.0),
        query.stride(0), query.stride(1), output.stride(0), output.stride(1), *kv_cache.stride()[:3],
        batch.block_table.stride(0), heads,
    )  # fmt: skip
    keys = KEYS if channels <= 128 * paged.per_float // 2 else KEYS // 2
    row = (paged.groups, 16, dim, channels, paged.per_float, kv_cache.shape[2])
    longest = batch.block_table.shape[1] * kv_cache.shape[2]
    search = 0 if horizon is None else next(steps for steps in range(1, 5) if WAYS.value**steps * keys >= longest)
    constants = (*row, keys, parts, options["window"] or 0, options["sink"], softcap is not None, search)
    launch(_attend_kernel, (parts, heads, tokens), arguments, constants, warps=WARPS, stages=STAGES)
    if parts > 1:
        arguments = (made, weights, output, output.stride(0), output.stride(1), query_heads)
        launch(_merge_kernel, (query_heads, tokens), arguments, (dim, channels, parts), warps=1 if parts <= 16 else 4)


def gather(paged: Paged, kv_cache: torch.Tensor, pages: torch.Tensor, first: int, length: int) -> Rows:
    """Tokens `first` to `length` of a text out of its pages (pages,) int32; log f of the first is 0."""
    _, heads, page, _ = kv_cache.shape
    made = kv_cache.new_empty(2, length - first, heads, paged.dim)
    log_f = torch.empty(length - first, heads * paged.groups, dtype=torch.float32, device=kv_cache.device)
    channels = power_of_2(paged.dim)
    block = 4096 // channels
    arguments = (
        kv_cache, kv_cache.view(torch.float32), pages, made[0], made[1], log_f, first, length - first,
        *kv_cache.stride()[:3], heads,
    )  # fmt: skip
    row = (paged.groups, power_of_2(paged.groups), paged.dim, channels, paged.per_float, page, block)
    launch(_gather_kernel, (cdiv(length - first, block), heads), arguments, row)
    return Rows(made[0], made[1], log_f)
