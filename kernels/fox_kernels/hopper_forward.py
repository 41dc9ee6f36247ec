"""Launches the Gluon forward on Hopper, and says when it can't run (then the plain Triton kernels do)."""

import functools
import importlib.metadata
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .chunked import document_starts

LOG2_E = math.log2(math.e)
L2_BYTES = 24 << 20  # of the 50 MB: what one group of heads may keep there while its tiles are walked


class Shape(NamedTuple):
    """How the forward is cut: consumer warpgroups of 64 query rows, keys per step, stages, registers per thread."""

    columns: int  # of the head dim's first block
    rest: int  # of its second: 80 = 64 + 16, 96 = 64 + 32
    consumers: int
    keys: int
    stages: int
    ping_pong: bool
    bias_by_mma: bool  # the gates' bias as 16 more columns of k
    registers: int


SHAPES = {
    64: Shape(64, 0, 3, 128, 2, True, True, 160),
    80: Shape(64, 16, 2, 128, 2, True, True, 240),
    96: Shape(64, 32, 2, 128, 2, True, True, 240),
    128: Shape(128, 0, 2, 128, 2, True, True, 240),
}
# up to 4096 keys two consumers waste less at the diagonal: 319 against 284 TFLOP/s at 8 x 2048, D = 64 (kernels/LOG.md)
SHORT = {64: Shape(64, 0, 2, 128, 3, True, True, 240)}
SHORT_KEYS = 4096
MIN_QUERIES = 64  # one warpgroup's rows


@functools.cache
def processors(device: torch.device) -> int:
    """How many multiprocessors a GPU has: as many programs of a persistent kernel run at once."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def gluon_missing() -> str | None:
    """Return why this installation has no Gluon that the Hopper kernels were written for, or None."""
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "triton is not installed"
    major, minor = (int(x) for x in version.split(".")[:2])
    if (major, minor) != (3, 6):
        return f"triton {version} is not 3.6, whose Gluon the Hopper kernels are written for"
    return None


GLUON_MISSING = gluon_missing()  # not looked up while torch.compile traces


def unsupported(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float = 1.0,
    cu_seqlens: Tensor | None = None,
    seq_start: Tensor | None = None,
    window: int | None = None,
    sink: int = 0,
    softcap: float | None = None,
    prune: float | None = None,
    q_offset: int | None = None,
    c_offset: Tensor | None = None,
    causal: bool = True,
) -> str | None:
    """Return why the Hopper kernels can't run this problem, or None if they can."""
    if GLUON_MISSING is not None:
        return GLUON_MISSING
    if q.device.type != "cuda" or torch.cuda.get_device_capability(q.device) != (9, 0):
        return "the GPU is not a Hopper (compute capability 9.0)"
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype {q.dtype} is not bfloat16 or float16"
    if q.shape[-1] not in SHAPES:
        return f"head_dim {q.shape[-1]} is not one of {tuple(SHAPES)}"
    if scale <= 0:
        return f"scale {scale} is not positive"
    if softcap is not None:
        return "it has no softcap"
    if window is not None and sink > 0:
        return "it has no window together with sink tokens"
    if sink > 64:
        return f"sink {sink} is more than 64"
    if not causal or c_offset is not None or q_offset not in (None, k.shape[1] - q.shape[1]):
        return "it has causal attention with the queries last only"
    if q.shape[1] < MIN_QUERIES:
        return f"{q.shape[1]} queries are less than its tile of {MIN_QUERIES}"
    if 0 in q.shape:
        return "a dimension is 0"
    return None


def copyable(x: Tensor) -> Tensor:
    """Return x if TMA can read it (unit last stride, other strides and address multiples of 16 bytes), else a copy."""
    unit = 16 // x.element_size()
    strides_fit = all(n == 1 or (s % unit == 0 and s > 0) for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True))
    fits = x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and strides_fit
    return x if fits else x.contiguous()


class Blocks(NamedTuple):
    """A tensor to be copied by TMA in blocks; what a compiled kernel's launcher reads of a Gluon TensorDescriptor."""

    base: Tensor
    shape: list[int]
    strides: list[int]
    block: list[int]
    padding: str = "zero"

    def descriptor(self):
        """Return the Gluon TensorDescriptor, which carries the shared memory layout that compiling needs."""
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        dtype = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}[self.base.dtype]
        shared: Any = gl.NVMMASharedLayout  # Triton 3.9 types its constexpr functions as not callable
        layout = shared.get_default_for(self.block, dtype)
        return TensorDescriptor(self.base, self.shape, self.strides, self.block, layout)


def blocks_of(x: Tensor, rows: int, columns: int) -> Blocks:
    """Describe x (B, T, H, D) for TMA copies of blocks (1, rows, 1, columns)."""
    # a dimension of size 1 may carry any stride; TMA wants a valid one
    strides = [s if n > 1 else x.shape[-1] * x.shape[-2] for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True)]
    return Blocks(x, list(x.shape), [*strides, 1], [1, rows, 1, columns])


_compiled: dict = {}


def _kind(x):
    """Return what a kernel is specialised on in an argument."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if isinstance(x, Blocks):
        return x.base.dtype, *x.block
    return (x == 1, x % 16 == 0, x.bit_length() > 31) if isinstance(x, int) else type(x)


def launch(kernel, programs: int, arguments: list, constants: tuple) -> None:
    """Run a Triton or Gluon kernel of 4 warps on `programs` programs, arguments in order, constants last.

    Triton's own launcher spends 0.03 ms on a kernel and 0.1 ms and more on one with descriptors; here a kernel is
    recognised by all that it can be specialised on.
    """
    key = (kernel, torch.cuda.current_device(), tuple(map(_kind, arguments)), constants)
    compiled = _compiled.get(key)
    if compiled is None:
        described = [x.descriptor() if isinstance(x, Blocks) else x for x in arguments]
        _compiled[key] = kernel[(programs,)](*described, *constants, num_warps=4)
    else:
        compiled[(programs, 1, 1)](*arguments, *constants)


def visible_from(B: int, S: int, cu_seqlens, seq_start, window, device) -> Tensor | None:
    """Return (B, S) int32, the first key that the query at each position sees, or None where that is 0 for all."""
    if cu_seqlens is None and seq_start is None and window is None:
        return None
    start = document_starts(B, S, cu_seqlens, seq_start, device)
    if window is not None:
        start = torch.maximum(start, torch.arange(1 - window, S + 1 - window, device=device))
    return start.to(torch.int32).contiguous()


def heads_per_group(bytes_per_head: int) -> int:
    """How many heads' tiles to walk together, so that what they share fits the L2 cache: a power of two, 4 at least."""
    return max(4, 1 << (L2_BYTES // bytes_per_head).bit_length() >> 1)


def launch_forward(
    q, k, v, c_hi, c_lo, *, scale, cu_seqlens=None, seq_start=None, window=None, sink=0, softcap=None, prune=None,
    q_offset=None, c_offset=None, causal=True, residual=None, bounds=None, shape: Shape | None = None,
):  # fmt: skip
    """Return o (B, T, H, D) and lse2 (B, H, T), the base-2 log-sum-exp with c_i - c_j inside, -inf for empty rows.

    q (B, T, H, D), k, v (B, S, Hkv, D) bf16 or fp16: read through TMA in place if their last stride is 1 and the others
    are multiples of 16 bytes, else copied. c_hi + c_lo (B, H, S) is c * log2(e) in two floats. residual, if given
    (contiguous, like o), takes what rounding o lost; bounds is what `prune.loop_bounds` returns, if that is known.
    Raises ValueError for what `unsupported` names.
    """
    from .hopper_forward_kernel import fox_forward

    reason = unsupported(
        q,
        k,
        v,
        scale=scale,
        window=window,
        sink=sink,
        softcap=softcap,
        q_offset=q_offset,
        c_offset=c_offset,
        causal=causal,
    )
    if reason is not None:
        raise ValueError(f"the Hopper kernel can't run this: {reason}; use the Triton kernels")
    (B, T, H, D), (S, Hkv) = q.shape, k.shape[1:3]
    if shape is None:
        shape = SHORT[D] if D in SHORT and S <= SHORT_KEYS else SHAPES[D]
    q, k, v = copyable(q), copyable(k), copyable(v)
    o = torch.empty(B, T, H, D, dtype=q.dtype, device=q.device)
    lse2 = torch.empty(B, H, T, dtype=torch.float32, device=q.device)
    start = visible_from(B, S, cu_seqlens, seq_start, window, q.device)
    first = bounds
    if prune is not None and first is None:
        from .prune import loop_bounds

        first = loop_bounds(q, k, c_hi, c_lo, scale, None, prune)
    counter = torch.zeros(1, dtype=torch.int32, device=q.device)
    tiles = -(-T // (64 * shape.consumers))
    group = heads_per_group(2 * S * D * q.element_size()) * (H // Hkv)
    copied = ((q, 64), (k, shape.keys), (v, shape.keys), (o, 64), (o if residual is None else residual, 64))
    described = [blocks_of(x, rows, shape.columns) for x, rows in copied]
    rest = [blocks_of(x, rows, shape.rest) if shape.rest else counter for x, rows in copied]
    programs = min(tiles * B * H, processors(q.device))
    with torch.cuda.device(q.device):
        arguments = [
            *described, *rest, c_hi, c_lo, lse2, counter if start is None else start,
            counter if first is None else first, counter, scale * LOG2_E, T, S, H, H // Hkv, tiles, B * H, group,
        ]  # fmt: skip
        constants = (
            start is not None, first is not None, sink, shape.consumers, shape.keys, shape.columns, shape.rest,
            shape.stages, shape.ping_pong, shape.bias_by_mma, residual is not None, shape.registers,
        )  # fmt: skip
        launch(fox_forward, programs, arguments, constants)
    return o, lse2
