"""The checkpoints of gradient checkpointing in pinned CPU memory, copied beside the computing.

A layer's checkpoint is its input, T x hidden: 2.1 GB for each of 32 layers at 262144 tokens and 4096 channels. While
layer l + 1 computes, the checkpoint of layer l leaves the GPU on a stream of its own; while layer l + 1 goes backward,
it comes back. Two checkpoints are on the GPU at a time, whatever the number of layers; the last layer's never leaves.
Source: activation checkpoint offload in Arctic Long Sequence Training (arXiv 2506.13996, section 3.3).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

CHUNK = 64 << 20
"""Bytes of a pinned buffer: torch rounds pinned memory up to a power of two, which would waste up to half of it."""


class Offload:
    """Runs layers with gradient checkpointing, their checkpoints in CPU memory; one for all layers of a model.

    Attributes:
        free: pinned buffers that hold no checkpoint now; they are used again and never given back.
        moved: bytes that went to CPU memory since the start.
    """

    def __init__(self, chunk: int = CHUNK):
        self.chunk, self.moved = chunk, 0
        self.free: list[torch.Tensor] = []
        self.newest: weakref.ref[Checkpoint] | None = None
        self.leaving: tuple[torch.Tensor, Any] | None = None
        self.stream: Any = None

    def run(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """function(*inputs), recomputed in the backward from its inputs, which wait in CPU memory until then."""
        with torch.autograd.graph.saved_tensors_hooks(self._leave, self._return):
            return checkpoint(function, *inputs, use_reentrant=False)

    def _leave(self, x: torch.Tensor) -> Checkpoint | torch.Tensor:
        """Takes a checkpoint in; the one before it, whose layer has run by now, starts on its way to the CPU."""
        if not x.numel():  # torch's own anchor
            return x
        self._settle()
        before = self._newest()
        if before is not None and before.tensor is not None:
            self._copy_out(before)
        kept = Checkpoint(self, x, self.newest)
        self.newest = weakref.ref(kept)
        return kept

    def _return(self, kept: Checkpoint | torch.Tensor) -> torch.Tensor:
        """Gives a checkpoint back on the GPU, and starts to fetch the one that the backward needs next."""
        if isinstance(kept, torch.Tensor):
            return kept
        self._settle()
        if kept.tensor is None:
            self._fetch(kept)
        found, event = kept.tensor, kept.event
        assert found is not None
        if event is not None:
            torch.cuda.current_stream(found.device).wait_event(event)
        if kept.chunks:
            kept.tensor = kept.event = None  # the graph's own reference is the only one now
        before = None if kept.before is None else kept.before()
        if before is not None and before.tensor is None:
            self._fetch(before)
        return found

    def _newest(self) -> Checkpoint | None:
        return None if self.newest is None else self.newest()

    def _settle(self) -> None:
        """Lets go of the checkpoint on its way out: what computes next waits for the copy, which ended long ago."""
        if self.leaving is not None:
            tensor, event = self.leaving
            if event is not None:
                torch.cuda.current_stream(tensor.device).wait_event(event)
            self.leaving = None

    def _copy_out(self, kept: Checkpoint) -> None:
        tensor = kept.tensor
        assert tensor is not None
        while len(kept.chunks) * self.chunk < kept.bytes:
            kept.chunks.append(self._buffer(tensor.device))
        with self._beside(tensor.device) as stream:
            for chunk, part in self._parts(kept, tensor):
                chunk.copy_(part, non_blocking=True)
        self.moved += kept.bytes
        self.leaving = (tensor, None if stream is None else stream.record_event())
        kept.tensor = None

    def _fetch(self, kept: Checkpoint) -> None:
        tensor = torch.empty(kept.shape, dtype=kept.dtype, device=kept.device)
        with self._beside(kept.device) as stream:
            for chunk, part in self._parts(kept, tensor):
                part.copy_(chunk, non_blocking=True)
        kept.tensor, kept.event = tensor, None if stream is None else stream.record_event()

    def _parts(self, kept: Checkpoint, tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(buffer, the bytes of the tensor that it holds), both as long as those bytes."""
        flat = tensor.view(-1).view(torch.uint8)
        for chunk, part in zip(kept.chunks, flat.split(self.chunk), strict=True):
            yield chunk[: part.numel()], part

    def _buffer(self, device: torch.device) -> torch.Tensor:
        if self.free:
            return self.free.pop()
        return torch.empty(self.chunk, dtype=torch.uint8, pin_memory=device.type == "cuda")

    @contextlib.contextmanager
    def _beside(self, device: torch.device) -> Iterator[Any]:
        """Inside, a GPU copies on a stream of its own, after what it was told so far; a CPU just copies."""
        if device.type != "cuda":
            yield None
            return
        if self.stream is None:
            self.stream = torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self.stream):
            yield self.stream


class Checkpoint:
    """A layer's input on the GPU (`tensor`) or in CPU memory (`chunks`), and the one taken before it."""

    def __init__(self, owner: Offload, x: torch.Tensor, before: weakref.ref[Checkpoint] | None):
        x = x.detach().contiguous()
        self.owner, self.tensor, self.before = owner, x, before
        self.shape, self.dtype, self.device = x.shape, x.dtype, x.device
        self.bytes = x.numel() * x.element_size()
        self.chunks: list[torch.Tensor] = []
        self.event: Any = None

    tensor: torch.Tensor | None

    def __del__(self) -> None:
        # The backward is through with it, or it never came: its buffers serve the next, on the same stream.
        if self.event is not None:
            torch.cuda.current_stream(self.device).wait_event(self.event)
        self.owner.free += self.chunks


def pin_ahead(nbytes: int) -> None:
    """Pins that much CPU memory for the buffers to come, so that no step waits for it; torch keeps it once freed."""
    buffers = [torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True) for _ in range(-(-nbytes // CHUNK))]
    del buffers
