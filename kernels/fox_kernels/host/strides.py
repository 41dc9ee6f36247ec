"""Which tensors kernels read in place, which are copied first, and descriptors for copies by TMA."""

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from .device import capability


def unit_last(x: torch.Tensor) -> torch.Tensor:
    """Return x (B, T, H, D) itself if kernels can address it, else a contiguous copy.

    They can if its last stride is 1 and a tile's rows are less than 2^31 elements apart (a stride below 2^23).
    """
    readable = (x.stride(-1) == 1 or x.shape[-1] == 1) and (x.stride(1) < 1 << 23 or x.shape[1] == 1)
    return x if readable else x.contiguous()


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Return x (B, T, H, D) itself if the tiles' products can take its rows, else a copy: the only copy of an input.

    float32 accepts any layout that `unit_last` accepts; 16 bits need an address that is a multiple of 16 bytes and
    other strides that are multiples of 16 elements. Triton 3.6 loads other rows element by element, and on Hopper
    multiplied them wrongly at head dims in two blocks: o, dq off by half, or an illegal access (80 and 96, H200,
    tests/kernels/test_gpu.py).
    """
    x = unit_last(x)
    fits = x.data_ptr() % 16 == 0 and all(stride % 16 == 0 for stride in x.stride()[:-1])
    return x if fits or x.element_size() > 2 else x.clone(memory_format=torch.contiguous_format)


def fits_tma(x: torch.Tensor) -> bool:
    """Return whether TMA can read x: a unit last stride, other strides and the address multiples of 16 bytes."""
    unit = 16 // x.element_size()
    strides_fit = all(n == 1 or (s > 0 and s % unit == 0) for n, s in zip(x.shape[:-1], x.stride(), strict=False))
    return x.data_ptr() % 16 == 0 and x.stride(-1) == 1 and strides_fit


def describable(*tensors: torch.Tensor) -> bool:
    """Return whether the tensors' GPU has TMA, and it can read them."""
    device = tensors[0].device
    return device.type == "cuda" and capability(device)[0] >= 9 and all(map(fits_tma, tensors))


def tma_strides(x: torch.Tensor) -> list[int]:
    """Return the strides of x (B, T, H, D); a dimension of size 1, which may carry any stride, gets a valid one."""
    whole = x.shape[-1] * x.shape[-2]
    return [*(s if n > 1 else whole for n, s in zip(x.shape[:-1], x.stride(), strict=False)), 1]


def source(x: torch.Tensor, rows: int, tma: int | bool):
    """Return x (B, T, H, D) itself or, with tma, described for copies of blocks (1, rows, 1, D)."""
    return TensorDescriptor(x, list(x.shape), tma_strides(x), [1, rows, 1, x.shape[-1]]) if tma else x
