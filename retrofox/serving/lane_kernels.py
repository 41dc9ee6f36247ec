"""The lanes of a layer in two kernels on a GPU, in place of some forty small ones: `lanes.py` says what they are."""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from retrofox.serving.lanes import Lanes

TOKENS = 256
"""Tokens that a program adds up at once."""


@triton.jit
def _split_off(x):
    """x float64 -> (its first bfloat16 term as float64, what is left)."""
    part = x.to(tl.float32).to(tl.bfloat16).to(tl.float32).to(tl.float64)
    return part, x - part


@triton.jit
def _write_kernel(
    key, value, cache, query_start, seq_lens, block_table, c_out, scale,
    key_token, key_head, value_token, value_head, cache_block, cache_head, cache_token, table_row, heads,
    GROUPS: tl.constexpr, PADDED: tl.constexpr, TERMS: tl.constexpr, STATE: tl.constexpr, WIDTH: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One request and kv head: c of its new tokens from log f in its keys' lanes, into keys, values and c_out."""
    request, head = tl.program_id(0), tl.program_id(1)
    begin = tl.load(query_start + request).to(tl.int64)
    end = tl.load(query_start + request + 1).to(tl.int64)
    past = tl.load(seq_lens + request).to(tl.int64) - (end - begin)
    g = tl.arange(0, PADDED)
    inside = g < GROUPS
    continued = (past > 0) & (end > begin)
    last = tl.where(continued, past - 1, 0)
    page = tl.load(block_table + request * table_row + last // PAGE, mask=continued, other=0).to(tl.int64)
    row = cache + page * cache_block + head * cache_head + (last % PAGE) * cache_token + WIDTH
    before = tl.zeros((PADDED,), tl.float64)
    for term in tl.static_range(STATE):
        before += tl.load(row + term * GROUPS + g, mask=inside & continued, other=0.0).to(tl.float32).to(tl.float64)
    for start in range(begin, end, BLOCK):
        token = start + tl.arange(0, BLOCK)
        real = (token < end)[:, None] & inside[None, :]
        keys = key + token[:, None] * key_token + head * key_head + g[None, :]
        values = value + token[:, None] * value_token + head * value_head + g[None, :]
        log_f = tl.zeros((BLOCK, PADDED), tl.float64)
        for term in tl.static_range(TERMS):
            log_f += tl.load(keys + term * (GROUPS + 1), mask=real, other=0.0).to(tl.float32).to(tl.float64)
        c = before[None, :] + tl.cumsum(log_f, 0)
        tl.store(c_out + (token[:, None] * heads + head) * GROUPS + g[None, :], c, mask=real)
        left = c / -scale
        for term in tl.static_range(TERMS):
            part, left = _split_off(left)
            tl.store(keys + term * (GROUPS + 1), part.to(tl.float32).to(tl.bfloat16), mask=real)
        left = c
        for term in tl.static_range(STATE):
            part, left = _split_off(left)
            tl.store(values + term * GROUPS, part.to(tl.float32).to(tl.bfloat16), mask=real)
        before += tl.sum(log_f, 0)


@triton.jit
def _query_kernel(
    query, c, scale, tokens, query_token, query_head, heads,
    GROUPS: tl.constexpr, TERMS: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One query head, BLOCK tokens: ones in the head's own lanes, the terms of c / scale in the shared ones."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1)
    own = head % GROUPS
    real = token < tokens
    left = tl.load(c + token * heads + head, mask=real, other=0.0) / scale
    lane = tl.arange(0, LANES)
    content = tl.where((lane % (GROUPS + 1) == own) & (lane < TERMS * (GROUPS + 1)), 1.0, 0.0)
    content = tl.zeros((BLOCK, LANES), tl.float32) + content[None, :]
    for term in tl.static_range(TERMS):
        part, left = _split_off(left)
        content = tl.where(lane[None, :] == term * (GROUPS + 1) + GROUPS, part.to(tl.float32)[:, None], content)
    where = query + token[:, None] * query_token + head * query_head + lane[None, :]
    tl.store(where, content.to(tl.bfloat16), mask=real[:, None] & (lane < TERMS * (GROUPS + 1))[None, :])


def write_lanes(
    lanes: Lanes,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Turns log f in the lanes of `key` into c, in place, and writes c's lanes into `value`; returns c.

    Shapes: key, value (T, Hkv, width + D) bfloat16; kv_cache (blocks, Hkv, tokens, 2 (width + D)), each token's key
    before its value; query_start (R + 1,), seq_lens (R,), block_table (R, pages) int32 -> c (T, Hkv, G) float64, 0
    for tokens past the last request.
    """
    tokens, heads, width = key.shape
    requests = query_start.shape[0] - 1
    c = torch.zeros(tokens, heads, lanes.groups, dtype=torch.float64, device=key.device)
    _write_kernel[(requests, heads)](
        key, value, kv_cache, query_start, seq_lens, block_table, c, scale,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        kv_cache.stride(0), kv_cache.stride(1), kv_cache.stride(2), block_table.stride(0), heads,
        GROUPS=lanes.groups, PADDED=triton.next_power_of_2(lanes.groups), TERMS=lanes.terms,
        STATE=lanes.state_terms, WIDTH=width, PAGE=kv_cache.shape[2],
        BLOCK=16 if tokens == requests else TOKENS,
    )  # fmt: skip
    return c


def query_lanes(lanes: Lanes, query: torch.Tensor, c: torch.Tensor, scale: float) -> None:
    """Fills the lanes of `query` (T, H, width + D) bfloat16 in place; c (T, Hkv, G) float64."""
    tokens, heads, _ = query.shape
    block = 16
    _query_kernel[(triton.cdiv(tokens, block), heads)](
        query, c, scale, tokens, query.stride(0), query.stride(1), heads,
        GROUPS=lanes.groups, TERMS=lanes.terms, LANES=triton.next_power_of_2(lanes.width), BLOCK=block,
    )  # fmt: skip
