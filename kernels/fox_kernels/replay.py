"""Calls of one kind run again from a tape of the first: memory is allocated, addresses put in, kernels launched in C.

What a kernel is launched with, and how, costs the host more than a short problem costs the GPU, and is the same for all
calls of a kind (`kinds`) but for addresses. So the first call is watched: the kernels it launches, the memory it
allocates, and that it does nothing else. Calls that do have no tape, and run as ever.
"""

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

aten = torch.ops.aten
ALLOCATIONS = frozenset((aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default))
ALIGNMENT = 512  # of what is cut out of one allocation, as of allocations of their own

calls: dict[tuple | None, Any] = {}  # by kind, what takes q, k, v, log_f, cu_seqlens, seq_start and returns o, or None
_watching = threading.local()


class Launched(NamedTuple):
    """One launch written out: the launch in C and its arguments, tensors in place and 0 for the stream."""

    go: Any
    arguments: list
    stream: int  # its place among them
    descriptors: list[tuple[int, Tensor, tuple]]  # place, tensor copied by TMA, what fills it and how

    def tensors(self) -> list[Tensor]:
        return [x for x in self.arguments if isinstance(x, Tensor)] + [x for _, x, _ in self.descriptors]


def note(run, grid: tuple, copied: tuple, arguments: tuple | None) -> None:
    """Tell the tape of this thread, if one is running, of a launch; arguments None: of one that can't be repeated."""
    tape = getattr(_watching, "tape", None)
    if tape is not None:
        tape.launches.append(None if arguments is None else run.written_out(grid, copied, arguments))


class Tape(TorchDispatchMode):
    """Sees what happens in a with block: launches, allocations, and whether there was anything else.

    It is pushed on its thread's stack of modes directly: torch notes in the process that a mode is on, and two threads
    whose modes don't end in turn would leave that note, and other threads' calls would find it.
    """

    def __init__(self):
        super().__init__()
        self.launches: list[Launched | None] = []
        self.made: list[Tensor] = []  # kept, so that no two of them had one address
        self.others = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to say so, torch would import its compiler: seconds, for nothing that is compiled

    def __enter__(self):
        self.around = getattr(_watching, "tape", None)  # a call that a finaliser makes
        _watching.tape = self
        _push_mode(self)
        return self

    def __exit__(self, *exception):
        _pop_mode()
        _watching.tape = self.around

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in ALLOCATIONS:
            self.made.append(out)
        elif not func.is_view:
            self.others = True
        return out


def storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def end_of(sizes: list[int]) -> list[int]:
    """Return where parts of these sizes begin, one behind another, and where the last one ends."""
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
    return ends


class Replay:
    """What a tape has recorded, for other tensors of the same kinds.

    inputs are the tensors the call was given; results those it returned: the first `apart` of them are allocated one
    by one, the others cut out of one allocation. Raises LookupError for what can't be repeated.
    """

    def __init__(self, tape: Tape, inputs: tuple[Tensor, ...], results: tuple[Tensor | None, ...], apart: int):
        launches = [x for x in tape.launches if x is not None]
        if tape.others or len(launches) < len(tape.launches):
            raise LookupError("more happened than launches of known kernels")
        made = {storage(x): x for x in tape.made}
        for x in results:
            whole = x is None or (x.nbytes == x.untyped_storage().nbytes() > 0 and x.is_contiguous())
            if x is not None and not (whole and storage(x) in made):
                raise LookupError("a result is not a whole allocation")
        self.inputs, self.device = len(inputs), inputs[0].device
        self.apart = [(x.shape, x.dtype) for x in results[:apart] if x is not None]
        kept = [x for x in results[apart:] if x is not None]
        self.kept = [None if x is None else (x.shape, x.dtype) for x in results[apart:]]
        own = {storage(x) for x in results if x is not None}
        read = [x for launched in launches for x in launched.tensors()]
        used = dict.fromkeys(map(storage, read))
        scratch = [made[at] for at in used if at in made and at not in own]
        self.kept_ends = end_of([x.nbytes for x in kept])
        scratch_ends = end_of([x.untyped_storage().nbytes() for x in scratch])
        self.scratch = scratch_ends[-1]

        base = len(inputs) + len(self.apart)
        places = {storage(x): (len(inputs) + i, 0) for i, x in enumerate(results[:apart]) if x is not None}
        places |= {storage(x): (base, at) for x, at in zip(kept, self.kept_ends, strict=False)}
        places |= {storage(x): (base + 1, at) for x, at in zip(scratch, scratch_ends, strict=False)}
        given = [storage(x) for x in inputs]

        def place(x: Tensor) -> tuple[int, int]:
            for i, y in enumerate(inputs):
                if x is y:
                    return i, 0
            at = storage(x)
            if at in places:
                slot, offset = places[at]
                return slot, offset + x.data_ptr() - at
            if given.count(at) != 1:
                raise LookupError("a kernel reads a tensor that is neither given nor made")
            return given.index(at), x.data_ptr() - inputs[given.index(at)].data_ptr()

        self.launches = []
        for launched in launches:
            patches = [(i, *place(x)) for i, x in enumerate(launched.arguments) if isinstance(x, Tensor)]
            fills = [(i, *place(x), how) for i, x, how in launched.descriptors]
            template = [None if isinstance(x, Tensor) else x for x in launched.arguments]
            self.launches.append((launched.go, template, launched.stream, patches, fills))

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """Return the results: those apart, and one uint8 tensor that holds the others, if there are any."""
        device = self.device
        results = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self.apart]
        addresses = [x.data_ptr() for x in inputs]
        addresses += [x.data_ptr() for x in results]
        if self.kept_ends[-1]:
            kept = torch.empty(self.kept_ends[-1], dtype=torch.uint8, device=device)
            results.append(kept)
            addresses.append(kept.data_ptr())
        else:
            addresses.append(0)
        if self.scratch:
            scratch = torch.empty(self.scratch, dtype=torch.uint8, device=device)
            addresses.append(scratch.data_ptr())
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        for go, template, place, patches, fills in self.launches:
            arguments = template.copy()
            arguments[place] = stream
            for i, slot, offset in patches:
                arguments[i] = addresses[slot] + offset
            for i, slot, offset, (fill, how) in fills:
                arguments[i] = fill(addresses[slot] + offset, *how)
            go(*arguments)
        return results

    def parts(self, kept: Tensor) -> list[Tensor | None]:
        """Return the results that a call has put into one tensor."""
        if not kept.is_contiguous() or kept.storage_offset() % ALIGNMENT:  # hooks have turned or moved it
            kept = kept.clone(memory_format=torch.contiguous_format)
        parts, ends = [], iter(self.kept_ends)
        for x in self.kept:
            if x is None:
                parts.append(None)
                continue
            (shape, dtype), at = x, next(ends)
            parts.append(kept[at : at + shape.numel() * dtype.itemsize].view(dtype).view(shape))
        return parts

    def packed(self, results: Sequence[Tensor | None]) -> Tensor:
        """Return results, found in another way, in one tensor as a call puts them."""
        kept = torch.empty(self.kept_ends[-1], dtype=torch.uint8, device=self.device)
        for x, part in zip(results, self.parts(kept), strict=True):
            if x is not None and part is not None:
                part.copy_(x)
        return kept


def recorded(tape: Tape, inputs: tuple[Tensor, ...], results: tuple[Tensor | None, ...], apart: int) -> Replay | None:
    """Return what repeats a tape, or None where that can't be done."""
    try:
        return Replay(tape, inputs, results, apart)
    except LookupError:
        return None
