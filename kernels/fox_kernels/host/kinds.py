"""Cache keys of repeated calls: shapes, strides, dtypes, devices and options. None: don't cache.

Two calls with one key differ in values and addresses only; addresses are multiples of 16 bytes. A call gets None where
torch.compile, a dispatch mode, a transform or a tensor subclass must see it, or where values must be checked.
"""

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from .. import determinism
from ..options import Documents, Options

Tensor = torch.Tensor

PLAIN = frozenset((int, float, type(None)))
TENSORS = frozenset((Tensor, torch.nn.Parameter))  # subclasses may replace operators


def under_transform() -> bool:
    """Return whether a torch.func transform (grad, vmap, jvp) or forward-mode differentiation is active."""
    transformed = torch._C._functorch.maybe_current_level() is not None  # pyright: ignore[reportAttributeAccessIssue]
    return transformed or forward_ad._current_level >= 0


def traced(*tensors: Tensor) -> bool:
    """Return whether compilers, tensor subclasses or dispatch modes must see an operator."""
    return torch.compiler.is_compiling() or any(type(x) not in TENSORS for x in tensors) or is_in_torch_dispatch_mode()


def on_current_gpu(device: torch.device) -> bool:
    """Return whether kernels launched now run on this device."""
    return device.type == "cuda" and device.index == torch.cuda.current_device()


def attention_kind(q, k, v, log_f, options: tuple, documents: Documents, backend: str) -> tuple | None:
    """Return the kind of a `forgetting_attention` without lse; options are those of `Options`, as given.

    Two calls of a kind differ in nothing but values, addresses and how many documents there are, and no two of their
    tensors begin at one address.
    """
    if torch.compiler.is_compiling() or not TENSORS.issuperset((type(q), type(k), type(v), type(log_f))):
        return None
    device, dtype = q.device, q.dtype
    if options[5] is not None:  # a horizon's edges are found from values
        return None
    if not on_current_gpu(device) or not (
        device == k.device == v.device == log_f.device and dtype is k.dtype is v.dtype
    ):
        return None
    if torch.is_autocast_enabled("cuda") and dtype is not torch.get_autocast_dtype("cuda"):
        return None
    if is_in_torch_dispatch_mode() or under_transform():
        return None
    addresses = q.data_ptr(), k.data_ptr(), v.data_ptr(), log_f.data_ptr()
    if len(set(addresses)) < 4 or (addresses[0] | addresses[1] | addresses[2] | addresses[3]) % 16:
        return None  # empty ones begin at 0
    types = tuple(map(type, options))  # True == 1 == 1.0
    if not PLAIN.issuperset(types) or type(backend) is not str:
        return None
    cu_seqlens, seq_start, *_ = documents
    packed = padding = None
    if cu_seqlens is not None:
        if type(cu_seqlens) is not Tensor or cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
            return None
        packed = (cu_seqlens.dtype, cu_seqlens.device)
    if seq_start is not None:
        if type(seq_start) is not Tensor:
            return None
        padding = (seq_start.shape, seq_start.dtype, seq_start.device)
    differentiable = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or log_f.requires_grad
    )
    return (
        q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), log_f.shape, log_f.stride(), dtype,
        log_f.dtype, device, packed, padding, backend, options, types, differentiable,
        determinism.is_deterministic(),
    )  # fmt: skip


def gradient_kind(*tensors) -> tuple | None:
    """Return the kind of a backward among those of one kind of forward; tensors are do and all saved tensors.

    Saved tensors may have been moved and copied (offloading): strides and dtypes are part of the key, shapes are known.
    """
    addresses, bits, kind = [], 0, []
    for x in tensors:
        if type(x) not in TENSORS:
            return None
        address = x.data_ptr()
        addresses.append(address)
        bits |= address
        kind.append((x.stride(), x.dtype))
    if bits % 16 or len(set(addresses)) < len(addresses) or not on_current_gpu(tensors[0].device):
        return None
    return tuple(kind)


def decoding_kind(q, k, v, c_hi, c_lo, options: Options, seq_start, k_bound) -> tuple | None:
    """Return the key of a `decode_attention`: everything that it checks, except S, strides and values.

    None: S or strides don't fit, or something other than a kernel must see the call.
    """
    if torch.compiler.is_compiling() or not type(q) is type(k) is type(v) is type(c_hi) is type(c_lo) is Tensor:
        return None
    if torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or c_hi.requires_grad or c_lo.requires_grad
    ):
        return None
    shape, k_shape, device, c_strides = q.shape, k.shape, q.device, c_hi.stride()
    if len(shape) != 4 or len(k_shape) != 4 or v.shape != k_shape or not 0 < shape[1] <= k_shape[1]:
        return None
    c_shape = (shape[0], shape[2], k_shape[1])
    if c_hi.shape != c_shape or c_lo.shape != c_shape or c_lo.stride() != c_strides or c_strides[2] != 1:
        return None
    if not (q.dtype is k.dtype is v.dtype and c_hi.dtype is c_lo.dtype is torch.float32):
        return None
    if is_in_torch_dispatch_mode() or (q.is_cuda and device.index != torch.cuda.current_device()):
        return None
    start = bound = None
    if seq_start is not None:
        if type(seq_start) is not Tensor:
            return None
        start = (seq_start.shape, seq_start.dtype, seq_start.device)
    if k_bound is not None:
        if type(k_bound) is not Tensor or not k_bound.is_contiguous():
            return None
        bound = (k_bound.shape, k_bound.dtype, k_bound.device)
    types = tuple(map(type, options))  # True == 1 == 1.0
    if not PLAIN.issuperset(types):
        return None
    return (
        shape, k_shape[0], k_shape[2:], q.dtype, device, k.device, v.device, c_hi.device, c_lo.device, start, bound,
        options, types,
    )  # fmt: skip
