"""Launches the Gluon backward on Hopper: row products before it, dq's rounding and the gate's sums after."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..common.first_weights import begins_at_the_first_key, lost_to_rounding
from ..common.groups import Gates, Strides
from ..common.horizon import found_edges
from ..host.device import processors
from ..options import ONE_DOCUMENT, Documents, Options, Saved
from .forward import (
    Blocks,
    Launch,
    alignment,
    blocks_of,
    copied,
    copyable,
    edge_kind,
    heads_per_group,
    remembered,
)


class Cut(NamedTuple):
    """How the backward is cut: queries per step, stages of q and do, copies of k and v, heads in turn at a tile."""

    keys: int  # per tile
    queries: int
    stages: int  # slots of q, as many of do; with 64 keys a tile, of either
    key_slots: int
    heads: int
    generations: int  # of dS
    registers: int  # per consumer thread
    copier_registers: int  # per thread of the producer and the writer


SEARCHED = 8  # key tiles a program of the search for their last query tiles
BOUND = 64  # queries per value of that search
# 24 registers spill in these two, but 32 leave one consumer 232, which then spills in its loop: 412 against 372
# TFLOP/s at 2 x 8192, D = 64, unordered; at D = 128, of half as many queries, 32 are better: 515 against 504, GQA
# Walks of long rows begin in rounds, a tile for each multiprocessor, four heads at a time: else they drift apart, and
# q, do and dq no longer come from the L2 cache. Not with bounds of any kind, which make walks unequal (kernels/LOG.md)
LONG = 1 << 17  # keys; twice as many where no more than four heads walk anyway
LONG_HEADS = 4
TO_128 = Cut(128, 64, 2, 1, 8, 2, 240, 32)
CUTS = {
    64: Cut(128, 128, 2, 2, 4, 1, 240, 24), 80: TO_128, 96: TO_128, 128: TO_128, 256: Cut(64, 64, 3, 1, 4, 2, 240, 24),
}  # fmt: skip

# With fewer key tiles a multiprocessor, a group's query heads walk apart. Walks are on average half as long as the
# longest, through all queries of all heads of a group, which then takes more than a multiprocessor's share of the work
WALKS = 2
APART = 8  # heads of a group, which then takes so many times its memory


def width_of(D: int) -> int:
    """How many columns the kernels compute with: those behind the head dim are zeros that TMA fills in."""
    return 1 << (D - 1).bit_length()


def heads_together(bytes_per_head: int, ordered: bool) -> int:
    """How many heads to walk together; more in order, where the key tiles of one head in flight wait for one another.

    A tile follows its predecessor at a distance of some 3000 cycles, half a step and more: with 33 tiles of a head in
    flight (4 heads together) waiting takes a fifth of the time at 2 x 8192, D = 64, with 8 (16 heads) a twentieth.
    With twice as many another 2 %, as long as their 4 MB each are all that runs through the L2 cache.
    """
    if not ordered:
        return heads_per_group(bytes_per_head)
    return max(32 if bytes_per_head <= 4 << 20 else 16, heads_per_group(bytes_per_head * 2 // 3))


class BackwardCut(NamedTuple):
    """Constants of the kernel: the problem's edges and sinks, and the `Cut`."""

    HAS_START: int  # `edge_kind`
    SINK: int
    D: int  # columns, of which the head dim has DH: `width_of`
    DH: int
    KEYS: int
    BM: int
    NB: int
    NKV: int
    HEADS: int
    DETERMINISTIC: bool
    REGISTERS: int
    COPIER_REGISTERS: int
    GENERATIONS: int
    BIAS_BY_MMA: bool
    PER_ROUND: int  # tiles that begin together; 0: no rounds


class Edges(NamedTuple):
    """Edges of documents, windows and horizons (`common.edges`) and, of a horizon, key tiles' last query tiles."""

    start: Tensor | None
    end: Tensor | None
    tile_hi: Tensor | None


class Lines(NamedTuple):
    """lse2 and delta of every query."""

    lse: Tensor
    delta: Tensor


class Sums(NamedTuple):
    """Sums of dS: dc by key, row_sum by query."""

    dc: Tensor
    row_sum: Tensor


class BackwardPlan(NamedTuple):
    """How to launch a backward; the same for all calls with tensors of one kind."""

    ranges: Launch
    prepare: Launch
    main: Launch
    finish: Launch
    first: bool  # whether dv starts from `first_weights`
    copies: tuple[bool, ...]  # of q, k, v, do: TMA can't read them in place
    sizes: tuple[int, int, int]  # key tiles, query tiles, rows of all query tiles of a head
    group: int


_plans: dict[tuple, BackwardPlan] = {}


def plan_backward(q, k, v, do, started: int, options: Options, deterministic: bool, cut: Cut) -> BackwardPlan:
    """Return how to launch the kernels of a backward."""
    from .backward_kernel import fox_backward
    from .backward_steps import finish_kernel, prepare_kernel, query_ranges_kernel

    (B, T, H, D), (S, Hkv) = q.shape, k.shape[1:3]
    width = width_of(D)
    sink, num_n, tiles, found = options.sink, -(-S // cut.keys), -(-T // cut.queries), -(-T // BOUND)
    rows = tiles * cut.queries
    given, (q, k, v, do) = (q, k, v, do), (copyable(q), copyable(k), copyable(v), copyable(do))
    blocks = [
        blocks_of(q, cut.queries, width), blocks_of(k, 64, width), blocks_of(v, 64, width),
        blocks_of(do, cut.queries, width),
        Blocks(q, [B * H * rows, width], [width, 1], [64, 64]),
        blocks_of(k, 64, width, True), blocks_of(v, 64, width, True),
    ]  # fmt: skip
    heads = min(H // Hkv, cut.heads)
    long = (LONG if B * Hkv > LONG_HEADS else 2 * LONG) <= S and not started
    # more heads take the shared memory that its parts need
    bias_by_mma = heads == 1 and cut.queries == 128 and sink == 0
    first = begins_at_the_first_key(q, k, started > 0)
    constants = BackwardCut(
        HAS_START=started, SINK=sink, D=width, DH=D, KEYS=cut.keys, BM=cut.queries, NB=cut.stages, NKV=cut.key_slots,
        HEADS=heads, DETERMINISTIC=deterministic, REGISTERS=cut.registers, COPIER_REGISTERS=cut.copier_registers,
        GENERATIONS=cut.generations, BIAS_BY_MMA=bias_by_mma,
        PER_ROUND=processors(q.device) if long else 0,
    )  # fmt: skip
    # in order, the first part of a query tile's dq is stored; only tiles that no key sees need zeros
    zero = not deterministic or started > 0
    steps = rows // 64 * B * H
    ranges = {"SIZE": 1 << (found - 1).bit_length(), "PER": cut.queries // BOUND, "BOUND": BOUND, "BN": cut.keys}
    return BackwardPlan(
        Launch(query_ranges_kernel, B * H * -(-num_n // SEARCHED), ranges | {"PART": SEARCHED}),
        Launch(prepare_kernel, steps, {"D": D, "WIDTH": width, "BM": 64, "ZERO": zero}),
        Launch(fox_backward, min(num_n * B * Hkv, processors(q.device)), {"CUT": constants}, blocks),
        Launch(finish_kernel, steps, {"D": D, "WIDTH": width, "BM": 64}),
        first,
        tuple(x is not y for x, y in zip(given, (q, k, v, do), strict=True)),
        (num_n, tiles, rows),
        LONG_HEADS if long else heads_together(8 * T * width * (H // Hkv), deterministic),
    )


def launch_backward(
    do, dlse2, q, k, v, saved: Saved, options: Options, documents: Documents = ONE_DOCUMENT, *,
    deterministic: bool = True,
):  # fmt: skip
    """Return dq, dk, dv (contiguous, in the inputs' dtype) and dc (B, H, S) float32 = dL/dc in natural units.

    do (B, T, H, D) and dlse2 (B, H, T) or None are the gradients of o and of the base-2 lse2. With deterministic=True
    the float32 dq is summed in key order, bit for bit the same in every run.
    """
    (B, T, H, D), (S, Hkv) = q.shape, k.shape[1:3]
    scale, _, sink, _, horizon = options
    assert sink == 0 or horizon is None, "`choose` keeps sinks beside a horizon from here"
    o, lse2, c_hi, c_lo, residual = saved
    if Hkv < H <= APART * Hkv and B * Hkv * -(-S // CUTS[D].keys) < WALKS * processors(q.device):
        k, v = (x.repeat_interleave(H // Hkv, 2) for x in (k, v))
        dq, dk, dv, dc = launch_backward(do, dlse2, q, k, v, saved, options, documents, deterministic=deterministic)
        return dq, *(x.unflatten(2, (Hkv, -1)).sum(3) for x in (dk, dv)), dc
    started = edge_kind(options, documents)
    key = (
        q.shape, q.stride(), k.shape, k.stride(), v.stride(), o.stride(), do.stride(), do.dtype,
        None if dlse2 is None else (dlse2.stride(), dlse2.dtype), residual is None, q.dtype, q.device,
        alignment(q, k, v, o, do, dlse2, residual, lse2, c_hi, c_lo), started, sink, deterministic,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        plan = remembered(_plans, key, plan_backward(q, k, v, do, started, options, deterministic, CUTS[D]))
    num_n, tiles, rows = plan.sizes
    if any(plan.copies):
        q, k, v, do = (copied(x) if copy else x for x, copy in zip((q, k, v, do), plan.copies, strict=True))
    device = q.device
    dq, dk, dv = [torch.empty(x.shape, dtype=x.dtype, device=device) for x in (q, k, v)]
    dc = torch.empty(B, H, S, dtype=torch.float32, device=device)
    sums = torch.empty(B * H * rows, width_of(D), dtype=torch.float32, device=device)
    delta, row_sum = torch.empty(2, B, H, rows, dtype=torch.float32, device=device).unbind()
    ticket = torch.empty(B * H * tiles + 2, dtype=torch.int32, device=device)  # then: key tiles begun, copied
    starts = found_edges(c_hi, c_lo, T, options, documents, per_head=True).edges
    start, end = (None, None) if starts is None else starts.unbind()
    tile_lo = tile_hi = lost = None
    if start is not None and horizon is not None:
        tile_lo = torch.empty(B, H, tiles, dtype=torch.int32, device=device)
        tile_hi = torch.empty(B, H, num_n, dtype=torch.int32, device=device)
        plan.ranges(
            start_ptr=start, lo_ptr=tile_lo, hi_ptr=tile_hi, T=T, S=S, H=H, bounds=-(-T // BOUND), tiles=tiles,
            num_n=num_n,
        )  # fmt: skip
    of_dlse2 = None if dlse2 is None else Strides(dlse2.stride(0), token=dlse2.stride(2), head=dlse2.stride(1))
    plan.prepare(
        o_ptr=o, do_ptr=do, residual_ptr=residual, dlse2_ptr=dlse2, delta_ptr=delta, dq_ptr=sums, row_sum_ptr=row_sum,
        ticket_ptr=ticket, of_o=Strides(*o.stride()[:3]), of_do=Strides(*do.stride()[:3]), of_dlse2=of_dlse2,
        T=T, H=H, rows=rows, tickets=B * H * tiles,
    )  # fmt: skip
    if plan.first:
        lost = lost_to_rounding(q, k, do, lse2, c_hi, c_lo, options)
    plan.main(
        q, k, v, do, sums, dk, dv, c=Gates(c_hi, c_lo), rows=Lines(lse2, delta), sums=Sums(dc, row_sum), ticket=ticket,
        counter=ticket[-2:], edges=Edges(start, end, tile_hi), tile_lo=tile_lo, lost=lost, sm_scale=float(scale),
        T=T, T_PAD=rows, S=S, H=H, KV_GROUP=H // Hkv, num_n=num_n, num_bh=B * Hkv, group=plan.group,
    )  # fmt: skip
    plan.finish(
        sum_ptr=sums, dq_ptr=dq, row_sum_ptr=row_sum, dc_ptr=dc, strides=Strides(*dq.stride()[:3]),
        scale=float(scale), T=T, S=S, H=H, rows=rows,
    )  # fmt: skip
    return dq, dk, dv, dc
