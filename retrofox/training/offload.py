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


class Checkpoint:
    """A layer's input on the GPU (`tensor`) or in CPU memory (`chunks`), and the one taken before it."""

    def __init__(self, x: torch.Tensor, before: Checkpoint | None):
        self.tensor: torch.Tensor | None = x.detach().contiguous()
        self.before = (lambda: None) if before is None else weakref.ref(before)
        self.like = torch.empty_like(self.tensor, device="meta")
        self.device = x.device
        self.chunks: list[torch.Tensor] = []
        self.copied: Any = None

    def __del__(self) -> None:
        if self.copied is not None:  # fetched and never asked for: what takes its memory comes after the copy
            torch.cuda.current_stream(self.device).wait_event(self.copied)

    def bytes_of(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensor's bytes, a part for each chunk."""
        return tensor.view(-1).view(torch.uint8).split(CHUNK)


class Offload:
    """Runs layers with gradient checkpointing, their checkpoints in CPU memory; one for all layers of a model."""

    def __init__(self) -> None:
        self.newest: Callable[[], Checkpoint | None] = lambda: None
        self.leaving: tuple[torch.Tensor, Any] | None = None
        self.stream: Any = None

    def run(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """function(*inputs), recomputed in the backward from its inputs, which wait in CPU memory until then."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            return checkpoint(function, *inputs, use_reentrant=False)

    def _pack(self, x: torch.Tensor) -> Checkpoint | torch.Tensor:
        """Keeps a layer's checkpoint, and starts to copy that of the layer before, which has run by now, to the CPU."""
        if not x.numel():  # torch's own anchor
            return x
        self._settle()
        before = self.newest()
        if before is not None and before.tensor is not None:
            self._copy_out(before)
        kept = Checkpoint(x, before)
        self.newest = weakref.ref(kept)
        return kept

    def _unpack(self, kept: Checkpoint | torch.Tensor) -> torch.Tensor:
        """Returns a checkpoint on the GPU, and starts to fetch the one that the backward needs next."""
        if isinstance(kept, torch.Tensor):
            return kept
        self._settle()
        if kept.tensor is None:
            self._fetch(kept)
        found = kept.tensor
        assert found is not None
        if kept.copied is not None:
            torch.cuda.current_stream(kept.device).wait_event(kept.copied)
        if kept.chunks:
            kept.tensor = kept.copied = None  # the graph's own reference is the only one now
        before = kept.before()
        if before is not None and before.tensor is None:
            self._fetch(before)
        return found

    def _settle(self) -> None:
        """Frees the checkpoint that was copied to the CPU; the next kernel waits for the copy, which ended long ago."""
        if self.leaving is not None:
            tensor, copied = self.leaving
            if copied is not None:
                torch.cuda.current_stream(tensor.device).wait_event(copied)
            self.leaving = None

    def _copy_out(self, kept: Checkpoint) -> None:
        tensor = kept.tensor
        assert tensor is not None
        with self._beside(kept.device) as stream:
            for part in kept.bytes_of(tensor):
                # Freed with the checkpoint; torch's allocator of pinned memory gives it to the next one.
                chunk = torch.empty(part.shape, dtype=torch.uint8, pin_memory=stream is not None)
                kept.chunks.append(chunk.copy_(part, non_blocking=True))
        self.leaving = (tensor, None if stream is None else stream.record_event())
        kept.tensor = None

    def _fetch(self, kept: Checkpoint) -> None:
        tensor = torch.empty_like(kept.like, device=kept.device)
        with self._beside(kept.device) as stream:
            for part, chunk in zip(kept.bytes_of(tensor), kept.chunks, strict=True):
                part.copy_(chunk, non_blocking=True)
        kept.tensor, kept.copied = tensor, None if stream is None else stream.record_event()

    @contextlib.contextmanager
    def _beside(self, device: torch.device) -> Iterator[Any]:
        """Inside, a GPU copies on a stream of its own, behind the work queued so far; a CPU just copies."""
        if device.type != "cuda":
            yield None
            return
        self.stream = self.stream or torch.cuda.Stream(device)
        self.stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self.stream):
            yield self.stream
