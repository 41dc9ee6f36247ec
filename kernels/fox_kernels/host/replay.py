"""Repeats a call from a tape of the first call of its kind: allocate memory, put in addresses, launch the kernels in C.

Preparing launches costs the host more time than a short problem takes on the GPU, and all calls of a kind (`kinds`)
prepare the same, except for addresses. The tape records the kernels that the first call launches and the memory that it
allocates. A call that does anything else has no tape and runs in the usual way.
"""

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

aten = torch.ops.aten
ALLOCATIONS = frozenset((aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default))
ALIGNMENT = 512  # bytes; as torch aligns separate allocations

calls: dict[tuple | None, Any] = {}  # kind -> `calls.Call`; None: it can't be replayed
_watching = threading.local()


class Launched(NamedTuple):
    """One launch written out: the launch in C and its arguments, tensors in place and 0 for the stream."""

    go: Any
    arguments: list
    stream: int  # its place among them
    descriptors: list[tuple[int, Tensor, tuple]]  # place, tensor copied by TMA, its source and fill

    def tensors(self) -> list[Tensor]:
        return [x for x in self.arguments if isinstance(x, Tensor)] + [x for _, x, _ in self.descriptors]


def note(run, grid: tuple, copied: tuple, arguments: tuple | None) -> None:
    """Record a launch on this thread's tape, if one is running; arguments None: it can't be repeated."""
    tape = getattr(_watching, "tape", None)
    if tape is not None:
        tape.launches.append(None if arguments is None else run.written_out(grid, copied, arguments))


def recording() -> bool:
    """Return whether a tape is running on this thread: calls within it launch their kernels where it sees them."""
    return getattr(_watching, "tape", None) is not None


class Tape(TorchDispatchMode):
    """Records a with block: its launches, its allocations, and whether it did anything else.

    The mode is pushed on its thread's stack directly. Entered in torch's way it would set a flag of the whole process,
    which two threads that leave their modes in another order would leave set.
    """

    def __init__(self):
        super().__init__()
        self.launches: list[Launched | None] = []
        self.made: list[Tensor] = []  # kept alive, so that no two have one address
        self.others = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's own answer imports its compiler, which takes seconds

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


def check_repeatable(tape: Tape, results: list[Tensor]) -> None:
    """Raise LookupError if the tape has more than launches of known kernels, or a result isn't its own allocation."""
    if tape.others or None in tape.launches:
        raise LookupError("more happened than launches of known kernels")
    made = set(map(storage, tape.made))
    for x in results:
        whole = x.nbytes == x.untyped_storage().nbytes() > 0 and x.is_contiguous()
        if not whole or storage(x) not in made:
            raise LookupError("a result is not a whole allocation of its own")
        made.remove(storage(x))


def place(
    x: Tensor, inputs: tuple[Tensor, ...], made: dict[int, tuple[int, int]], shared: bool = False
) -> tuple[int, int]:
    """Return (slot, offset): x lies `offset` bytes behind the address in that slot.

    The inputs have the first slots; made maps the address of an allocation to its (slot, offset). shared: inputs may
    lie in one allocation, always equally far apart. Raises LookupError for tensors that are neither given nor made.
    """
    for i, y in enumerate(inputs):
        if x is y:
            return i, 0
    at = storage(x)
    if at in made:
        number, offset = made[at]
        return number, offset + x.data_ptr() - at
    given = [i for i, y in enumerate(inputs) if storage(y) == at]
    if len(given) != 1 and not (given and shared):
        raise LookupError("a kernel reads a tensor that is neither given nor made")
    return given[0], x.data_ptr() - inputs[given[0]].data_ptr()


class Replay:
    """A tape, ready to run with other tensors of the same kinds.

    inputs are the tensors the call was given; results those it returned: the first `apart` of them are allocated one
    by one, the others cut out of one allocation; shared as in `place`. Raises LookupError if it can't be repeated.
    """

    def __init__(
        self,
        tape: Tape,
        inputs: tuple[Tensor, ...],
        results: tuple[Tensor | None, ...],
        apart: int,
        shared: bool = False,
    ):
        alone, kept = ([x for x in part if x is not None] for part in (results[:apart], results[apart:]))
        check_repeatable(tape, alone + kept)
        launches = [x for x in tape.launches if x is not None]
        self.device = inputs[0].device
        self.apart = [(x.shape, x.dtype) for x in alone]
        self.kept = [None if x is None else (x.shape, x.dtype) for x in results[apart:]]

        made = {storage(x): x for x in tape.made}
        touched = dict.fromkeys(storage(x) for launched in launches for x in launched.tensors())
        returned = set(map(storage, alone + kept))
        scratch = [made[at] for at in touched if at in made and at not in returned]
        self.kept_ends = end_of([x.nbytes for x in kept])
        scratch_ends = end_of([x.untyped_storage().nbytes() for x in scratch])
        self.scratch = scratch_ends[-1]

        blocks = [*(((x,), (0,)) for x in alone), (kept, self.kept_ends), (scratch, scratch_ends)]
        places = {
            storage(x): (number, at)
            for number, block in enumerate(blocks, len(inputs))
            for x, at in zip(*block, strict=False)
        }
        self.launches = []
        for go, arguments, stream, descriptors in launches:
            given = [(i, x) for i, x in enumerate(arguments) if isinstance(x, Tensor)]
            patches = [(i, *place(x, inputs, places, shared)) for i, x in given]
            fills = [(i, *place(x, inputs, places, shared), how) for i, x, how in descriptors]
            template = [None if isinstance(x, Tensor) else x for x in arguments]
            self.launches.append((go, template, stream, patches, fills))

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """Return the separate results, then one uint8 tensor that holds the others, if there are any."""
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
        """Return the results that `__call__` packed into one tensor."""
        if not kept.is_contiguous() or kept.storage_offset() % ALIGNMENT:  # a hook has copied it
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
        """Return results, computed without the tape, packed into one tensor as `__call__` does."""
        kept = torch.empty(self.kept_ends[-1], dtype=torch.uint8, device=self.device)
        for x, part in zip(results, self.parts(kept), strict=True):
            if x is not None and part is not None:
                part.copy_(x)
        return kept


def recorded(
    tape: Tape, inputs: tuple[Tensor, ...], results: tuple[Tensor | None, ...], apart: int, shared: bool = False
) -> Replay | None:
    """Return the tape's `Replay`, or None if it can't be repeated."""
    try:
        return Replay(tape, inputs, results, apart, shared)
    except LookupError:
        return None


def taped(tapes: dict, kind: tuple, inputs: tuple[Tensor, ...], moving: int, body) -> None:
    """Run body(), which launches kernels that read and write `inputs`; later calls of its kind from the first's tape.

    The first `moving` inputs are other tensors in every call, the rest always the same. tapes: kind -> tape, or None
    where body does more than launch kernels and allocate; kind has what body depends on beside the inputs' addresses,
    shapes and strides.
    """
    allocations: dict[int, tuple[int, int]] = {}  # number of each, and where the first input in it begins
    places = []
    for x in inputs[:moving]:
        at = x.data_ptr()
        number, first = allocations.setdefault(storage(x), (len(allocations), at))
        places.append((x.shape, x.stride(), at % 16, number, at - first))
    kind = (*kind, *places)
    tape = tapes.get(kind)
    if tape is not None:
        tape(*inputs)
    elif kind in tapes:
        body()
    else:
        with Tape() as running:
            body()
        tapes[kind] = recorded(running, inputs, (), 0, shared=True)
