"""Forgetting Attention over the rows of `paged_rows` on a GPU, of tokens that were written there.

Logits are scale * q_i . k_j + (c_i - c_j). One kernel where the keys are not split, else two; no value is needed on the
host. With a horizon each program first finds where the group's live keys begin; blocks before are not read, but for
sinks. What lies beyond a layer's reach is never read: it may be another text's by now.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from fox_kernels.common.groups import Gates
from fox_kernels.host.launch import cdiv, launch, power_of_2

from retrofox.serving.paged_rows import Paged, c_of, gather, log_f_of, pages_of, requests_of, row_of, write
from retrofox.serving.prefill import KeyValueRows, run_prefills

PROGRAMS = 1056
"""Programs that fill a GPU: keys are split until there are as many, or `MOST_PARTS` parts."""
MOST_PARTS = 64
KEYS, WARPS, STAGES = 64, 2, 3
"""Keys that a program reads at once, half as many of heads of over 256 bytes; its warps and stages."""
WAYS = tl.constexpr(64)
"""Lots of blocks that a step of the search for live keys looks at."""


class Parts(NamedTuple):
    """Partial results: o and base-2 log-sum-exp over the keys of a part, for every token, query head and part."""

    o: Any
    lse: Any


class Cut(NamedTuple):
    """Constants of `_attend_kernel`, beside the `Row`."""

    block: int  # keys that a program reads at once
    parts: int
    reach: int | None  # tokens whose keys may be read, sinks aside; None: all
    sink: int
    search: int | None  # with a horizon: steps in which its first block is found


@triton.jit
def _decay(own, pages, row, g, known, ROW: tl.constexpr):
    """c_i - c_j (heads, keys) float32 of one query and the keys in `row`."""
    c = c_of(pages, row, ROW)[None, :] + g[:, None]
    decay = own.hi[:, None] - tl.load(c, mask=known, other=0.0)
    return decay + (own.lo[:, None] - tl.load(c + ROW.groups, mask=known, other=0.0))


@triton.jit
def _attend_kernel(
    query, query_strides, output, output_strides, parts, requests, owner, pages, scale, softcap, horizon, heads,
    ROW: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """One token, kv head and part of its keys: all query heads of the group attend."""
    BLOCK: tl.constexpr = CUT.block
    PARTS: tl.constexpr = CUT.parts
    SINK: tl.constexpr = CUT.sink
    ROWS: tl.constexpr = ROW.padded
    CHANNELS: tl.constexpr = ROW.channels
    STEPS: tl.constexpr = CUT.search
    part, head, token = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    request = token
    if owner is not None:
        request = tl.load(owner + token)
    stop = tl.load(requests.start + request + 1)
    length = tl.where(token < stop, tl.load(requests.length + request) - (stop - 1 - token), 0)  # 0: padding
    low = length * 0
    if CUT.reach is not None:
        low = tl.maximum(length - CUT.reach, 0)
    g, channel, step = tl.arange(0, ROWS), tl.arange(0, CHANNELS), tl.arange(0, BLOCK)
    inside = g < ROW.groups
    whole = channel < ROW.dim
    h = (head * ROW.groups + g)[:, None]
    queries = query + token.to(tl.int64) * query_strides[0] + h * query_strides[1] + channel[None, :]
    q = tl.load(queries, mask=inside[:, None] & whole[None, :], other=0.0)
    table = requests.table + request.to(tl.int64) * requests.table_row
    last = tl.maximum(length - 1, 0)
    c = c_of(pages, row_of(pages, table, last, length > 0, head, ROW), ROW) + g  # padding may have page -1
    own = Gates(tl.load(c, mask=inside, other=0.0), tl.load(c + ROW.groups, mask=inside, other=0.0))
    first = low // BLOCK
    if horizon is not None:  # c falls: a block is dead where its last key is, and all before it are
        dead, width = first, 1
        for _ in tl.static_range(STEPS - 1):
            width *= WAYS
        for _ in tl.static_range(STEPS):
            at = (dead + (1 + tl.arange(0, WAYS)) * width) * BLOCK - 1
            row = row_of(pages, table, at, at < length, head, ROW)
            known = inside[:, None] & (at < length)[None, :]
            decay = _decay(own, pages, row, g, known, ROW)
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
        row = row_of(pages, table, at, at < length, head, ROW)
        k = tl.load(pages.rows + row[None, :] + channel[:, None], mask=seen[None, :] & whole[:, None], other=0.0)
        values = pages.rows + row[:, None] + ROW.dim + channel[None, :]
        v = tl.load(values, mask=seen[:, None] & whole[None, :], other=0.0)
        known = inside[:, None] & seen[None, :]
        decay = _decay(own, pages, row, g, known, ROW)
        if SINK > 0:
            decay = tl.where((at < SINK)[None, :], 0.0, decay)
        if horizon is not None:  # a sink's decay is 0, the own key's too
            known = known & ((decay <= 0.0 - horizon) == 0)
        logits = tl.dot(q, k, input_precision="ieee") * scale
        if softcap is not None:
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
    if parts is None:
        to = output + token.to(tl.int64) * output_strides[0] + h * output_strides[1] + channel[None, :]
        tl.store(to, made.to(output.dtype.element_ty), mask=inside[:, None] & whole[None, :])
    else:
        to = ((token.to(tl.int64) * heads + head) * ROW.groups + g) * PARTS + part
        tl.store(parts.o + to[:, None] * CHANNELS + channel[None, :], made, mask=inside[:, None])
        tl.store(parts.lse + to, tl.where(total == 0, float("-inf"), top + tl.log2(safe)), mask=inside)


@triton.jit
def _merge_kernel(parts, output, strides, query_heads, DIM: tl.constexpr, CHANNELS: tl.constexpr, PARTS: tl.constexpr):
    """One token and query head: its parts, each weighed by the exponents that it added up."""
    head, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    part, channel = tl.arange(0, PARTS), tl.arange(0, CHANNELS)
    row = (token * query_heads + head) * PARTS + part
    weight = tl.load(parts.lse + row)
    made = tl.load(parts.o + row[:, None] * CHANNELS + channel[None, :])
    top = tl.max(weight, 0)
    weight = tl.exp2(weight - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weight, 0)
    made = tl.sum(made * weight[:, None], 0) / tl.where(total == 0, 1.0, total)
    to = output + token * strides[0] + head * strides[1] + channel
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
    count = min(power_of_2(cdiv(PROGRAMS, max(tokens * heads, 1))), MOST_PARTS)
    row = paged.row(kv_cache.shape[2], least=16)  # as many rows as a product takes at least
    parts = None
    if count > 1:
        shape = tokens, query_heads, count, row.channels
        made = torch.empty(shape, dtype=torch.float32, device=query.device)
        parts = Parts(made, torch.empty(shape[:-1], dtype=torch.float32, device=query.device))
    softcap, horizon = (None if options[n] is None else float(options[n]) for n in ("softcap", "horizon"))
    keys = KEYS if row.channels <= 128 * paged.per_float // 2 else KEYS // 2
    reach = reach or options["window"]
    longest = batch.block_table.shape[1] * row.page
    longest = longest if reach is None else min(longest, reach + keys)
    search = None
    if horizon is not None:
        search = next(steps for steps in range(1, 5) if WAYS.value**steps * keys >= longest)
    launch(
        _attend_kernel, (count, heads, tokens),
        (
            query, query.stride()[:2], output, output.stride()[:2], parts, requests_of(batch), owner,
            pages_of(kv_cache), float(options["scale"]), softcap, horizon, heads,
        ),
        (row, Cut(keys, count, reach, options["sink"], search)), warps=WARPS, stages=STAGES,
    )  # fmt: skip
    if parts is not None:
        arguments = (parts, output, output.stride()[:2], query_heads)
        constants = (dim, row.channels, count)
        launch(_merge_kernel, (query_heads, tokens), arguments, constants, warps=1 if count <= 16 else 4)


class PagedImpl:
    """Mixin of a backend's implementation that attends by our own kernels; T tokens, H heads on Hkv, D channels."""

    layout: Paged
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
        links, prefills, tokens, owner = batch.fox
        layout = self.layout
        log_f = output_scale if self.gate is None else log_f_of(output_scale, self.gate)
        write(layout, key, value, log_f, kv_cache, batch, links)
        if tokens:
            attend(layout, query[:tokens], kv_cache, batch, output[:tokens], self.options, owner, self.reach)

        def past(request: int, first: int, length: int) -> KeyValueRows:
            return gather(layout, kv_cache, batch.block_table[request], first, length, self.options["sink"])

        run_prefills(prefills, query, KeyValueRows(key, value, log_f), past, output, self.options, self.reach)
        return output
