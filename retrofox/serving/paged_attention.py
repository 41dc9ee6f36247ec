"""Forgetting Attention over the rows of `paged_rows` on a GPU, of tokens that were written there.

Logits are scale * q_i . k_j + (c_i - c_j). One kernel where the keys are not split, else two; no value is needed on the
host. With a horizon each program first finds where the group's live keys begin; blocks before are not read, but for
sinks. What lies beyond a layer's reach is never read: it may be another text's by now.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportCallIssue=false
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from fox_kernels.host.launch import cdiv, launch, power_of_2

from retrofox.serving.paged_rows import Paged, gather, log_f_of, row_of, write
from retrofox.serving.prefill import KeyValueRows, read_all

PROGRAMS = 1056
"""Programs that fill a GPU: keys are split until there are as many, or `MOST_PARTS` parts."""
MOST_PARTS = 64
KEYS, WARPS, STAGES = 64, 2, 3
"""Keys that a program reads at once, half as many of heads of over 256 bytes; its warps and stages."""
WAYS = tl.constexpr(64)
"""Lots of blocks that a step of the search for live keys looks at."""


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
    PAGE: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, REACH: tl.constexpr, SINK: tl.constexpr,
    CAP: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """One token, kv head and part of its keys: all query heads of the group attend.

    REACH: tokens whose keys may be read, sinks aside; 0 = all. SEARCH: with a horizon the steps in which its first
    block is found, else 0.
    """
    part, head, token = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    request = token
    if owner is not None:
        request = tl.load(owner + token)
    stop = tl.load(query_start + request + 1)
    length = tl.where(token < stop, tl.load(seq_lens + request) - (stop - 1 - token), 0)  # 0: padding
    low = length * 0
    if REACH > 0:
        low = tl.maximum(length - REACH, 0)
    g, channel, step = tl.arange(0, ROWS), tl.arange(0, CHANNELS), tl.arange(0, BLOCK)
    inside = g < GROUPS
    whole = channel < DIM
    queries = query + token.to(tl.int64) * query_token + (head * GROUPS + g)[:, None] * query_head + channel[None, :]
    q = tl.load(queries, mask=inside[:, None] & whole[None, :], other=0.0)
    table = block_table + request.to(tl.int64) * table_row
    last = tl.maximum(length - 1, 0)
    own = row_of(table, last, length > 0, head, cache_block, cache_head, cache_token, PAGE)  # padding may have page -1
    own = floats + (own + 2 * DIM) // PER
    own_high = tl.load(own + g, mask=inside, other=0.0)
    own_low = tl.load(own + GROUPS + g, mask=inside, other=0.0)
    first = low // BLOCK
    if SEARCH > 0:  # c falls: a block is dead where its last key is, and all before it are
        dead, width = first, 1
        for _ in tl.static_range(SEARCH - 1):
            width *= WAYS
        for _ in tl.static_range(SEARCH):
            at = (dead + (1 + tl.arange(0, WAYS)) * width) * BLOCK - 1
            row = row_of(table, at, at < length, head, cache_block, cache_head, cache_token, PAGE)
            known = inside[:, None] & (at < length)[None, :]
            decay = _decay(own_high, own_low, floats, row, g, known, GROUPS, DIM, PER)
            near = known & ((decay <= 0.0 - horizon) == 0)  # NaN is to be seen
            dead += tl.sum(((tl.max(near.to(tl.int32), 0) == 0) & (at < length)).to(tl.int32), 0) * width
            width = width // WAYS
        first = dead
    sinks = tl.minimum(tl.cdiv(SINK, BLOCK), first)  # blocks of sinks come before those from the first on
    blocks = sinks + tl.cdiv(length, BLOCK) - first
    mine = tl.cdiv(blocks, PARTS)
    begin = part * mine
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    made = tl.zeros([ROWS, CHANNELS], tl.float32)
    for block in range(begin, tl.minimum(begin + mine, blocks)):
        at = tl.where(block < sinks, block, first + block - sinks) * BLOCK + step
        seen = ((at >= low) | (at < SINK)) & (at < length)
        row = row_of(table, at, at < length, head, cache_block, cache_head, cache_token, PAGE)
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


def attend(
    paged: Paged,
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    batch: Any,
    output: torch.Tensor,
    options: dict[str, Any],
    owner: torch.Tensor | None = None,
    reach: int | None = None,
) -> None:
    """Forgetting Attention of tokens over the rows of their texts, which are written, into `output`.

    A token of a request that has none (padding) gets zeros.

    Args:
        query: (T, H, D) in the rows' dtype, of unit last stride, as `output` (T, H, D).
        kv_cache: as in `write`.
        batch: query_start_loc, seq_lens, block_table of `write`.
        options: scale, window, sink, softcap and horizon of `fox_kernels.forgetting_attention`; no sink in a window.
        owner: (T,) int32, the request of each token; None where the number of both is the same.
        reach: tokens that window and horizon leave to see at most; rows before are not read, but for sinks.
    """
    assert not (options["window"] and options["sink"])
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
    reach = reach or options["window"] or 0
    longest = batch.block_table.shape[1] * kv_cache.shape[2]
    longest = min(longest, reach + keys) if reach else longest
    search = 0 if horizon is None else next(steps for steps in range(1, 5) if WAYS.value**steps * keys >= longest)
    constants = (*row, keys, parts, reach, options["sink"], softcap is not None, search)
    launch(_attend_kernel, (parts, heads, tokens), arguments, constants, warps=WARPS, stages=STAGES)
    if parts > 1:
        arguments = (made, weights, output, output.stride(0), output.stride(1), query_heads)
        launch(_merge_kernel, (query_heads, tokens), arguments, (dim, channels, parts), warps=1 if parts <= 16 else 4)


class PagedImpl:
    """Mixin of a backend's implementation that attends by our own kernels; T tokens, H heads on Hkv, D channels."""

    room: Paged
    gate: Any  # the layer's, where it reads the states; else None
    reach: int | None  # `retrofox.anatomy.reach`
    options: dict[str, Any]  # of `forgetting_attention`

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Writes keys, values (T, Hkv, D) and c, then attends; query, output (T, H, D).

        output_scale: the gates of `vllm_attention.attend`.
        """
        batch = attn_metadata
        if batch is None:
            return output.zero_()
        assert output_scale is not None
        links, readings, tokens, owner = batch.fox
        room = self.room
        log_f = output_scale if self.gate is None else log_f_of(output_scale, self.gate)
        write(room, key, value, log_f, kv_cache, batch, links)
        if tokens:
            attend(room, query[:tokens], kv_cache, batch, output[:tokens], self.options, owner, self.reach)

        def past(request: int, first: int, length: int) -> KeyValueRows:
            return gather(room, kv_cache, batch.block_table[request], first, length, self.options["sink"])

        read_all(readings, query, KeyValueRows(key, value, log_f), past, output, self.options, self.reach)
        return output
