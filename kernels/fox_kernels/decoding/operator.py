"""Decoding as one torch operator with a fake where something watches operators, and straight to the kernels elsewhere.

fox_kernels::decode   q, k, v, c_hi, c_lo -> o
"""

import torch
from torch import Tensor

from ..chunked import within
from ..host.device import on_device
from ..host.tracing import traced
from ..options import Options
from . import planner


@torch.library.custom_op("fox_kernels::decode", mutates_args=())
def decode_operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    c_hi: Tensor,
    c_lo: Tensor,
    seq_start: Tensor | None,
    scale: float,
    window: int | None,
    sink: int,
    softcap: float | None,
    horizon: float | None,
) -> Tensor:
    return _decode(q, k, v, c_hi, c_lo, seq_start, Options(scale, window, sink, softcap, horizon))


@decode_operator.register_fake
def _(q, *_):
    return q.new_empty(q.shape)


def _decode(q, k, v, c_hi, c_lo, seq_start, options: Options) -> Tensor:
    with on_device(q):
        return planner.launch_decode(q, k, v, c_hi, c_lo, options, seq_start)[0]


def decode_attention(q, k, v, c_hi, c_lo, options: Options, seq_start) -> Tensor:
    """`fox_kernels.decode_attention`, which has checked the arguments."""
    window, sink = within(options.window, options.sink, k.shape[1])
    softcap, horizon = (None if x is None else float(x) for x in options[3:])
    options = Options(options.scale, window, sink, softcap, horizon)
    if traced(q, k, v, c_hi, c_lo):
        return decode_operator(q, k, v, c_hi, c_lo, seq_start, *options)
    return _decode(q, k, v, c_hi, c_lo, seq_start, options)
