"""Launching Triton kernels at little cost to the host, and describing tensors for copies by TMA.

Triton's own launcher looks at every argument anew: some 0.05 ms for a kernel of fifty, more with descriptors among
them, which is longer than a short problem runs. Here a kernel is recognised by all that it can be specialised on.
"""

# What a launched kernel is, Triton doesn't declare: pyright: reportAttributeAccessIssue=false, reportIndexIssue=false

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from .tiles import capability

_compiled: dict = {}


def of_tensor(x: torch.Tensor):
    return x.dtype, x.data_ptr() % 16 == 0


def of_descriptor(x: TensorDescriptor):
    return x.base.dtype, *x.block_shape


def of_int(x: int) -> int:
    return (x == 1) + 2 * (x % 16 == 0) + 4 * (not -(2**31) <= x < 2**31)


def of_other(x):
    return of_tensor(x) if isinstance(x, torch.Tensor) else type(x)


# What a kernel may be specialised on in an argument that is no constant, by the argument's type.
KIND = {torch.Tensor: of_tensor, TensorDescriptor: of_descriptor, int: of_int}


def launch(kernel, grid: tuple, arguments: tuple, constants: tuple, *, warps: int = 4, stages: int = 3) -> None:
    """Run a kernel on a grid of programs of the current device; arguments in order, constants last."""
    if not isinstance(kernel, triton.JITFunction):  # interpreted
        kernel[grid](*arguments, *constants)
        return
    key = (
        kernel,
        torch.cuda.current_device(),
        tuple([KIND.get(type(x), of_other)(x) for x in arguments]),
        constants,
        warps,
        stages,
    )
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[grid](*arguments, *constants, num_warps=warps, num_stages=stages)
    else:
        compiled[(*grid, 1, 1)[:3]](*arguments, *constants)


def cdiv(n: int, size: int) -> int:
    """Return n / size, rounded up; Triton's own, made for kernels too, takes the host ten times as long."""
    return -(-n // size)


def describable(*tensors: torch.Tensor) -> bool:
    """Return whether TMA can copy from these: the GPU has it, strides and addresses are multiples of 16 bytes."""
    if tensors[0].device.type != "cuda" or capability(tensors[0].device)[0] < 9:
        return False
    unit = 16 // tensors[0].element_size()
    return all(
        x.data_ptr() % 16 == 0
        and x.stride(-1) == 1
        and all(n == 1 or (s > 0 and s % unit == 0) for n, s in zip(x.shape[:-1], x.stride(), strict=False))
        for x in tensors
    )


def source(x: torch.Tensor, rows: int, tma: int | bool):
    """Return x (B, T, H, D) itself or, with tma, described for copies of blocks (1, rows, 1, D)."""
    if not tma:
        return x
    whole = x.shape[-1] * x.shape[-2]  # a dimension of size 1 may carry any stride; TMA wants a valid one
    strides = [s if n > 1 else whole for n, s in zip(x.shape[:-1], x.stride(), strict=False)]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, rows, 1, x.shape[-1]])
