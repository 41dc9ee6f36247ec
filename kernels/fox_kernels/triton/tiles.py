"""Tile shapes of the plain Triton kernels: rows of a table, by kernel, head dim, dtype and architecture."""

from enum import IntEnum
from typing import NamedTuple

import torch

from ..host.device import capability, triton_version


class Copies(IntEnum):
    """Operands that a program copies by TMA, where it can; each level includes the ones before. The kernels' TMA."""

    NONE = 0
    WALKED = 1  # the rows that the loop reads: k and v; in dkdv q and do
    OWN = 2  # q and do of the program's own tile; in dkdv its v, which then stays in registers
    ALL = 3  # in dkdv its k, too


class Tile(NamedTuple):
    """Queries x keys per step, warps and pipeline stages of one program, and its copies by TMA."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    tma: int = Copies.NONE
    gates_by_tma: bool = False  # forward: TMA copies a block's gates too, and their scalars are read a block ahead
    hoist: bool = True  # dkdv: addresses that a group's heads share are kept, at times spilled, not computed for each


# (kernel, head dim) -> Tile for 16-bit inputs. Shared memory: Hopper and B200 227 KB, A100 163, others 99.
HOPPER = {  # each the fastest of those tried on an H100 at 2 x 8192 tokens, 16 heads (8 at D = 256), bf16; TFLOP/s done
    ("forward", 64): Tile(64, 128, 4, 3, Copies.OWN),  # 368; without TMA 348, 128 x 128 with 8 warps 255
    # 449, 1.02 to 1.07 times as fast with gates; without TMA 377, 128 x 64
    ("forward", 128): Tile(64, 64, 4, 3, Copies.OWN, gates_by_tma=True),
    ("forward", 256): Tile(128, 64, 8, 2, Copies.WALKED),  # with 8 warps 388: two small programs per processor overlap
    ("dq", 64): Tile(64, 128, 4, 2, Copies.WALKED),  # 424; without TMA 381
    ("dq", 96): Tile(64, 64, 4, 2),
    ("dq", 128): Tile(64, 64, 4, 3, Copies.OWN),  # 535; q and do in shared memory 481, 128 x 64 with 8 warps 524
    ("dq", 256): Tile(128, 32, 8, 2, Copies.WALKED),  # 398; 64 x 32 with 4 warps 280
    # 397 with k and v in shared memory, 1.09 times as fast so; 32 x 64 353
    ("dkdv", 64): Tile(64, 64, 4, 3, Copies.ALL),
    ("dkdv", 96): Tile(32, 128, 8, 3),
    # 487 with v in shared memory, 1.04 to 1.07 times as fast so; 64 x 64 spills
    ("dkdv", 128): Tile(32, 64, 4, 3, Copies.OWN),
    ("dkdv", 256): Tile(32, 64, 8, 2),
}
if triton_version() == (3, 8):  # it keeps more in shared memory: with three stages one program fits a multiprocessor
    HOPPER[("forward", 96)] = HOPPER["forward", 128]
    HOPPER |= dict.fromkeys([("forward", 128), ("dq", 128)], Tile(64, 64, 4, 2, Copies.WALKED))
# Never run: chosen for what they spill, compiled, at head dims 64 and 128, and for their loops' instructions and bytes
# of shared memory (tests/kernels/test_compile.py, kernels/LOG.md).
AMPERE = {  # A100
    ("forward", 64): Tile(128, 64, 8, 3),
    ("forward", 128): Tile(128, 64, 8, 2),
    ("forward", 256): Tile(64, 32, 8, 2),
    ("dq", 64): Tile(64, 64, 8, 2),
    ("dq", 96): Tile(64, 32, 4, 2),
    ("dq", 128): Tile(64, 64, 8, 2),
    ("dq", 256): Tile(32, 32, 8, 1),
    ("dkdv", 64): Tile(32, 128, 8, 2),
    ("dkdv", 96): Tile(32, 128, 8, 2, hoist=False),
    ("dkdv", 128): Tile(128, 32, 8, 2, hoist=False),
    ("dkdv", 256): Tile(32, 32, 8, 1),
}
BLACKWELL = AMPERE | {  # B200, whose own products need 64 keys
    ("dkdv", 64): Tile(32, 128, 8, 2, Copies.WALKED, hoist=False),
    ("dkdv", 128): Tile(64, 64, 8, 2, Copies.WALKED, hoist=False),
}
SMALL_SHARED = AMPERE | {  # 99 KB: RTX 30, 40 and 50
    ("forward", 64): Tile(128, 64, 8, 2),
    ("forward", 128): Tile(128, 32, 8, 2),
    ("forward", 256): Tile(64, 32, 8, 1),
    ("dq", 128): Tile(64, 32, 4, 2),
    ("dkdv", 64): Tile(64, 32, 4, 2),
    ("dkdv", 128): Tile(64, 32, 8, 2),
}
# float32 products run in full precision on the ordinary units, operands and sums in registers: small tiles.
FULL_PRECISION = {
    ("forward", 64): Tile(64, 32, 8, 1),
    ("forward", 128): Tile(32, 32, 8, 1),
    ("forward", 256): Tile(16, 32, 8, 1),
    ("dq", 64): Tile(32, 32, 8, 1),
    ("dq", 128): Tile(32, 16, 8, 1),
    ("dq", 256): Tile(16, 16, 8, 1),
    ("dkdv", 64): Tile(32, 32, 8, 1),
    ("dkdv", 128): Tile(16, 32, 8, 1),
    ("dkdv", 256): Tile(16, 16, 8, 1),
}


def split_head_dim(D: int) -> tuple[int, int]:
    """Return D as a power of two plus a remainder that a dot can take: 80 = 64 + 16, 192 = 128 + 64, 64 = 64 + 0."""
    whole = 1 << (D.bit_length() - 1)
    return whole, D - whole


def table_for(dtype: torch.dtype, capability: tuple[int, int]) -> dict:
    """Return the table of tiles for a dtype on an architecture given by its compute capability."""
    tables = {(8, 0): AMPERE, (9, 0): HOPPER, (10, 0): BLACKWELL, (10, 3): BLACKWELL}
    return FULL_PRECISION if dtype == torch.float32 else tables.get(capability, SMALL_SHARED)


def tile_for(kernel: str, D: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """Return the tile of a kernel ("forward", "dq" or "dkdv"); on a CPU (Triton's interpreter) a small one."""
    if device.type == "cpu":
        return Tile(32, 32, 4, 1)
    return row_for(kernel, D, table_for(dtype, capability(device)))


def row_for(kernel: str, D: int, table: dict) -> Tile:
    """Return a table's tile for a head dim: the row of the least head dim that is not smaller."""
    return table[kernel, min(row for name, row in table if name == kernel and row >= D)]
