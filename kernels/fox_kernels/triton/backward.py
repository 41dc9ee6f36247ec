"""The backward in plain Triton, deterministic: dq with its row sums, then dk and dv with the column sums.

    p_ij = exp2(s_ij - lse_i)      ds_ij = p_ij (do_i.v_j - delta_i)      delta_i = do_i.o_i - dL/dlse_i
    dq_i = scale sum_j ds_ij k_j   dk_j = scale sum_i ds_ij q_i
    dv_j = sum_i p_ij do_i         dc_t = sum_j ds_tj - sum_i ds_it

Two kernels, each recomputing p, so that no sum needs atomics: `dq` by rows, `dkdv` by columns.
The row and column sums come from the same float32 ds: with either left out, or rounded, dlog_f is off by 1 to 11 %.
"""

import torch

from ..common.cumsum import block_relative
from ..common.first_weights import begins_at_the_first_key, lost_to_rounding
from ..common.groups import Facts, Gates, InputStrides, Output, Strides
from ..common.horizon import found_edges, unseen_from
from ..host.launch import cdiv, launch
from ..host.strides import aligned, describable, source
from ..options import ONE_DOCUMENT, Documents, Options, Saved
from .dkdv import dkdv_kernel
from .dq import dq_kernel
from .forward import shared_arguments, walked_together
from .tiles import Copies, split_head_dim, tile_for


def launch_backward(do, dlse2, q, k, v, saved: Saved, options: Options, documents: Documents = ONE_DOCUMENT):
    """Return dq, dk, dv in the inputs' dtype and dc (B, H, S) float32, dL/dc in natural units; arguments as forward's.

    dlse2 (B, H, T) or None is dL/dlse2. The order of every sum is fixed, so two runs give the same bits.
    """
    (B, T, H, D), (S, Hkv) = q.shape, k.shape[1:3]
    o, lse2, c_hi, c_lo, residual = saved
    q, k, v, o, do = (aligned(x) for x in (q, k, v, o, do))
    lse2, c_hi, c_lo = lse2.contiguous(), c_hi.contiguous(), c_lo.contiguous()
    dq = torch.empty(B, T, H, D, dtype=q.dtype, device=q.device)
    dk, dv = (torch.empty(B, S, Hkv, D, dtype=k.dtype, device=q.device) for _ in range(2))
    dc = torch.empty(B, H, S, dtype=torch.float32, device=q.device)
    row_sum = torch.empty(B, H, T, dtype=torch.float32, device=q.device)
    if q.numel() == 0:
        return dq, dk.zero_(), dv.zero_(), dc.zero_()
    padded = cdiv(T, 16) * 16  # so that the rows of facts are aligned
    facts = torch.empty(B, H, 4, padded, dtype=torch.float32, device=q.device)
    documents = found_edges(c_hi, c_lo, T, options, documents, per_head=False)
    edges, lower = documents.edges, documents.first_seen
    rows, columns = (tile_for(kernel, D, q.dtype, q.device) for kernel in ("dq", "dkdv"))
    record = 2 * columns.block_m + 16
    records = torch.empty(B, H, cdiv(T, columns.block_m), record, dtype=torch.float32, device=q.device)
    lost = None
    bounded = edges is not None or options.window is not None or lower is not None
    if begins_at_the_first_key(q, k, bounded):
        lost = lost_to_rounding(q, k, do, lse2, c_hi, c_lo, options)
    tma = split_head_dim(D)[1] == 0 and q.element_size() == 2 and describable(q, k, v, do)
    shared = shared_arguments(q, k, options, documents)
    shared |= {
        "c": Gates(c_hi, c_lo), "facts": Facts(facts, records, row_sum), "TP": padded,
        "scale": shared["scale"]._replace(natural=options.scale),
    }  # fmt: skip
    strides = InputStrides(*[Strides(*x.stride()[:3]) for x in (q, k, v, o, do)])
    m, n, row_tma = rows.block_m, rows.block_n, int(rows.tma) * tma
    own, relative = row_tma >= Copies.OWN, block_relative(c_hi, c_lo, n)
    launch(
        dq_kernel, (cdiv(T, m) * B * H,), warps=rows.warps, stages=rows.stages,
        q=source(q, m, own), k=source(k, n, row_tma), v=source(v, n, row_tma), do=source(do, m, own),
        forward=Output(o, residual, lse2), dlse=None if dlse2 is None else dlse2.contiguous(), relative=relative,
        dq=dq, strides=strides, SP=relative.shape[-1],
        together=walked_together(2 * S * D * k.element_size(), B * H, H // Hkv), TILE=rows._replace(tma=row_tma),
        NEXT_BM=columns.block_m, **shared,
    )  # fmt: skip
    m, n, column_tma = columns.block_m, columns.block_n, int(columns.tma) * tma
    own = column_tma >= Copies.ALL
    shared["bounds"] = shared["bounds"]._replace(
        end=None if edges is None else edges[1], unseen_from=None if lower is None else unseen_from(lower, S)
    )
    launch(
        dkdv_kernel, (cdiv(S, n) * B * Hkv,), warps=columns.warps, stages=columns.stages,
        q=source(q, m, column_tma), k=source(k, n, own), v=source(v, n, own),
        v_block=source(v, n, True) if column_tma == Copies.OWN else None, do=source(do, m, column_tma),
        lost=lost, dk=dk, dv=dv, dc=dc, strides=strides._replace(o=None),
        together=walked_together(2 * T * D * q.element_size(), B * Hkv),  # the heads of a group one after another
        TILE=columns._replace(tma=column_tma), **shared,
    )  # fmt: skip
    return dq, dk, dv, dc
