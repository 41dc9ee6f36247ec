"""The backward in plain Triton, deterministic: dq with its row sums, then dk and dv with the column sums.

    p_ij = exp2(s_ij - lse_i)      ds_ij = p_ij (do_i.v_j - delta_i)      delta_i = do_i.o_i - dL/dlse_i
    dq_i = scale sum_j ds_ij k_j   dk_j = scale sum_i ds_ij q_i
    dv_j = sum_i p_ij do_i         dc_t = sum_j ds_tj - sum_i ds_it

Two kernels, each recomputing p, so that no sum needs atomics: `dq` by rows, `dkdv` by columns.
The row and column sums come from the same float32 ds: with either left out, or rounded, dlog_f is off by 1 to 11 %.
"""

import torch

from ..common.blocks import LOG2_E, cap_factors, cap_kind
from ..common.cumsum import block_relative
from ..common.first_weights import BLOCK, begins_at_the_first_key, lost_to_rounding
from ..common.horizon import found_edges, unseen_from
from ..host.launch import cdiv, launch
from ..host.strides import aligned, describable, source
from ..options import ALL_KEYS, ONE_DOCUMENT, Documents, Options, Saved, Shard
from .dkdv import dkdv_kernel
from .dq import dq_kernel
from .forward import first_position, lower_kind, walked_together
from .tiles import Copies, Tile, split_head_dim, tile_for


def launch_backward(
    do, dlse2, q, k, v, saved: Saved, options: Options, documents: Documents = ONE_DOCUMENT, *, shard: Shard = ALL_KEYS,
    tiles: tuple[Tile, Tile] | None = None, row_sum: torch.Tensor | None = None,
    gradient_dtype: torch.dtype | None = None,
):  # fmt: skip
    """Return dq, dk, dv and dc (B, H, S) float32, dL/dc in natural units; arguments as forward's.

    dq, dk and dv are in gradient_dtype, the inputs' if None: float32 for parts that are added up.
    dlse2 (B, H, T) or None is dL/dlse2. row_sum (B, H, T) float32, if given, is filled with the part of dc that belongs
    to each query's own c: of queries past the keys, all of it is in dc[..., S - 1], as their c lies elsewhere. The
    order of every sum is fixed, so two runs give the same bits.
    """
    (B, T, H, D), (S, Hkv) = q.shape, k.shape[1:3]
    scale, window, sink, softcap, _ = options
    (_, c_offset, causal), (o, lse2, c_hi, c_lo, residual) = shard, saved
    q, k, v, o, do = (aligned(x) for x in (q, k, v, o, do))
    lse2, c_hi, c_lo = lse2.contiguous(), c_hi.contiguous(), c_lo.contiguous()
    q_offset = first_position(shard.q_offset, T, S)
    dq = torch.empty(B, T, H, D, dtype=gradient_dtype or q.dtype, device=q.device)
    dk, dv = (torch.empty(B, S, Hkv, D, dtype=gradient_dtype or k.dtype, device=q.device) for _ in range(2))
    dc = torch.empty(B, H, S, dtype=torch.float32, device=q.device)
    row_sum = torch.empty(B, H, T, dtype=torch.float32, device=q.device) if row_sum is None else row_sum
    if q.numel() == 0:
        return dq, dk.zero_(), dv.zero_(), dc.zero_()
    padded = cdiv(T, 16) * 16  # so that the rows of facts are aligned
    facts = torch.empty(B, H, 4, padded, dtype=torch.float32, device=q.device)
    documents = found_edges(c_hi, c_lo, T, options, documents, per_head=False, shard=shard)
    starts, lower = documents.edges, documents.first_seen
    unseen = None if lower is None else unseen_from(lower, S)
    start, end = (None, None) if starts is None else starts.unbind()
    rows, columns = tiles or tuple(tile_for(kernel, D, q.dtype, q.device) for kernel in ("dq", "dkdv"))
    record = 2 * columns.block_m + 16
    records = torch.empty(B, H, cdiv(T, columns.block_m), record, dtype=torch.float32, device=q.device)
    D0, D1 = split_head_dim(D)
    numbers = (q_offset, window or 0, sink, scale, scale * LOG2_E, *cap_factors(softcap))
    flags = (
        causal, starts is not None, lower_kind(lower, window), sink > 0, cap_kind(softcap, q.dtype),
        c_offset is not None,
    )  # fmt: skip
    precision = "ieee" if q.dtype == torch.float32 else "tf32"
    lost = None
    bounded = starts is not None or window is not None or lower is not None
    if begins_at_the_first_key(q, k, causal, q_offset, bounded, c_offset):
        lost = lost_to_rounding(q, k, do, lse2, c_hi, c_lo, options)
    tma = D1 == 0 and q.element_size() == 2 and describable(q, k, v, do)
    row_tma, column_tma = int(rows.tma) * tma, int(columns.tma) * tma
    v_block = source(v, columns.block_n, True) if column_tma == Copies.OWN else None
    own_rows, own_columns = row_tma >= Copies.OWN, column_tma >= Copies.ALL
    relative = block_relative(c_hi, c_lo, rows.block_n)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    launch(
        dq_kernel,
        (cdiv(T, rows.block_m) * B * H,),
        (
            source(q, rows.block_m, own_rows), source(k, rows.block_n, row_tma), source(v, rows.block_n, row_tma),
            o, residual, source(do, rows.block_m, own_rows), None if dlse2 is None else dlse2.contiguous(), lse2,
            c_hi, c_lo, relative, start, lower, c_offset, dq, facts, records, row_sum,
            *strides, *o.stride()[:3], *do.stride()[:3], T, S, padded, relative.shape[-1], H,
            walked_together(2 * S * D * k.element_size(), B * H, H // Hkv), *numbers,
        ),
        (
            H // Hkv, D0, D1, rows.block_m, rows.block_n, *flags, dlse2 is not None, residual is not None,
            columns.block_m, precision, row_tma,
        ),
        warps=rows.warps, stages=rows.stages,
    )  # fmt: skip
    launch(
        dkdv_kernel,
        (cdiv(S, columns.block_n) * B * Hkv,),
        (
            source(q, columns.block_m, column_tma), source(k, columns.block_n, own_columns),
            source(v, columns.block_n, own_columns), v_block,
            source(do, columns.block_m, column_tma), facts, records, row_sum, c_hi, c_lo, start, end, lower, unseen,
            c_offset, lost, dk, dv, dc,
            *strides, *do.stride()[:3], T, S, padded, H,
            walked_together(2 * T * D * q.element_size(), B * Hkv),  # the heads of a group one after another
            *numbers,
        ),
        (
            H // Hkv, D0, D1, columns.block_m, columns.block_n, *flags, precision, column_tma,
            0 if lost is None else BLOCK,
        ),
        warps=columns.warps, stages=columns.stages,
    )  # fmt: skip
    if q_offset + T > S:  # queries past the keys share c[S - 1]
        dc[..., S - 1] += row_sum[..., max(0, S - q_offset) :].sum(-1)
    return dq, dk, dv, dc
