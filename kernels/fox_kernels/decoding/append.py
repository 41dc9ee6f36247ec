"""Appending a few tokens to a cache in place: keys, values and the gates' running sum.

    c_t = c_{t-1} + log2(e) * max(log f_t, -1e4), as hi + lo

One launch, where torch takes twenty for a token. Its twin in plain torch is `GrowingLayer` of retrofox.acceleration.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..common.blocks import LOG2E
from ..common.cumsum import clamped
from ..host.launch import launch, power_of_2
from ..layer.support import available
from ..options import LOG_F_MIN

MOST_TOKENS = 16  # the kernel takes them one by one: torch copies more


class AppendStrides(NamedTuple):
    """Of new tokens: k, v (B, Hkv, T, width), as batch, head and token; log_f (B, T, H)."""

    k: tuple[int, ...]
    v: tuple[int, ...]
    log_f: tuple[int, ...]


@triton.jit(do_not_specialize=["length", "room"])
def append_kernel(
    k, v, log_f, keys, values, sums, length_ptr, strides, length, room, T, H, floor,
    GROUP: tl.constexpr, GP: tl.constexpr, KW: tl.constexpr, KP: tl.constexpr, VW: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    kv = tl.program_id(0).to(tl.int64)
    heads = H // GROUP
    if length_ptr is not None:
        length = tl.load(length_ptr)
    b, h = kv // heads, kv % heads
    offs_k, offs_v, group = tl.arange(0, KP), tl.arange(0, VP), tl.arange(0, GP)
    real = group < GROUP
    k += b * strides.k[0] + h * strides.k[1]
    v += b * strides.v[0] + h * strides.v[1]
    log_f += b * strides.log_f[0] + (h * GROUP + group) * strides.log_f[2]
    keys += (kv * room + length) * KW
    values += (kv * room + length) * VW
    hi = sums + (b * 2 * H + h * GROUP + group) * room + length
    lo = hi + H.to(tl.int64) * room
    known = tl.where(length > 0, real, False)  # Triton 3.9's interpreter makes integers of real & (length > 0)
    c = tl.load(hi - 1, mask=known, other=0.0).to(tl.float64)
    c += tl.load(lo - 1, mask=known, other=0.0).to(tl.float64)
    for t in range(T):
        new_k = tl.load(k + t * strides.k[2] + offs_k, mask=offs_k < KW)
        tl.store(keys + t * KW + offs_k, new_k, mask=offs_k < KW)
        new_v = tl.load(v + t * strides.v[2] + offs_v, mask=offs_v < VW)
        tl.store(values + t * VW + offs_v, new_v, mask=offs_v < VW)
        c += clamped(tl.load(log_f + t * strides.log_f[1], mask=real, other=0.0), floor) * LOG2E
        rounded = c.to(tl.float32)
        tl.store(hi + t, rounded, mask=real)
        tl.store(lo + t, (c - rounded.to(tl.float64)).to(tl.float32), mask=real)


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
            append_kernel, (B * Hkv,), k=k, v=v, log_f=log_f, keys=keys, values=values, sums=sums, length_ptr=at,
            strides=AppendStrides(k.stride()[:3], v.stride()[:3], log_f.stride()), length=length, room=keys.shape[2],
            T=T, H=H, floor=LOG_F_MIN, GROUP=H // Hkv, GP=power_of_2(H // Hkv), KW=KW, KP=power_of_2(KW), VW=VW,
            VP=power_of_2(VW), warps=1,
        )  # fmt: skip
