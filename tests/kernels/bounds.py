"""In Triton's interpreter: kernels that touch memory outside the tensors which they were given fail."""

import contextlib
from collections.abc import Iterable, Iterator
from unittest import mock

import numpy as np
import torch
from triton.runtime import interpreter


def extent(x: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte of x and of the one behind its last."""
    elements = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + elements * x.element_size()


def tensors_in(arguments: Iterable) -> Iterator[torch.Tensor]:
    """Yield the tensors among a kernel's arguments, in groups and descriptors too."""
    for x in arguments:
        if isinstance(x, tuple):
            yield from tensors_in(x)
        elif isinstance(tensor := getattr(x, "base", x), torch.Tensor):
            yield tensor


@contextlib.contextmanager
def enforced() -> Iterator[None]:
    """Let loads and stores raise AssertionError whose address, where not masked, lies in no argument of the kernel."""
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, run = builder.create_masked_load, builder.create_masked_store, executor.__call__
    firsts, ends = np.zeros(0, np.int64), np.zeros(0, np.int64)

    def check(pointers, mask) -> None:
        at = pointers.data[np.broadcast_to(mask.data, pointers.data.shape).astype(bool)].astype(np.int64)
        size = pointers.get_element_ty().primitive_bitwidth // 8
        tensor = np.searchsorted(firsts, at, side="right") - 1
        assert ((tensor >= 0) & (at + size <= ends[tensor])).all(), "a kernel left its tensors"

    def checked_load(self, pointers, mask, *rest, **named):
        check(pointers, mask)
        return load(self, pointers, mask, *rest, **named)

    def checked_store(self, pointers, value, mask, *rest, **named):
        check(pointers, mask)
        return store(self, pointers, value, mask, *rest, **named)

    def checked_run(self, *args, **kwargs):
        nonlocal firsts, ends
        extents = sorted(extent(x) for x in tensors_in((*args, *kwargs.values())) if x.numel())
        firsts = np.array([first for first, _ in extents])
        ends = np.maximum.accumulate([end for _, end in extents])  # of views, some lie within others
        return run(self, *args, **kwargs)

    with (
        mock.patch.object(builder, "create_masked_load", checked_load),
        mock.patch.object(builder, "create_masked_store", checked_store),
        mock.patch.object(executor, "__call__", checked_run),
    ):
        yield
