"""Tile shapes of the plain Triton kernels: rows of a table, by kernel, head dim, dtype and architecture."""

from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """Queries x keys per step, warps and pipeline stages of one program."""

    block_m: int
    block_n: int
    warps: int
    stages: int


# (kernel, head dim) -> Tile for 16-bit inputs. Shared memory: Hopper 227 KB, Ampere 163 KB, Ada and small Blackwell 99 KB.
HOPPER = {  # each the fastest of those tried on an H200 at 2 x 8192 tokens, 16 heads (8 at D = 256), bf16
    ("forward", 64): Tile(64, 128, 4, 3),  # 345 TFLOP/s; 128 x 64 with 4 warps 309, 128 x 128 with 8 warps 214
    ("forward", 96): Tile(64, 64, 4, 3),  # 317; 128 x 64 with 8 warps 294
    ("forward", 128): Tile(64, 64, 4, 3),  # 385; 128 x 64 with 8 warps 366, 128 x 128 with 8 warps 306: two small
    ("forward", 256): Tile(128, 64, 8, 2),  # programs per processor overlap one's products with the other's softmax
    ("dq", 64): Tile(64, 128, 4, 2),
    ("dq", 96): Tile(64, 64, 4, 2),
    ("dq", 128): Tile(128, 32, 8, 3),
    ("dq", 256): Tile(128, 32, 8, 1),
    ("dkdv", 64): Tile(32, 64, 4, 3),
    ("dkdv", 96): Tile(32, 128, 8, 3),
    ("dkdv", 128): Tile(32, 128, 8, 3),
    ("dkdv", 256): Tile(32, 64, 8, 2),
}
AMPERE = {
    ("forward", 64): Tile(128, 64, 4, 3),
    ("forward", 128): Tile(128, 64, 8, 2),
    ("forward", 256): Tile(64, 32, 8, 2),
    ("dq", 64): Tile(64, 64, 4, 2),
    ("dq", 128): Tile(64, 64, 8, 2),
    ("dq", 256): Tile(32, 32, 8, 1),
    ("dkdv", 64): Tile(64, 64, 4, 2),
    ("dkdv", 128): Tile(64, 64, 8, 2),
    ("dkdv", 256): Tile(32, 32, 8, 1),
}
SMALL_SHARED = {  # 99 KB
    ("forward", 64): Tile(128, 64, 4, 2),
    ("forward", 128): Tile(64, 64, 4, 2),
    ("forward", 256): Tile(64, 32, 8, 1),
    ("dq", 64): Tile(64, 64, 4, 2),
    ("dq", 128): Tile(64, 32, 4, 2),
    ("dq", 256): Tile(32, 32, 8, 1),
    ("dkdv", 64): Tile(64, 64, 4, 2),
    ("dkdv", 128): Tile(32, 64, 4, 2),
    ("dkdv", 256): Tile(32, 32, 8, 1),
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
    """Return D as a power of two plus a remainder that a dot can take: 80 = 64 + 16, 96 = 64 + 32, others D + 0."""
    return (64, D - 64) if D in (80, 96) else (D, 0)


def table_for(dtype: torch.dtype, capability: tuple[int, int]) -> dict:
    """Return the table of tiles for a dtype on an architecture given by its compute capability."""
    if dtype == torch.float32:
        return FULL_PRECISION
    if capability[0] == 9:
        return HOPPER
    return AMPERE if capability in ((8, 0), (10, 0), (10, 3)) else SMALL_SHARED


def tile_for(kernel: str, D: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """Return the tile of a kernel ("forward", "dq" or "dkdv"); on a CPU (Triton's interpreter) a small one."""
    if device.type == "cpu":
        return Tile(32, 32, 4, 1)
    return row_for(kernel, D, table_for(dtype, torch.cuda.get_device_capability(device)))


def row_for(kernel: str, D: int, table: dict) -> Tile:
    """Return a table's tile for a head dim: the row of the least head dim that is not smaller."""
    return table[kernel, min(row for name, row in table if name == kernel and row >= D)]
