"""Whether a compiler, a transform, a dispatch mode or a tensor subclass must see a call."""

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

Tensor = torch.Tensor

TENSORS = frozenset((Tensor, torch.nn.Parameter))  # subclasses may replace operators


def under_transform() -> bool:
    """Return whether a torch.func transform (grad, vmap, jvp) or forward-mode differentiation is active."""
    transformed = torch._C._functorch.maybe_current_level() is not None  # pyright: ignore[reportAttributeAccessIssue]
    return transformed or forward_ad._current_level >= 0


def traced(*tensors: Tensor) -> bool:
    """Return whether compilers, tensor subclasses or dispatch modes must see an operator."""
    return torch.compiler.is_compiling() or any(type(x) not in TENSORS for x in tensors) or is_in_torch_dispatch_mode()
