"""Gluon's names that differ between Triton 3.6 and 3.9, under one name each."""

from triton._C.libtriton import ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

from ..host.device import triton_version

LATER = (triton_version() or (0, 0)) >= (3, 9)


@builtin
def _reduce_add(descriptor, coordinates, source, _semantic=None):
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, source.handle
    )


thread_barrier = gl.barrier if LATER else gl.thread_barrier
tma_reduce_add = tma.async_atomic_add if LATER else _reduce_add  # before, libtriton alone had it
tma_load = tma.async_load if LATER else tma.async_copy_global_to_shared
tma_store = tma.async_store if LATER else tma.async_copy_shared_to_global
