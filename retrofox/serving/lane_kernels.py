"""The lanes of a layer in one kernel or two on a GPU, in place of some forty; the cached rows of a text in one.

`lanes.py` says what lanes are. A step in which every request has one new token, as a CUDA graph holds it, takes one
kernel. Longer ones take two: log f of a chunk of tokens is added up first, so that chunks need not wait for each other.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from retrofox.serving.lanes import Lanes
from retrofox.serving.prompts import Links, Rows

TOKENS = 128
"""Tokens that a program adds up at once."""
CHUNK = 512
"""Tokens of one request that a program walks through."""


@triton.jit
def _split_off(x):
    """x float64 -> (its first bfloat16 term as float64, what is left)."""
    part = x.to(tl.float32).to(tl.bfloat16).to(tl.float32).to(tl.float64)
    return part, x - part


@triton.jit(do_not_specialize=["requests"])
def _log_f_kernel(
    key, log_f, sums, query_start, key_token, key_head, requests, heads,
    GROUPS: tl.constexpr, PADDED: tl.constexpr, TERMS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One request, kv head and chunk: log f from its keys' lanes into log_f, their sum into sums."""
    request, head, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(query_start + request).to(tl.int64) + chunk * CHUNK
    end = tl.minimum(tl.load(query_start + request + 1).to(tl.int64), start + CHUNK)
    g = tl.arange(0, PADDED)
    inside = g < GROUPS
    total = tl.zeros((PADDED,), tl.float64)
    for first in range(start, end, BLOCK):
        token = first + tl.arange(0, BLOCK)
        real = (token < end)[:, None] & inside[None, :]
        keys = key + token[:, None] * key_token + head * key_head + g[None, :]
        gate = tl.zeros((BLOCK, PADDED), tl.float32)
        for term in tl.static_range(TERMS):  # exact: they are the 24 bits of a float32
            gate += tl.load(keys + term * (GROUPS + 1), mask=real, other=0.0).to(tl.float32)
        tl.store(log_f + (token[:, None] * heads + head) * GROUPS + g[None, :], gate, mask=real)
        total += tl.sum(gate.to(tl.float64), 0)
    tl.store(sums + ((chunk * requests + request) * heads + head) * GROUPS + g, total, mask=inside & (start < end))


@triton.jit
def _sum_of(
    log_f, sums, request, first, stop, requests, head, heads,
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
        where = log_f + (token[:, None] * heads + head) * GROUPS + g[None, :]
        found = tl.load(where, mask=(token < stop)[:, None] & inside[None, :], other=0.0)
        total += tl.sum(found.to(tl.float64), 0)
    return total


@triton.jit(do_not_specialize=["requests"])
def _lanes_kernel(
    query, key, value, cache, log_f, sums, query_start, seq_lens, block_table, source, source_request, scale,
    query_token, query_head, key_token, key_head, value_token, value_head,
    cache_block, cache_head, cache_token, table_row, requests, heads,
    GROUPS: tl.constexpr, PADDED: tl.constexpr, TERMS: tl.constexpr, STATE: tl.constexpr, LANES: tl.constexpr,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """One request, kv head and chunk of its new tokens: lanes of keys, values and queries. SINGLE: one token each."""
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
        before += _sum_of(log_f, sums, writer, begin, start, requests, head, heads, GROUPS, PADDED, CHUNK, BLOCK)
    if source is not None:
        at = tl.load(source + writer).to(tl.int64)
        while at >= 0:  # written in this step, by another request
            writer = tl.load(source_request + writer).to(tl.int64)
            first = tl.load(query_start + writer).to(tl.int64)
            before += _sum_of(log_f, sums, writer, first, at + 1, requests, head, heads, GROUPS, PADDED, CHUNK, BLOCK)
            at = tl.load(source + writer).to(tl.int64)
    new = tl.load(query_start + writer + 1).to(tl.int64) - first
    past = tl.load(seq_lens + writer).to(tl.int64) - new
    last = tl.maximum(past - 1, 0)
    page = tl.load(block_table + writer * table_row + last // PAGE, mask=past > 0, other=0).to(tl.int64)
    row = cache + page * cache_block + head * cache_head + (last % PAGE) * cache_token + WIDTH
    for term in tl.static_range(STATE):
        kept = tl.load(row + term * GROUPS + g, mask=inside & (past > 0), other=0.0)
        before += kept.to(tl.float32).to(tl.float64)
    lane = tl.arange(0, LANES)
    shared = lane % (GROUPS + 1) == GROUPS
    written = lane < TERMS * (GROUPS + 1)
    for some in range(start, tl.minimum(end, start + CHUNK), BLOCK):
        token = some + tl.arange(0, BLOCK)
        alive = token < end
        real = alive[:, None] & inside[None, :]
        keys = key + token[:, None] * key_token + head * key_head + g[None, :]
        if SINGLE:
            gate = tl.zeros((BLOCK, PADDED), tl.float32)
            for term in tl.static_range(TERMS):
                gate += tl.load(keys + term * (GROUPS + 1), mask=real, other=0.0).to(tl.float32)
        else:
            gate = tl.load(log_f + (token[:, None] * heads + head) * GROUPS + g[None, :], mask=real, other=0.0)
        gate = gate.to(tl.float64)
        c = before[None, :] + tl.cumsum(gate, 0)
        before += tl.sum(gate, 0)
        left = c / -scale
        for term in tl.static_range(TERMS):
            part, left = _split_off(left)
            tl.store(keys + term * (GROUPS + 1), part.to(tl.float32).to(tl.bfloat16), mask=real)
        values = value + token[:, None] * value_token + head * value_head + g[None, :]
        left = c
        for term in tl.static_range(STATE):
            part, left = _split_off(left)
            tl.store(values + term * GROUPS, part.to(tl.float32).to(tl.bfloat16), mask=real)
        for own in tl.static_range(GROUPS):
            left = tl.sum(tl.where(g[None, :] == own, c, 0.0), 1) / scale
            content = tl.zeros((BLOCK, LANES), tl.float32)
            content += tl.where((lane % (GROUPS + 1) == own) & written, 1.0, 0.0)[None, :]
            for term in tl.static_range(TERMS):
                part, left = _split_off(left)
                its = shared & (lane // (GROUPS + 1) == term)
                content = tl.where(its[None, :], part.to(tl.float32)[:, None], content)
            where = query + token[:, None] * query_token + (head * GROUPS + own) * query_head + lane[None, :]
            tl.store(where, content.to(tl.bfloat16), mask=alive[:, None] & written[None, :])


@triton.jit(do_not_specialize=["first", "length"])
def _gather_kernel(
    cache, pages, key, value, log_f, first, length, cache_block, cache_head, cache_token, heads,
    GROUPS: tl.constexpr, PADDED: tl.constexpr, STATE: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
    DIM: tl.constexpr, CHANNELS: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK cached tokens of one kv head: their keys and values without lanes, and log f as c's differences."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1)
    real = token < length
    at = first + token
    page = tl.load(pages + at // PAGE, mask=real, other=0).to(tl.int64)
    row = cache + page * cache_block + head * cache_head + (at % PAGE) * cache_token
    at = tl.maximum(at - 1, first)
    page = tl.load(pages + at // PAGE, mask=real, other=0).to(tl.int64)
    before = cache + page * cache_block + head * cache_head + (at % PAGE) * cache_token
    channel = tl.arange(0, CHANNELS)
    inside = real[:, None] & (channel < DIM)[None, :]
    to = (token.to(tl.int64) * heads + head)[:, None]
    found = tl.load(row[:, None] + LANES + channel[None, :], mask=inside, other=0.0)
    tl.store(key + to * DIM + channel[None, :], found, mask=inside)
    found = tl.load(row[:, None] + WIDTH + LANES + channel[None, :], mask=inside, other=0.0)
    tl.store(value + to * DIM + channel[None, :], found, mask=inside)
    g = tl.arange(0, PADDED)
    inside = real[:, None] & (g < GROUPS)[None, :]
    fall = tl.zeros((BLOCK, PADDED), tl.float64)
    for term in tl.static_range(STATE):
        lane = WIDTH + term * GROUPS + g[None, :]
        fall += tl.load(row[:, None] + lane, mask=inside, other=0.0).to(tl.float32).to(tl.float64)
        fall -= tl.load(before[:, None] + lane, mask=inside, other=0.0).to(tl.float32).to(tl.float64)
    tl.store(log_f + to * GROUPS + g[None, :], tl.minimum(fall, 0.0).to(tl.float32), mask=inside)


def write_lanes(
    lanes: Lanes,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    batch: Any,
    scale: float,
    links: Links | None,
) -> torch.Tensor | None:
    """Turns log f in the lanes of `key` into c, in place, and writes c's lanes into `value` and `query`; returns log f.

    Shapes: query (T, H, width + D), key, value (T, Hkv, width + D) bfloat16; kv_cache (blocks, Hkv, tokens,
    2 (width + D)), each token's key before its value; batch has query_start_loc (R + 1,), seq_lens (R,), block_table
    (R, pages) int32 and max_query_len -> log f (T, H) float32, of tokens of no request anything, or None where
    max_query_len is 1 and nothing was added up.
    """
    tokens, heads, width = key.shape
    requests = batch.query_start_loc.shape[0] - 1
    single = batch.max_query_len == 1 and links is None
    chunks = triton.cdiv(batch.max_query_len, CHUNK)
    sizes: dict[str, Any] = {
        "GROUPS": lanes.groups, "PADDED": triton.next_power_of_2(lanes.groups), "TERMS": lanes.terms, "CHUNK": CHUNK,
        "BLOCK": 16 if single else TOKENS, "num_warps": 1 if single else 4,
    }  # fmt: skip
    log_f = sums = None
    if not single:
        log_f = torch.empty(tokens, heads * lanes.groups, dtype=torch.float32, device=key.device)
        sums = torch.empty(chunks, requests, heads, lanes.groups, dtype=torch.float64, device=key.device)
        _log_f_kernel[(requests, heads, chunks)](
            key, log_f, sums, batch.query_start_loc, key.stride(0), key.stride(1), requests, heads, **sizes
        )
    _lanes_kernel[(requests, heads, chunks)](
        query, key, value, kv_cache, log_f, sums, batch.query_start_loc, batch.seq_lens, batch.block_table,
        None if links is None else links.token, None if links is None else links.request, scale,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        kv_cache.stride(0), kv_cache.stride(1), kv_cache.stride(2), batch.block_table.stride(0), requests, heads,
        STATE=lanes.state_terms, LANES=triton.next_power_of_2(lanes.width), WIDTH=width, PAGE=kv_cache.shape[2],
        SINGLE=single, **sizes,
    )  # fmt: skip
    return log_f


def gather(lanes: Lanes, kv_cache: torch.Tensor, pages: torch.Tensor, first: int, length: int) -> Rows:
    """What `prompts.gather` gives, in one pass; kv_cache as in `write_lanes`."""
    _, heads, page, width = kv_cache.shape
    dim = width // 2 - lanes.width
    made = kv_cache.new_empty(2, length - first, heads, dim)
    log_f = torch.empty(length - first, heads * lanes.groups, dtype=torch.float32, device=kv_cache.device)
    channels = triton.next_power_of_2(dim)
    block = 4096 // channels
    _gather_kernel[(triton.cdiv(length - first, block), heads)](
        kv_cache, pages, made[0], made[1], log_f, first, length - first,
        kv_cache.stride(0), kv_cache.stride(1), kv_cache.stride(2), heads,
        GROUPS=lanes.groups, PADDED=triton.next_power_of_2(lanes.groups), STATE=lanes.state_terms, LANES=lanes.width,
        WIDTH=width // 2, DIM=dim, CHANNELS=channels, PAGE=page, BLOCK=block,
    )  # fmt: skip
    return Rows(made[0], made[1], log_f)
