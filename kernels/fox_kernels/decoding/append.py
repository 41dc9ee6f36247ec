"""Appending a few tokens to a cache in place: keys, values and the gates' running sum.

    c_t = c_{t-1} + log2(e) * max(log f_t, -1e4), as hi + lo

One launch, where torch takes twenty for a token. Its twin in plain torch is `GrowingLayer` of retrofox.acceleration.
"""

import torch
import triton
import triton.language as tl

from ..common.blocks import LOG2E
from ..common.cumsum import clamped
from ..host.launch import launch, power_of_2
from ..layer.support import available
from ..options import LOG_F_MIN

MOST_TOKENS = 16  # the kernel takes them one by one: torch copies more


@triton.jit(do_not_specialize=["length", "room"])
def append_kernel(
    k_ptr, v_ptr, log_f_ptr, keys_ptr, values_ptr, sums_ptr, length_ptr,
    sk_b, sk_h, sk_t, sv_b, sv_h, sv_t, sf_b, sf_t, sf_h, length, room, T, H, floor,
    GROUP: tl.constexpr, GP: tl.constexpr, KW: tl.constexpr, KP: tl.constexpr, VW: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    kv = tl.program_id(0).to(tl.int64)
    heads = H // GROUP
    if length_ptr is not None:
        length = tl.load(length_ptr)
    b, h = kv // heads, kv % heads
    offs_k, offs_v, group = tl.arange(0, KP), tl.arange(0, VP), tl.arange(0, GP)
    real = group < GROUP
    k_ptr += b * sk_b + h * sk_h
    v_ptr += b * sv_b + h * sv_h
    log_f_ptr += b * sf_b + (h * GROUP + group) * sf_h
    keys_ptr += (kv * room + length) * KW
    values_ptr += (kv * room + length) * VW
    hi_ptr = sums_ptr + (b * 2 * H + h * GROUP + group) * room + length
    lo_ptr = hi_ptr + H.to(tl.int64) * room
    known = tl.where(length > 0, real, False)  # Triton 3.9's interpreter makes integers of real & (length > 0)
    c = tl.load(hi_ptr - 1, mask=known, other=0.0).to(tl.float64)
    c += tl.load(lo_ptr - 1, mask=known, other=0.0).to(tl.float64)
    for t in range(T):
        k = tl.load(k_ptr + t * sk_t + offs_k, mask=offs_k < KW)
        tl.store(keys_ptr + t * KW + offs_k, k, mask=offs_k < KW)
        v = tl.load(v_ptr + t * sv_t + offs_v, mask=offs_v < VW)
        tl.store(values_ptr + t * VW + offs_v, v, mask=offs_v < VW)
        c += clamped(tl.load(log_f_ptr + t * sf_t, mask=real, other=0.0), floor) * LOG2E
        hi = c.to(tl.float32)
        tl.store(hi_ptr + t, hi, mask=real)
        tl.store(lo_ptr + t, (c - hi.to(tl.float64)).to(tl.float32), mask=real)


def appends(k: torch.Tensor, v: torch.Tensor, log_f: torch.Tensor) -> bool:
    """Return whether `append` can run for new tokens like these."""
    plain = all(type(x) is torch.Tensor for x in (k, v, log_f)) and not torch.compiler.is_compiling()
    alike = k.dtype == v.dtype and log_f.dtype == torch.float32 and k.stride(-1) == v.stride(-1) == 1
    return plain and alike and k.shape[2] <= MOST_TOKENS and k.numel() > 0 and available(k)


def append(
    rooms: list[torch.Tensor], length: int | torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_f: torch.Tensor,
    *_: object,
) -> None:  # fmt: skip
    """Write T tokens behind the first `length` of a cache's rooms, which must have space for them.

    k (B, Hkv, T, KW); v (B, Hkv, T, VW); log_f (B, T, H) float32. rooms, all contiguous: keys (B, Hkv, room, KW),
    values (B, Hkv, room, VW), sums (B, 2 H, room, 1) float32: c of every head, rounded, and its rounding error. length:
    an int, or (1,) int32 on the device, which is read when the kernel runs: so a captured graph appends at any length.
    What code saved beside a checkpoint may give behind these (a bound on the keys' norms) is of no use any more.
    """
    (B, Hkv, T, KW), VW, H = k.shape, v.shape[-1], log_f.shape[-1]
    keys, values, sums = rooms
    length, at = (0, length) if isinstance(length, torch.Tensor) else (length, None)
    with torch.cuda.device_of(k):
        launch(
            append_kernel,
            (B * Hkv,),
            (
                k, v, log_f, keys, values, sums, at, *k.stride()[:3], *v.stride()[:3], *log_f.stride(),
                length, keys.shape[2], T, H, LOG_F_MIN,
            ),
            (H // Hkv, power_of_2(H // Hkv), KW, power_of_2(KW), VW, power_of_2(VW)),
            warps=1,
        )  # fmt: skip
