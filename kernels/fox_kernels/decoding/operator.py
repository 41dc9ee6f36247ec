"""Decoding as one torch operator with a fake where something watches operators, and straight to the kernels elsewhere.

fox_kernels::decode   q, k, v, c_hi, c_lo -> o
"""

import torch
from torch import Tensor

from ..autograd import traced
from ..chunked import within
from ..host.device import on_device
from . import planner


@torch.library.custom_op("fox_kernels::decode", mutates_args=())
def decode_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    c_hi: Tensor,
    c_lo: Tensor,
    k_bound: Tensor | None,
    seq_start: Tensor | None,
    scale: float,
    window: int | None,
    sink: int,
    softcap: float | None,
    prune: float | None,
) -> Tensor:
    return _decode(q, k, v, c_hi, c_lo, k_bound, seq_start, scale, window, sink, softcap, prune)


@decode_operator.register_fake
def _(q, *_):
    return q.new_empty(q.shape)


def _decode(q, k, v, c_hi, c_lo, k_bound, seq_start, scale, window, sink, softcap, prune) -> Tensor:
    with on_device(q):
        return planner.launch_decode(
            q, k, v, c_hi, c_lo, scale=scale, seq_start=seq_start, window=window, sink=sink, softcap=softcap,
            prune=prune, k_bound=k_bound,
        )[0]  # fmt: skip


def decode_attention(q, k, v, c_hi, c_lo, *, scale, seq_start, window, sink, softcap, prune, k_bound) -> Tensor:
    """`fox_kernels.decode_attention`, which has checked the arguments."""
    window, sink = within(window, sink, k.shape[1])
    softcap, prune = (None if x is None else float(x) for x in (softcap, prune))
    run = decode_operator if traced(q, k, v, c_hi, c_lo) else _decode
    return run(q, k, v, c_hi, c_lo, k_bound, seq_start, scale, window, sink, softcap, prune)


def decoder(q, k, *, scale, seq_start, window, sink, softcap, prune, k_bound) -> planner.Decoder | None:
    """Return what runs the kind of call that this is; None where keys are searched by torch, or parted."""
    if q.shape[0] * k.shape[2] > planner.MAX_PAIRS or (prune is not None and k_bound is None):
        return None
    return planner.decoder_for(
        q.shape, k.shape[2], q.dtype, q.device, scale=scale, padded=seq_start is not None, window=window, sink=sink,
        softcap=softcap, prune=prune, pruned=prune is not None, searches=prune is not None,
    )  # fmt: skip
