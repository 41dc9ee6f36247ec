"""Launches the Gluon forward on Hopper, and says when it can't run (then the plain Triton kernels do)."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..common.blocks import LOG2_E
from ..common.edges import edges
from ..common.groups import Gates
from ..common.horizon import found_edges
from ..host.device import KNOWN_TRITON, processors, triton_version
from ..host.launch import Runner, names_of
from ..host.strides import fits_tma, tma_strides
from ..options import ONE_DOCUMENT, Documents, Options

L2_BYTES = 24 << 20  # of the 50 MB, for one group of heads while its tiles are walked


class Shape(NamedTuple):
    """How the forward is cut: consumer warpgroups of 64 query rows, keys per step, stages, registers per thread."""

    columns: int  # of the head dim's first block
    rest: int  # of its second: 80 = 64 + 16, 96 = 64 + 32
    consumers: int
    keys: int
    stages: int
    registers: int


SHAPES = {
    64: Shape(64, 0, 3, 128, 2, 160),
    80: Shape(64, 16, 2, 128, 2, 240),
    96: Shape(64, 32, 2, 128, 2, 240),
    128: Shape(128, 0, 2, 128, 2, 240),
    256: Shape(256, 0, 2, 64, 2, 240),
}
# up to 4096 keys two consumers waste less at the diagonal: 319 against 284 TFLOP/s, 8 x 2048, D = 64 (kernels/LOG.md);
# with documents, padding or a window at any length: 1.8 times as fast for documents of 2048, 1.3 for 8192
SHORT = {64: Shape(64, 0, 2, 128, 3, 240)}
SHORT_KEYS = 4096
MIN_QUERIES = 64  # one warpgroup's rows
LEAST_SCALE = 1e-20  # to 1e20: the decay is divided by it, which must stay in float32's range


def gluon_missing() -> str | None:
    """Return why this installation's Gluon is none with which the Hopper kernels run, or None."""
    version = triton_version()
    if version in KNOWN_TRITON:
        return None
    if version is None:
        return "triton is not installed"
    return f"triton {version[0]}.{version[1]} is not 3.6 to 3.9, with which the Hopper kernels have been run"


GLUON_MISSING = gluon_missing()  # not looked up while torch.compile traces


def unsupported(q: Tensor, options: Options) -> str | None:
    """Return why the Hopper kernels can't run this problem on a Hopper GPU, or None if they can."""
    scale, window, sink, softcap, _ = options
    if GLUON_MISSING is not None:
        return GLUON_MISSING
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype {q.dtype} is not bfloat16 or float16"
    if q.shape[-1] not in SHAPES:
        return f"head_dim {q.shape[-1]} is not one of {tuple(SHAPES)}"
    if not LEAST_SCALE <= scale <= 1 / LEAST_SCALE:
        return f"scale {scale} is not between {LEAST_SCALE} and {1 / LEAST_SCALE}"
    if softcap is not None:
        return "it has no softcap"
    if sink > 0 and window is not None:
        return "it has no window together with sink tokens"
    if sink > 64:
        return f"sink {sink} is more than 64"
    if q.shape[1] < MIN_QUERIES:
        return f"{q.shape[1]} queries are less than its tile of {MIN_QUERIES}"
    if 0 in q.shape:
        return "a dimension is 0"
    return None


def copyable(x: Tensor) -> Tensor:
    """Return x if TMA can read it, else a copy."""
    return x if fits_tma(x) else copied(x)


def copied(x: Tensor) -> Tensor:
    """Return a copy for TMA to read; Tensor.contiguous() returns a contiguous tensor at an odd address unchanged."""
    return x.clone(memory_format=torch.contiguous_format)


FOUR_WARPS = {"num_warps": 4, "enable_fp_fusion": True}  # Triton 3.10 will fuse multiply-adds only when told


class Blocks(NamedTuple):
    """A tensor to be copied by TMA in blocks."""

    base: Tensor
    shape: list[int]
    strides: list[int]
    block: list[int]

    def descriptor(self):
        """Return the Gluon TensorDescriptor, which carries the shared memory layout that compiling needs."""
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        dtype = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}[self.base.dtype]
        shared: Any = gl.NVMMASharedLayout  # Triton 3.9 types its constexpr functions as not callable
        layout = shared.get_default_for(self.block, dtype)
        return TensorDescriptor(self.base, self.shape, self.strides, self.block, layout)


def blocks_of(x: Tensor, rows: int, columns: int, contiguous: bool = False) -> Blocks:
    """Describe x (B, T, H, D), or a contiguous tensor of its shape, for TMA copies of (1, rows, 1, columns)."""
    if contiguous:
        _, T, H, D = x.shape
        return Blocks(x, list(x.shape), [T * H * D, H * D, D, 1], [1, rows, 1, columns])
    return Blocks(x, list(x.shape), tma_strides(x), [1, rows, 1, columns])


class Launch:
    """A kernel of 4 warps as one kind of problem launches it; its first arguments are tensors copied by TMA.

    The first call compiles it. Later ones cost the host a description of each of those tensors and the launch.
    """

    def __init__(self, kernel, programs: int, constants: dict, blocks: Sequence[Blocks | None] = ()):
        self.kernel, self.programs, self.run = kernel, programs, None
        names, of_constants = names_of(kernel)
        self.constants = tuple([constants[n] for n in of_constants])
        self.described = tuple([x and x[1:] for x in blocks])
        self.names = names[len(self.described) :]

    def __call__(self, *copied: Tensor | None, **named) -> None:
        arguments = tuple([named[n] for n in self.names])
        if self.run is not None:
            self.run((self.programs, 1, 1), copied, arguments)
        else:
            blocks = [how and Blocks(x, *how).descriptor() for x, how in zip(copied, self.described, strict=True)]
            compiled = self.kernel[(self.programs,)](*blocks, *arguments, *self.constants, **FOUR_WARPS)
            self.run = Runner(compiled, self.constants, self.described)


def alignment(*tensors: Tensor | None) -> tuple:
    """Return how far each address is from a multiple of 16 bytes."""
    return tuple([0 if x is None else x.data_ptr() % 16 for x in tensors])


def remembered(plans: dict, key: tuple, plan):
    """Store plan under key and return it; at 4096 plans all are forgotten, so that memory stays bounded."""
    if len(plans) >= 4096:
        plans.clear()
    plans[key] = plan
    return plan


def heads_per_group(bytes_per_head: int) -> int:
    """How many heads' tiles to walk together, so that their keys fit the L2 cache: a power of two, 4 at least."""
    return max(4, 1 << (L2_BYTES // bytes_per_head).bit_length() >> 1)


def halved(shape: Shape, T: int, S: int) -> bool:
    """Return whether the first of two consumers' rows see only half of the key block with their diagonal.

    4 % of 8 x 2048 at D = 64; not at D = 128, where it gained nothing.
    """
    return (shape.columns, shape.rest) == (64, 0) and 64 * shape.consumers == shape.keys == 128 and (S - T) % 128 == 0


class ForwardCut(NamedTuple):
    """Constants of the kernel: the problem's edges, sinks and offset, and the `Shape`."""

    HAS_START: int  # `edge_kind`
    SINK: int
    NC: int
    BN: int
    D: int
    DX: int
    NB: int
    ACROSS: bool  # queries and keys are offset by other than whole warpgroups' rows
    HALF: bool  # `halved`
    REGISTERS: int


class ForwardPlan(NamedTuple):
    """How to launch a forward; the same for all calls with tensors of one kind."""

    launch: Launch
    copies: tuple[bool, ...]  # of q, k, v: TMA can't read them in place
    numbers: dict
    rest: bool  # a second block of the head dim


_plans: dict[tuple, ForwardPlan] = {}


def plan_forward(q: Tensor, k: Tensor, v: Tensor, constants: tuple) -> ForwardPlan:
    """Return how to launch the forward; constants are (`edge_kind`, sink, residual)."""
    from .forward_kernel import fox_forward

    (B, T, H, D), (S, Hkv) = q.shape, k.shape[1:3]
    started, sink, residual = constants
    shape = SHORT[D] if D in SHORT and (started or S <= SHORT_KEYS) else SHAPES[D]
    given, (q, k, v) = (q, k, v), (copyable(q), copyable(k), copyable(v))
    tiles = -(-T // (64 * shape.consumers))
    group = heads_per_group(2 * S * D * q.element_size()) * (H // Hkv)
    by_tma = ((q, 64, False), (k, shape.keys, False), (v, shape.keys, False), (q, 64, True))  # o is like q
    blocks: list[Blocks | None] = []
    for columns in (shape.columns, shape.rest):
        here = [blocks_of(x, rows, columns, like) if columns else None for x, rows, like in by_tma]
        blocks += [*here, here[-1] if residual else None]
    cut = ForwardCut(
        HAS_START=started, SINK=sink, NC=shape.consumers, BN=shape.keys, D=shape.columns, DX=shape.rest,
        NB=shape.stages, ACROSS=(S - T) % 64 > 0, HALF=halved(shape, T, S), REGISTERS=shape.registers,
    )  # fmt: skip
    launch = Launch(fox_forward, min(tiles * B * H, processors(q.device)), {"CUT": cut}, blocks)
    copies = tuple(x is not y for x, y in zip(given, (q, k, v), strict=True))
    numbers = {"T": T, "S": S, "H": H, "KV_GROUP": H // Hkv, "num_m": tiles, "num_bh": B * H, "group": group}
    return ForwardPlan(launch, copies, numbers, shape.rest > 0)


def edge_kind(options: Options, documents: Documents) -> int:
    """Return the kernels' HAS_START: 2 for edges per head (a horizon), 1 per sequence (documents, windows), else 0."""
    bounded = not (options.window is None and all(x is None for x in documents[:3]))
    return int(bounded) if options.horizon is None else 2


def origins_of(k, options: Options, documents: Documents) -> Tensor | None:
    """Return the edges of documents alone, for sinks beyond a horizon; None where sequences are one document each."""
    if options.horizon is None or options.sink == 0:
        return None
    return edges(k.shape[0], k.shape[1], documents.cu_seqlens, documents.seq_start, None, k.device)


def launch_forward(
    q, k, v, c_hi, c_lo, options: Options, documents: Documents = ONE_DOCUMENT, *, residual: Tensor | None = None,
    counter: Tensor | None = None, out: Tensor | None = None,
):  # fmt: skip
    """Return o (B, T, H, D) and lse2 (B, H, T), the base-2 log-sum-exp with c_i - c_j inside, -inf for empty rows.

    q (B, T, H, D), k, v (B, S, Hkv, D) bf16 or fp16: read through TMA in place if their last stride is 1 and the others
    are multiples of 16 bytes, else copied. c_hi + c_lo (B, H, S) is c * log2(e) in two floats. residual, if given
    (contiguous, like o), takes the rounding error of o; counter is one int32 0, if there is one; out, contiguous and at
    a multiple of 16 bytes, becomes o. Only where `unsupported` returns None.
    """
    constants = (edge_kind(options, documents), options.sink, residual is not None)
    origins = origins_of(k, options, documents)
    strides = (q.stride(), k.stride(), v.stride())
    key = (q.shape, k.shape, strides, q.dtype, q.device, alignment(q, k, v, c_hi, c_lo), constants, origins is None)
    plan = _plans.get(key)
    if plan is None:
        plan = remembered(_plans, key, plan_forward(q, k, v, constants))
    if any(plan.copies):
        q, k, v = (copied(x) if copy else x for x, copy in zip((q, k, v), plan.copies, strict=True))
    B, T, H, _ = q.shape
    starts = found_edges(c_hi, c_lo, T, options, documents, per_head=True).edges
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    lse2 = torch.empty(B, H, T, dtype=torch.float32, device=q.device)
    if counter is None:
        counter = torch.zeros(1, dtype=torch.int32, device=q.device)
    by_tma = (q, k, v, o, residual)
    plan.launch(
        *by_tma, *(by_tma if plan.rest else [None] * 5), c=Gates(c_hi, c_lo), lse=lse2,
        start=None if starts is None else starts[0], origin=None if origins is None else origins[0], counter=counter,
        scale=options.scale * LOG2_E, **plan.numbers,
    )  # fmt: skip
    return o, lse2
