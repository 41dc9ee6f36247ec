"""Plans and launches decoding: into how many stretches the keys are split, what is searched, which kernels run.

All that calls of a kind share is worked out once, in a `Decoder`. What padding and a horizon leave differs between
sequences and heads: then all stretches are of one length, as many to a head as it has keys left, and each program finds
out which is its own. Where a head's horizon lies the step before has found, or a small kernel finds it from a few
values of c.
"""

import functools

import torch

from ..common.blocks import LOG2_E, exact_tanh, scale_of
from ..common.groups import Gates, Problem, Strides
from ..host.device import capability, processors
from ..host.launch import cdiv, launch, power_of_2
from ..host.strides import aligned, unit_last
from ..options import Options
from ..triton.tiles import SMALL_SHARED, split_head_dim, table_for
from .decode import CacheStrides, Parts, Tile, merge_kernel, split_kernel
from .search import search_kernel, search_steps

MAX_ROWS = 64  # T * H / Hkv that share a tile
MIN_KEYS = 256
MAX_PAIRS = 65535  # (sequence, kv head) pairs: a grid is no longer in its second dimension
MAX_SHARED = 1024  # (sequence, kv head) pairs; more fill the GPU whatever each has left


def pays(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Return whether the problem is a decoding one: few query rows per kv head, many keys."""
    (_, T, H, _), (S, Hkv) = q.shape, k.shape[1:3]
    few = q.numel() > 0 and T * (H // Hkv) <= MAX_ROWS and T <= 16 and q.shape[0] * Hkv <= MAX_PAIRS
    return few and S >= MIN_KEYS and S >= 16 * T


def splits_for(pairs: int, processors: int) -> int:
    """Return into how many parts to split the keys of each (sequence, kv head) pair.

    One program per processor reads fastest (0.73 of a copy's rate at 32k, two 0.72; H100); where whole splits would
    leave a tenth of the processors idle, two.
    """
    splits = processors // pairs
    if splits * pairs < 0.9 * processors:
        splits = 2 * processors // pairs
    return max(1, min(256, splits))


def slots_for(pairs: int, processors: int) -> int:
    """Return how many stretches to share out where the pairs differ; each pair's last is shorter, and comes on top."""
    return processors if 4 * pairs <= processors else 2 * max(pairs, processors)


def small_shared(capability: tuple[int, int]) -> bool:
    """Return whether a GPU's programs have 99 KB of shared memory."""
    return table_for(torch.bfloat16, capability) is SMALL_SHARED


def block_for(D: int, rows: int, size: int, capability: tuple[int, int]) -> int:
    """Return how many keys a step takes; products in float32 run on the ordinary units, from registers."""
    if size == 4:
        return 32 if D <= 64 and rows <= 16 else 16
    block = 32 if D > 128 else 64 if D > 64 else 128
    return min(block, 2048 // rows) if small_shared(capability) else block  # more scores spill there (not run)


@functools.cache
def stages_for(rows: int, block: int, D: int, size: int, capability: tuple[int, int]) -> int:
    """Return how many blocks of keys, values and gates fit the shared memory at a time; elements of `size` bytes.

    99 KB on Ada and small Blackwell, 163 on Ampere, 227 on Hopper; three blocks are as fast as four.
    """
    room = 99 << 10 if small_shared(capability) else (227 if capability[0] == 9 else 163) << 10
    room -= block * D * size + rows * (5 * block + D * size)
    return max(1, min(3, 1 + room // (2 * block * D * size + 8 * block * rows)))


class Decoder:
    """Runs decoding calls that differ in S, strides and addresses only; everything else is worked out once, here.

    padded: there is a seq_start.
    """

    def __init__(self, shape, Hkv, dtype, device, options: Options, *, padded: bool):
        B, T, H, D = shape
        scale, window, sink, softcap, horizon = options
        group, size = H // Hkv, dtype.itemsize
        if T * group > MAX_ROWS or B * Hkv > MAX_PAIRS:
            raise ValueError(
                f"decoding takes T * H / Hkv <= {MAX_ROWS} and B * Hkv <= {MAX_PAIRS}, got {T} * {group} and "
                f"{B} * {Hkv}: use forgetting_attention"
            )
        D0, D1 = split_head_dim(D)
        tile_rows, able = max(16, power_of_2(T * group)), (0, 0) if device.type == "cpu" else capability(device)
        self.T, self.H, self.D, self.rows, self.pairs, self.device = T, H, D, T * group, B * Hkv, device
        self.window, self.sink = window, sink
        self.readable = aligned if D1 else unit_last
        self.scale = scale_of(scale, softcap)
        self.horizon2 = None if horizon is None else horizon * LOG2_E
        precision = "ieee" if size == 4 else "tf32"
        self.problem = Problem(group, D0, D1, exact_tanh(softcap, dtype), precision)
        self.tile = Tile(tile_rows, block_for(D, tile_rows, size, able), pairs=0, aligned=1)
        self.stages = stages_for(tile_rows, self.tile.block, D, size, able)
        self.shares = (padded or horizon is not None) and self.pairs <= MAX_SHARED
        self.slots, self.splits = (f(self.pairs, processors(device)) for f in (slots_for, splits_for))
        self.most_parts = max(1, 16384 // power_of_2(D))

    def __call__(self, q, k, v, c_hi, c_lo, *, seq_start=None, lse2=None, length=None, first=None, offset=None):
        """Return o (B, T, H, D), and leave the log-sum-exp in lse2 (B, H, T) float32 if given.

        length (1,) int32 on the device: tokens that are cached before the T new ones, whose sum is at most S.
        first (B * Hkv,) int32: what the call before left, 0 at first; offset (B,) int32; see `fixed.decode_at`.
        """
        T, H, D, S, pairs, block = self.T, self.H, self.D, k.shape[1], self.pairs, self.tile.block
        if seq_start is not None:
            seq_start = seq_start.to(torch.int32).contiguous()
        window, sink = None if self.window is None else min(self.window, S), min(self.sink, S)  # ints of 32 bits
        blocks = cdiv(S, block)
        if window is not None:
            blocks = min(blocks, cdiv(window + T - 1, block) + cdiv(sink, block) + 2)
        longer = blocks > self.splits  # else each program has one block, and looking for fewer saves nothing
        shares, near = self.shares and longer, self.horizon2 is not None and longer
        splits, most, grid = 0, min(self.slots, blocks), (min(self.slots + pairs, pairs * blocks), 1, 1)
        if not shares:
            splits = most = min(blocks, self.splits)
            grid = (splits, pairs, 1)
        q, k, v = self.readable(q), self.readable(k), self.readable(v)
        c, (batch, head, _), group = Gates(c_hi, c_lo), c_hi.stride(), self.problem.group
        c_strides = Strides(batch, head, head * group) if c_hi.shape[1] == H else Strides(batch, 0, head)
        o = torch.empty(q.shape, dtype=q.dtype, device=self.device)
        lse2 = torch.empty(q.shape[0], H, T, dtype=torch.float32, device=self.device) if lse2 is None else lse2
        rows = grid[0] * grid[1] * self.rows
        part, part_lse = torch.empty(rows * (D + 1), dtype=torch.float32, device=self.device).split((rows * D, rows))
        begin = torch.empty(pairs + 1, dtype=torch.int32, device=self.device) if shares else None
        horizon2, group_rows = self.horizon2, power_of_2(group)
        goes_on = near and first is not None
        if not near:
            first = None
        elif first is None:
            first = torch.empty(pairs, dtype=torch.int32, device=self.device)
            launch(
                search_kernel, (pairs, 1, 1), c=c, first=first, length=length, strides=c_strides, T=T, S=S, H=H,
                horizon2=horizon2, GROUP=group, ROWS=group_rows, STEPS=search_steps(S),
            )  # fmt: skip
        whole = all(x % 16 == 0 for x in (*c_strides, c_hi.data_ptr(), c_lo.data_ptr()))
        tile = self.tile._replace(pairs=power_of_2(pairs) if shares else 0, aligned=4 if whole else 1)
        parts = Parts(part, part_lse, begin)
        launch(
            split_kernel, grid, q=q, k=k, v=v, c=c, start=seq_start, first=first, length=length, offset=offset,
            parts=parts, strides=CacheStrides(*(Strides(*x.stride()[:3]) for x in (q, k, v)), c_strides), T=T, S=S, H=H,
            pairs=pairs, slots=self.slots, window=window, sink=sink or None, scale=self.scale, horizon2=horizon2,
            PROBLEM=self.problem, TILE=tile, stages=self.stages,
        )  # fmt: skip
        launch(
            merge_kernel, (self.rows + goes_on, pairs, 1), parts=parts, o=o, lse=lse2, c=c,
            first=first if goes_on else None, length=length, offset=offset, strides=c_strides, T=T, S=S, H=H,
            splits=splits, horizon2=horizon2, GROUP=group, D=D, DP=power_of_2(D),
            PARTS=min(power_of_2(most), self.most_parts), ROWS=group_rows,
        )  # fmt: skip
        return o


decoder_for = functools.lru_cache(256)(Decoder)


def launch_decode(q, k, v, c_hi, c_lo, options: Options, seq_start=None):
    """Return o (B, T, H, D) and lse2 (B, H, T) of the last T positions of a cache of S; T * H / Hkv <= MAX_ROWS.

    q (B, T, H, D); k, v (B, S, Hkv, D), any strides: copied where `strides.unit_last` says so, at D = 80 and 96
    `strides.aligned`; c_hi, c_lo (B, H or Hkv, S) float32, any strides with unit last: a longer buffer can be sliced.
    Raises ValueError when the group's rows do not fit a tile, nor the pairs of sequences and kv heads a grid.
    """
    B, T, H, _ = q.shape
    decoder = decoder_for(q.shape, k.shape[2], q.dtype, q.device, options, padded=seq_start is not None)
    lse2 = torch.empty(B, H, T, dtype=torch.float32, device=q.device)
    return decoder(q, k, v, c_hi, c_lo, seq_start=seq_start, lse2=lse2), lse2
