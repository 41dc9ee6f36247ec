"""Bytes of the tensors that are alive, where no allocator can be asked: on a CPU."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class LiveBytes(TorchDispatchMode):
    """Counts inside a `with` block what operations allocate, forward and backward, until it is freed.

    Attributes:
        now, peak: bytes alive of those allocated since the block began, and the most there were.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        given = [each.untyped_storage() for each in tree_iter((args, kwargs)) if isinstance(each, torch.Tensor)]
        before = {storage.data_ptr() for storage in given}
        result = func(*args, **(kwargs or {}))
        for each in tree_iter(result):
            if isinstance(each, torch.Tensor):
                self._count(each.untyped_storage(), before)
        return result

    def _count(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        if storage in self.known or storage.data_ptr() in given:
            return  # a view, or written in place
        self.known.add(storage)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.now -= size
