"""Decoding at a length that only the device knows: the launches of a captured graph, which are the same at every step.

The caches are buffers for `S` tokens; `length` (1,) int32 says how many are there. Kernels read it when they run, so
one graph serves every length up to S.
"""

import torch
from torch import Tensor

from ..arguments import as_wide_as, resolved
from ..host.device import on_device, triton_unsupported
from ..options import given
from . import planner


def decodes_at(q: Tensor, k: Tensor) -> bool:
    """Return whether `decode_at` can run for queries (B, T, H, D) and a buffer of keys (B, S, Hkv, D)."""
    (B, T, H, _), Hkv = q.shape, k.shape[2]
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or triton_unsupported(q) is not None or H % Hkv:
        return False
    return T * (H // Hkv) <= planner.MAX_ROWS and B * Hkv <= planner.MAX_PAIRS and q.numel() > 0


def decode_at(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    c_hi: Tensor,
    c_lo: Tensor,
    length: Tensor,
    *,
    seq_start: Tensor | None = None,
    first: Tensor | None = None,
    offset: Tensor | None = None,
    **options,
) -> Tensor:
    """Return o (B, T, H, D), as wide as v: `decode_attention` of the first `length` + T tokens of buffers for S.

    q           (B, T, H, D), the new tokens, which are in the buffers already
    k, v        (B, S, Hkv, D), views of the buffers, v perhaps narrower; c_hi, c_lo as in `decode_attention`
    length      (1,) int32 on the device, at a multiple of 16 bytes: tokens before the new ones; the host never reads it
    first       (B * Hkv,) int32 on the device, for a horizon: a key before which none is seen. A text begins with
                zeros; each call moves it on, for calls at this length or later ones. None: each call searches anew
    offset      (B,) int32 on the device, multiples of 64: all rows share buffers; k, v, c_hi, c_lo have batch stride 0,
                and position j of row b lies at offset[b] + j. It needs seq_start, and first no lower than that

    seq_start and options (scale, window, sink, softcap, horizon) are as in `forgetting_attention`. Raises ValueError
    where `decodes_at` is False and for a length of another kind.
    """
    if not decodes_at(q, k):
        raise ValueError(
            f"decode_at can't run for queries {tuple(q.shape)} {q.dtype} on {q.device} and keys {tuple(k.shape)}: "
            "use decode_attention, which needs the length on the host, or forgetting_attention"
        )
    if length.shape != (1,) or length.dtype != torch.int32 or length.device != q.device or length.data_ptr() % 16:
        raise ValueError(f"length must be (1,) int32 on {q.device}, aligned to 16 bytes; got {tuple(length.shape)} "
                         f"{length.dtype} on {length.device}")  # fmt: skip
    if offset is not None and (first is None or seq_start is None):
        raise ValueError("buffers that rows share (offset) need first and seq_start: where each row begins")
    wanted = resolved(given(**options)[0], q.shape[-1], k.shape[1])
    decoder = planner.decoder_for(q.shape, k.shape[2], q.dtype, q.device, wanted, padded=seq_start is not None)
    wide = as_wide_as(q, v)
    with on_device(q):
        o = decoder(q, k, wide, c_hi, c_lo, seq_start=seq_start, length=length, first=first, offset=offset)
    return o if wide is v else o[..., : v.shape[-1]]
