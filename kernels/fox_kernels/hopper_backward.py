"""Launches the Gluon backward on Hopper: row products and zeros before it, dq's rounding and the gate's sums after."""

# kernels are launched with a grid in brackets and plain values, which their annotations don't show:
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false

import torch

from .hopper_forward import Blocks, blocks_of, copyable, heads_per_group, launch, unsupported, visible_from

QUERIES = 64  # rows per step
KEYS = 128  # per program
HEAD_DIMS = (64, 128)
STAGES = 2  # of q and do
REGISTERS = 240  # per consumer thread


def launch_backward(
    do, dlse2, q, k, v, o, lse2, c_hi, c_lo, *, scale, cu_seqlens=None, seq_start=None, window=None, sink=0,
    softcap=None,
    prune=None, q_offset=None, c_offset=None, causal=True, deterministic=True, group=None,
):  # fmt: skip
    """Return dq, dk, dv (contiguous, in the inputs' dtype) and dc (B, H, S) float32 = dL/dc in natural units.

    do (B, T, H, D) and dlse2 (B, H, T) or None are the gradients of o and of the base-2 lse2. With deterministic=True
    the float32 dq is summed in key order, bit for bit the same in every run. Head dims 80 and 96 run the plain Triton
    backward. Raises ValueError for what `hopper_forward.unsupported` names.
    """
    (B, T, H, D), (S, Hkv) = q.shape, k.shape[1:3]
    options = {
        "scale": scale, "cu_seqlens": cu_seqlens, "seq_start": seq_start, "window": window, "sink": sink,
        "softcap": softcap, "prune": prune, "q_offset": q_offset, "c_offset": c_offset, "causal": causal,
    }  # fmt: skip
    reason = unsupported(q, k, v, **options)
    if reason is not None:
        raise ValueError(f"the Hopper kernel can't run this: {reason}; use the Triton kernels")
    if D not in HEAD_DIMS:
        from . import backward

        return backward.launch_backward(do, dlse2, q, k, v, o, lse2, c_hi, c_lo, **options)
    from .hopper_backward_kernel import finish_kernel, fox_backward, prepare_kernel, query_ranges_kernel

    device, num_n, tiles = q.device, -(-S // KEYS), -(-T // QUERIES)
    rows = tiles * QUERIES
    q, k, v, do = copyable(q), copyable(k), copyable(v), copyable(do)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=device) for x in (q, k, v))
    dc = torch.empty(B, H, S, dtype=torch.float32, device=device)
    sums = torch.empty(B * H * rows, D, dtype=torch.float32, device=device)
    delta, row_sum = torch.empty(2, B, H, rows, dtype=torch.float32, device=device)
    ticket = torch.empty(B, H, tiles, dtype=torch.int32, device=device)
    start = visible_from(B, S, cu_seqlens, seq_start, window, device)
    end = None
    if start is not None:
        # the first query that no longer sees key j = how many queries see from j or earlier; start never falls
        keys = torch.arange(S, device=device, dtype=torch.int32).expand(B, S).contiguous()
        end = torch.searchsorted(start, keys, right=True, out_int32=True)
    tile_lo = tile_hi = None
    with torch.cuda.device(device):
        if prune is not None:
            from .prune import loop_bounds

            first = loop_bounds(q, k, c_hi, c_lo, scale, None, prune)
            tile_lo, tile_hi = torch.empty_like(first), torch.empty(B, H, num_n, dtype=torch.int32, device=device)
            query_ranges_kernel[(B * H,)](
                first, ticket if start is None else start, tile_lo, tile_hi, T, S, H, tiles, num_n,
                HAS_START=start is not None, SIZE=1 << (tiles - 1).bit_length(), BM=QUERIES, BN=KEYS,
            )  # fmt: skip
        prepare_kernel[(tiles * B * H,)](
            o, do, dlse2, delta, sums, row_sum, ticket, *o.stride()[:3], *do.stride()[:3],
            *(dlse2.stride() if dlse2 is not None else (0, 0, 0)), T, H, rows, D=D, BM=QUERIES, num_warps=4,
        )  # fmt: skip
        if group is None:
            group = heads_per_group(8 * T * D * (H // Hkv))
        none = ticket
        arguments = [
            blocks_of(q, QUERIES, D), blocks_of(k, 64, D), blocks_of(v, 64, D), blocks_of(do, QUERIES, D),
            Blocks(sums, [B * H * rows, D], [D, 1], [QUERIES, D // 2]), blocks_of(dk, 64, D), blocks_of(dv, 64, D),
            c_hi, c_lo, lse2, delta, dc, row_sum, ticket, none if start is None else start,
            none if end is None else end,
            none if tile_hi is None else tile_hi, none if tile_lo is None else tile_lo,
            scale, T, rows, S, H, H // Hkv, num_n, B * Hkv, group,
        ]  # fmt: skip
        constants = (start is not None, prune is not None, sink, D, STAGES, deterministic, REGISTERS)
        launch(fox_backward, num_n * B * Hkv, arguments, constants)
        finish_kernel[(tiles * B * H,)](
            sums, dq, row_sum, dc, *dq.stride()[:3], scale, T, S, H, rows, D=D, BM=QUERIES, num_warps=4
        )
    return dq, dk, dv, dc
