"""Appending a few tokens to a cache in place: keys, values and the gates' running sum.

    c_t = c_{t-1} + log2(e) * max(log f_t, -1e4), as hi + lo

One launch, where torch takes twenty for a token. Its twin in plain torch is `GrowingLayer` of retrofox.acceleration.
`append_step` also turns queries and keys and computes the gates, bit for bit as `layer.rotary` and `gate_rows` do.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common.blocks import LOG2E
from ..common.cumsum import clamped
from ..host.device import available
from ..host.launch import launch, power_of_2
from ..layer.gate import log_sigmoid
from ..layer.rotary import turn
from ..options import LOG_F_MIN
from .elementwise import logit, logit_block, takes_few

MOST_TOKENS = 16  # the kernel takes them one by one: torch copies more


class AppendStrides(NamedTuple):
    """Strides of new tokens: of k, v (B, Hkv, T, width) by batch, head and token; of log_f (B, T, H)."""

    k: tuple[int, ...]
    v: tuple[int, ...]
    log_f: tuple[int, ...] | None


class Turn(NamedTuple):
    """Queries (B, T, H, D) before and after; cos and sin (B or 1, T, pairs), and their strides of batch and token."""

    q: Any
    out: Any
    cos: Any
    sin: Any
    batch: int
    token: int
    pairs: int


class Gate(NamedTuple):
    """A gate: the layer's input x (B, T, K), weight (gates, K), bias (gates,); `heads`: query heads to a gate."""

    x: Any
    weight: Any
    bias: Any
    K: int
    heads: int


@triton.jit(do_not_specialize=["length", "S"])
def append_kernel(
    k, v, log_f, keys, values, sums, length_ptr, offset, turned, gate, bounds, strides, length, S, T, H, floor,
    GROUP: tl.constexpr, SHARE: tl.constexpr, KW: tl.constexpr, KP: tl.constexpr, VW: tl.constexpr, VP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    b, h = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    heads, h_kv, gates, own = H // GROUP, h // GROUP, H // SHARE, h // SHARE
    if length_ptr is not None:
        length = tl.load(length_ptr)
    offs_k, offs_v, pair = tl.arange(0, KP), tl.arange(0, VP), tl.arange(0, KP // 2)
    k += b * strides.k[0] + h_kv * strides.k[1]
    v += b * strides.v[0] + h_kv * strides.v[1]
    place, hi_place = (b * heads + h_kv) * S, (b * 2 * gates + own) * S
    lo_place = (b * 2 * gates + gates + own) * S
    if offset is not None:
        place = tl.load(offset + b * heads + h_kv).to(tl.int64)
        hi_place = (own % (GROUP // SHARE)).to(tl.int64) * S + place
        lo_place = (GROUP // SHARE + own % (GROUP // SHARE)).to(tl.int64) * S + place
    keys += (place + length) * KW
    values += (place + length) * VW
    hi = sums + hi_place + length
    lo = sums + lo_place + length
    c = tl.load(hi - 1, mask=length > 0, other=0.0).to(tl.float64)
    c += tl.load(lo - 1, mask=length > 0, other=0.0).to(tl.float64)
    for t in range(T):
        row = b * T + t
        if gate is None:
            new = tl.load(log_f + b * strides.log_f[0] + t * strides.log_f[1] + own * strides.log_f[2])
        else:
            which = h // gate.heads
            new = log_sigmoid(logit(gate.x + row * gate.K, gate.weight + which.to(tl.int64) * gate.K, gate.K, BLOCK)
                              + tl.load(gate.bias + which))  # fmt: skip
            if bounds is not None:
                new -= tl.load(bounds + which)
        c += clamped(new, floor) * LOG2E
        rounded = c.to(tl.float32)
        tl.store(hi + t, rounded)
        tl.store(lo + t, (c - rounded.to(tl.float64)).to(tl.float32))
        if turned is not None:
            at = b * turned.batch + t * turned.token + pair
            cos = tl.load(turned.cos + at, mask=pair < turned.pairs, other=1.0).to(tl.float32)
            sin = tl.load(turned.sin + at, mask=pair < turned.pairs, other=0.0).to(tl.float32)
            q_at = (row * H + h) * KW
            turn(turned.q + q_at + pair, turned.out + q_at + pair, cos, sin, KW // 2, pair < KW // 2)
        if h % GROUP == 0:  # of the heads of a group, one writes its key and value
            if turned is not None:
                turn(k + t * strides.k[2] + pair, keys + t * KW + pair, cos, sin, KW // 2, pair < KW // 2)
            else:
                new_k = tl.load(k + t * strides.k[2] + offs_k, mask=offs_k < KW)
                tl.store(keys + t * KW + offs_k, new_k, mask=offs_k < KW)
            new_v = tl.load(v + t * strides.v[2] + offs_v, mask=offs_v < VW)
            tl.store(values + t * VW + offs_v, new_v, mask=offs_v < VW)


def appends(k: Tensor, v: Tensor, log_f: Tensor) -> bool:
    """Return whether `append` can run for new tokens like these."""
    plain = all(type(x) is Tensor for x in (k, v, log_f)) and not torch.compiler.is_compiling()
    alike = k.dtype == v.dtype and log_f.dtype == torch.float32 and k.stride(-1) == v.stride(-1) == 1
    return plain and alike and k.shape[2] <= MOST_TOKENS and k.numel() > 0 and available(k)


def append(
    buffers: list[Tensor], length: int | Tensor, k: Tensor, v: Tensor, log_f: Tensor, offset: Tensor | None = None
) -> None:
    """Write T tokens behind the first `length` of a cache's buffers, which must have space for them.

    k (B, Hkv, T, KW); v (B, Hkv, T, VW); log_f (B, T, gates) float32. buffers, all contiguous: keys (B, Hkv, S, KW),
    values (B, Hkv, S, VW), sums (B, 2 gates, S, 1) float32: c of every gate, rounded, and its rounding error.
    length: an int, or (1,) int32 that the kernel reads on the device: so a captured graph appends at any length. offset
    (B * Hkv,) int32 on the device: all share buffers (1, 1, S, KW), (1, 1, S, VW), (1, 2 gates / Hkv, S, 1),
    where position j of sequence b and kv head h lies at offset[b * Hkv + h] + j.
    """
    _launch(buffers, length, k, v, log_f, offset, log_f.shape[-1])


def _launch(
    buffers, length, k, v, log_f, offset, H, turned: Turn | None = None, gate: Gate | None = None, bounds=None, warps=1
) -> None:
    (B, Hkv, T, KW), VW = k.shape, v.shape[-1]
    keys, values, sums = buffers
    gates = sums.shape[1] // 2 * (1 if offset is None else Hkv)
    length, at = (0, length) if isinstance(length, Tensor) else (length, None)
    strides = AppendStrides(k.stride()[:3], v.stride()[:3], None if log_f is None else log_f.stride())
    with torch.cuda.device_of(k):
        launch(
            append_kernel, (B * H,), k=k, v=v, log_f=log_f, keys=keys, values=values, sums=sums, length_ptr=at,
            offset=offset, turned=turned, gate=gate, bounds=bounds, strides=strides, length=length, S=keys.shape[2],
            T=T, H=H, floor=LOG_F_MIN, GROUP=H // Hkv, SHARE=H // gates, KW=KW, KP=power_of_2(KW), VW=VW,
            VP=power_of_2(VW), BLOCK=1 if gate is None else logit_block(gate.K), warps=warps,
        )  # fmt: skip


def appends_step(buffers: list[Tensor], x: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Return whether `append_step` can run for what enters a layer, x (B, T, K): few rows of the buffers' dtype."""
    gates = all(y.dtype == torch.float32 and y.is_contiguous() for y in (weight, bias))
    return gates and takes_few(x) and x.dtype == buffers[0].dtype == buffers[1].dtype and x.shape[1] <= MOST_TOKENS


def append_step(
    buffers: list[Tensor], length: Tensor, x: Tensor, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, bias: Tensor,
    cos: Tensor, sin: Tensor, bounds: Tensor | None = None, offset: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Append T tokens with keys turned, and log f = log sigmoid(W x + b) - bounds; return the queries, turned.

    x (B, T, K) entered the layer, whose projections are q (B, T, H D), k (B, T, Hkv D) and v (B, T, Hkv VW), contiguous
    and of its dtype; weight (gates, K), bias and bounds (gates,) float32: a gate for one query head or several. cos,
    sin (B or 1, T, P): as in `layer.rotary`, with P = 0 nothing turns. buffers, length and offset: see `append`. Only
    where `appends_step` returns True.
    """
    B, T, K = x.shape
    Hkv, H = (y.shape[-1] // buffers[0].shape[3] for y in (k, q))
    turned, out = None, q
    if cos.shape[-1]:
        out = torch.empty_like(q)
        cos, sin = (y if y.stride(-1) == 1 else y.contiguous() for y in (cos, sin))
        if sin.stride() != cos.stride():
            cos, sin = cos.contiguous(), sin.contiguous()
        turned = Turn(q, out, cos, sin, cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1), cos.shape[-1])
    k, v = (y.view(B, T, Hkv, -1).transpose(1, 2) for y in (k, v))
    gate = Gate(x, weight, bias, K, H // len(weight))
    _launch(buffers, length, k, v, None, offset, H, turned, gate, bounds, warps=4)
    return out
