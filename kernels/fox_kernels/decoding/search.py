"""Where decoding starts: by a horizon, by a bound on the keys' norms, or by a pass over all keys."""

import math

import torch
import triton
import triton.language as tl

from ..common import pruning
from ..common.blocks import LOG2_E, soft_capped
from ..options import Options

SEARCH_BLOCK, WAYS = tl.constexpr(64), tl.constexpr(64)  # keys, ways of a step


@triton.jit
def falls(skipped, width, c_i_hi, c_i_lo, c_rows, real, c_hi_ptr, c_lo_ptr, T, S, BLOCK: tl.constexpr):
    """c_i - c_j at the ends of 64 lots of `width` blocks beyond those skipped, and which of these come before all i."""
    blocks = skipped[:, None] + (1 + tl.arange(0, WAYS))[None, :] * width
    inside = (blocks * BLOCK <= S - T) & real[:, None]
    ends = c_rows[:, None] + tl.where(inside, blocks * BLOCK - 1, 0)
    fall = c_i_hi[:, None] - tl.load(c_hi_ptr + ends, mask=inside, other=0.0)
    fall += c_i_lo[:, None] - tl.load(c_lo_ptr + ends, mask=inside, other=0.0)
    return fall, inside


@triton.jit(do_not_specialize=["S"])
def search_kernel(
    q_ptr, k_ptr, c_hi_ptr, c_lo_ptr, bound_ptr, first_ptr, length_ptr, sq_b, sq_t, sq_h, sk_b, sk_s, sk_h, sc_b, sc_h,
    T, S, H, scale2, softcap2, inverse_cap, never, horizon2,
    GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, CAP: tl.constexpr,
    EXACT: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """The first key of each (sequence, kv head) that some query of the group needs; bound_ptr None: by the horizon."""
    kv = tl.program_id(0).to(tl.int64)
    heads = H // GROUP
    if length_ptr is not None:
        S = tl.load(length_ptr) + T
    b, h_kv = kv // heads, kv % heads
    rows, offs_d = tl.arange(0, ROWS), tl.arange(0, DP)
    real = rows < T * GROUP
    t, h = tl.minimum(rows // GROUP, T - 1), h_kv * GROUP + rows % GROUP
    pos = S - T + t
    c_rows = b * sc_b + h * sc_h
    c_i_hi, c_i_lo = tl.load(c_hi_ptr + c_rows + pos), tl.load(c_lo_ptr + c_rows + pos)
    skipped = (c_rows * 0).to(tl.int32)  # blocks, per row
    width = 1
    for _ in tl.static_range(STEPS - 1):
        width *= WAYS
    # loaded before q and k, so that the first step doesn't wait for their products
    fall, inside = falls(skipped, width, c_i_hi, c_i_lo, c_rows, real, c_hi_ptr, c_lo_ptr, T, S, SEARCH_BLOCK)
    ahead = c_i_hi * 0.0
    if bound_ptr is not None:
        k_bound = tl.load(bound_ptr + kv)
        mask = real[:, None] & (offs_d < D)[None, :]
        q_rows = q_ptr + b * sq_b + t * sq_t + h * sq_h
        q = tl.load(q_rows[:, None] + offs_d[None, :], mask=mask, other=0.0).to(tl.float32)
        k_rows = k_ptr + b * sk_b + h_kv * sk_h + pos.to(tl.int64) * sk_s
        own = tl.sum(q * tl.load(k_rows[:, None] + offs_d[None, :], mask=mask, other=0.0).to(tl.float32), 1) * scale2
        if CAP:
            own, _t = soft_capped(own, softcap2, inverse_cap, EXACT)
        bound = tl.abs(scale2) * tl.sqrt(tl.sum(q * q, 1)) * k_bound * 1.0001
        if CAP:
            bound = tl.minimum(bound, softcap2)
        ahead = bound - own
    for step in tl.static_range(STEPS):  # by the rule of `pruning`: what may be skipped is a prefix, searched 64-ways
        if step > 0:
            fall, inside = falls(skipped, width, c_i_hi, c_i_lo, c_rows, real, c_hi_ptr, c_lo_ptr, T, S, SEARCH_BLOCK)
        skip = fall <= 0.0 - horizon2
        if bound_ptr is not None:
            skip = skip | (fall + ahead[:, None] < never)
        skip = skip & inside
        skipped += tl.sum(skip.to(tl.int32), 1) * width
        width = width // WAYS
    first = tl.min(tl.where(real, skipped, S), 0) * SEARCH_BLOCK
    tl.store(first_ptr + kv, first)


def search_steps(S: int) -> int:
    """Return in how many steps a search in 64 ways goes through the blocks of S keys."""
    steps = 1
    while 64 ** (steps + 1) < S:
        steps += 1
    return steps


def skip_before(q, k, c_hi, c_lo, options: Options) -> torch.Tensor:
    """Return first (B, Hkv) int32: keys before it hold at most exp(options.prune) of the weight of each query of the
    group.

    A gate never opens again (log f <= 0), so for norms that stay bounded they may leave the cache for good.
    """
    B, Hkv = k.shape[0], k.shape[2]
    first = pruning.loop_bounds(q, k, c_hi, c_lo, options)
    return first.view(B, Hkv, -1).amin(-1)


def key_bound(k: torch.Tensor) -> torch.Tensor:
    """Return (B, Hkv) float32, the greatest |k_j| of a cache (B, S, Hkv, D); new keys can but raise it."""
    return torch.linalg.vector_norm(k, dim=-1, dtype=torch.float32).amax(1)


def first_kept_torch(q, k, c_hi, c_lo, k_bound, *, scale, softcap=None, prune=-10.0) -> torch.Tensor:
    """The eager twin of `search_kernel`: (B, Hkv), the first key that decoding with k_bound reads."""
    (_, T, H, _), (S, Hkv) = q.shape, k.shape[1:3]
    q, own = q.double().unflatten(2, (Hkv, H // Hkv)), k[:, S - T :, :, None].double()
    own = (q * own).sum(-1) * scale
    bound = abs(scale) * q.norm(dim=-1) * k_bound[:, None, :, None] * 1.0001
    if softcap is not None:
        own, bound = softcap * torch.tanh(own / softcap), bound.clamp_max(softcap)
    c = (c_hi.double() + c_lo.double()).transpose(1, 2).unflatten(2, (Hkv, H // Hkv)) / LOG2_E
    fall = c[:, S - T :, None] - c[:, None, 63 : S - T : 64]
    skip = fall + (bound - own)[:, :, None] < prune - math.log(S)
    return 64 * skip.all(1).all(-1).sum(1)
