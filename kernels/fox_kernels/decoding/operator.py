"""Decoding as one torch operator with a fake where something watches operators, and straight to the kernels elsewhere.

fox_kernels::decode   q, k, v, c_hi, c_lo -> o
"""

import torch
from torch import Tensor

from ..host.device import on_device
from ..host.tracing import traced
from ..options import SCHEMA, Documents, Options
from . import planner


@torch.library.custom_op(
    "fox_kernels::decode", mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, Tensor c_hi, Tensor c_lo, {SCHEMA}) -> Tensor",
)  # fmt: skip
def decode_operator(q, k, v, c_hi, c_lo, cu_seqlens, seq_start, *options):
    return _decode(q, k, v, c_hi, c_lo, Options(*options), seq_start)


@decode_operator.register_fake
def _(q, *_):
    return q.new_empty(q.shape)


def _decode(q, k, v, c_hi, c_lo, options: Options, seq_start) -> Tensor:
    with on_device(q):
        return planner.launch_decode(q, k, v, c_hi, c_lo, options, seq_start)[0]


def decode_attention(q, k, v, c_hi, c_lo, options: Options, seq_start) -> Tensor:
    """`fox_kernels.decode_attention`, which has checked the arguments."""
    if traced(q, k, v, c_hi, c_lo):
        return decode_operator(q, k, v, c_hi, c_lo, *Documents(seq_start=seq_start)[:2], *options)
    return _decode(q, k, v, c_hi, c_lo, options, seq_start)
