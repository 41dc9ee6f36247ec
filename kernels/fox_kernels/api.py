"""The operator: its arguments, and the call of the backend that `choose_backend` picks."""

import functools
import sys
from collections.abc import Callable
from typing import TypeVar

import torch

from . import autograd, reference
from .arguments import (
    as_wide_as,
    check,
    check_cache,
    check_gates,
    for_backward,
    traced,
    under_autocast,
    under_transform,
)
from .choose_backend import announce, choose
from .host.device import on_device, triton_unsupported
from .options import Documents, given

Tensor = torch.Tensor
Operator = TypeVar("Operator", bound=Callable)
NOTE = ["fox_kernels: prune is gone: all keys are computed; a horizon leaves keys out"]  # printed once


def without_pruning(operator: Operator) -> Operator:
    """`operator` for code saved beside checkpoints, which passes prune and k_bound: they approximated what this is."""

    @functools.wraps(operator)
    def call(*arguments, prune=None, k_bound=None, **options):
        if prune is not None and NOTE and not torch.compiler.is_compiling():
            print(NOTE.pop(), file=sys.stderr)
        return operator(*arguments, **options)

    return call  # pyright: ignore[reportReturnType]


@without_pruning
def forgetting_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_f: Tensor,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    seq_start: Tensor | None = None,
    window: int | None = None,
    sink: int = 0,
    softcap: float | None = None,
    horizon: float | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention whose logits decay by the forget gates passed on the way from key to query.

        o_i = sum_j softmax_j(scale * q_i.k_j + c_i - c_j) v_j,   c_t = sum_{l <= t} log f_l,   j <= i

    q           (B, T, H, D); queries are the last T of the S positions
    k           (B, S, Hkv, D), q's dtype, H % Hkv == 0
    v           (B, S, Hkv, DV), DV <= D. Where DV < D, Triton's kernels take a copy padded with zeros: at 192 and 128
                1.2 times the operations forward, 1.15 times backward
    log_f       (B, S, H) float32 (or float64), natural log of the forget gates, <= 0; below -1e4 counts as -1e4. NaN
                reaches every output that depends on it
    scale       any float that float32 holds, D ** -0.5 if None. The backward forms weights from lse, so scores in
                the thousands cost it digits: 6e-8 of their size
    cu_seqlens  (N + 1,) int32, rising from 0 to S: N documents packed into B == 1, none sees another
    seq_start   (B,) int32, first visible position of each row (left padding); queries before it get o = 0, lse = -inf
    window      query i sees keys j > i - window only
    sink        the first positions of each document, exempt from decay, window and horizon
    softcap     scale * q.k becomes softcap * tanh(scale * q.k / softcap), before the decay
    horizon     nats > 0: query i sees keys with c_i - c_j > -horizon only, whatever they score; part of the model, in
                training and decoding alike. c falls, so the keys of a query that are hidden are the first ones
    backend     "auto", "reference", "chunked", "triton" or "gluon"; see `choose`

    Strides may be any: q, k and v are read in place, or copied where the last is not 1, where tokens are 2^23 elements
    or more apart and, in 16 bits on a GPU, where another is not a multiple of 16 elements or, on Hopper, 0 (expanded:
    backend="triton" reads that in place). Under torch.autocast they are taken in its dtype.
    Returns o (B, T, H, DV) in q's dtype and, with return_lse, lse (B, T, H) float32 (natural log, differentiable;
    float64 for float64). Raises ValueError for arguments out of range, for a named backend that can't run, and for
    second derivatives and torch.func of any backend but "reference". The values of log_f, cu_seqlens
    and seq_start are checked on a CPU only: reading them would stall a GPU.
    Source: Lin et al., "Forgetting Transformer", ICLR 2025, arXiv 2503.02130.
    """
    q, k, v = under_autocast(q, k, v)
    documents = Documents(cu_seqlens, seq_start)
    options, _ = given(scale=scale, window=window, sink=sink, softcap=softcap, horizon=horizon)
    options = check(q, k, v, log_f, options, documents)
    check_gates(log_f)
    chosen, reason = choose(q, k, v, log_f, backend=backend, **options._asdict())
    if not torch.compiler.is_compiling():
        announce(chosen, reason)
        if chosen != "reference" and under_transform():
            raise ValueError(
                f'backend "{chosen}" can\'t run under torch.func or forward-mode AD; use backend="reference"'
            )
    if chosen == "reference":
        return reference.attend(q, k, v, log_f, options, documents, return_lse)
    if chosen == "chunked" or v.shape[-1] == q.shape[-1]:
        return autograd.forgetting_attention(q, k, v, log_f, options, documents, chosen, return_lse)
    o, lse = autograd.forgetting_attention(q, k, as_wide_as(q, v), log_f, options, documents, chosen, True)
    return (o[..., : v.shape[-1]], lse) if return_lse else o[..., : v.shape[-1]]


def decodes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether `decode_attention` can run and is made for this: a few queries, a long cache, no gradient."""
    if traced(q, k, v) or triton_unsupported(q) is not None or k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        return False
    if for_backward(q, k, v):
        return False
    from .decoding import planner

    return planner.pays(q, k)


@without_pruning
def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    c_hi: Tensor,
    c_lo: Tensor,
    *,
    scale: float | None = None,
    seq_start: Tensor | None = None,
    window: int | None = None,
    sink: int = 0,
    softcap: float | None = None,
    horizon: float | None = None,
) -> Tensor:
    """Forgetting Attention of the last T positions of a cache that keeps the gates' running sum, not the gates.

        o_i = sum_j softmax_j(scale * q_i.k_j + (c_i - c_j) ln 2) v_j,   c_t = log2(e) sum_{l <= t} log f_l,   j <= i

    q           (B, T, H, D), T * H / Hkv <= 64; k (B, S, Hkv, D), v (B, S, Hkv, DV), any strides; options, DV and its
                cost as in `forgetting_attention`
    c_hi, c_lo  (B, H, S) float32, or (B, Hkv, S) where the query heads of a kv head share a gate: c as the sum of two
                floats; of any strides, the last 1: slices of longer buffers, so that nothing is summed again

    Returns o (B, T, H, DV) in q's dtype. Raises ValueError for arguments out of range, where Triton can't run, under
    torch.compile, and where a gradient is asked for: there is none.
    """
    options, _ = given(scale=scale, window=window, sink=sink, softcap=softcap, horizon=horizon)
    options = check_cache(q, k, v, c_hi, c_lo, options, seq_start)
    reason = "torch.compile can't take it" if torch.compiler.is_compiling() else triton_unsupported(q)
    if reason is not None:
        raise ValueError(f"decode_attention can't run: {reason}; use forgetting_attention")
    if for_backward(q, k, v, c_hi, c_lo):
        raise ValueError("decode_attention has no gradient: call it under torch.no_grad(), or use forgetting_attention")
    if q.numel() == 0:
        return q.new_empty(*q.shape[:3], v.shape[3])
    from .decoding import planner

    wide = as_wide_as(q, v)
    with on_device(q):
        o, _ = planner.launch_decode(q, k, wide, c_hi, c_lo, options, seq_start)
    return o if wide is v else o[..., : v.shape[3]]
