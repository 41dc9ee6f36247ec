"""Gluon's names that differ from one Triton to another, 3.6 to 3.9, under one name each."""

from triton._C.libtriton import ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma


@builtin
def _reduce_add(descriptor, coordinates, source, _semantic=None):
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, source.handle
    )


# each time the former since Triton
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # 3.7
tma_reduce_add = getattr(tma, "async_atomic_add", _reduce_add)  # 3.8
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # 3.8
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global  # 3.8
