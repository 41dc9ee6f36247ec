"""Checks of the operators' arguments, once for every implementation, and their options resolved."""

import numbers
import sys

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from .options import Documents, Options

POSITIVE_LOG_F = 1e-3  # allowed: finite differences around an open gate
TENSORS = frozenset((Tensor, torch.nn.Parameter))  # subclasses may replace operators


def under_transform() -> bool:
    """Return whether a torch.func transform (grad, vmap, jvp) or forward-mode differentiation is active."""
    transformed = torch._C._functorch.maybe_current_level() is not None  # pyright: ignore[reportAttributeAccessIssue]
    return transformed or forward_ad._current_level >= 0


def traced(*tensors: Tensor) -> bool:
    """Return whether compilers, tensor subclasses or dispatch modes must see an operator."""
    return torch.compiler.is_compiling() or any(type(x) not in TENSORS for x in tensors) or is_in_torch_dispatch_mode()


def for_backward(*tensors: Tensor | None) -> bool:
    """Return whether a result of these tensors will be differentiated."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def under_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v in autocast's dtype where it is on (float64 stays), as torch's own attention would see them."""
    device = q.device.type
    if device == "meta" or not torch.is_autocast_enabled(device) or torch.float64 in (q.dtype, k.dtype, v.dtype):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def as_wide_as(q: Tensor, v: Tensor) -> Tensor:
    """Return v with channels of 0 up to q's, for kernels that take one head dim."""
    return torch.nn.functional.pad(v, (0, q.shape[-1] - v.shape[-1])) if v.shape[-1] < q.shape[-1] else v


def resolved(options: Options, head_dim: int, S: int) -> Options:
    """Return checked options with a scale, floats as such, and ints of 32 bits that say the same of S keys."""
    scale, window, sink, softcap, horizon = options
    scale = head_dim**-0.5 if scale is None else float(scale)
    window = None if window is None else min(window, S)
    softcap, horizon = (None if x is None else float(x) for x in (softcap, horizon))
    return Options(scale, window, min(sink, S), softcap, horizon)


def check(q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, options: Options, documents: Documents) -> Options:
    """Return the options `resolved`, or raise ValueError naming the wrong argument, what is allowed and what to do."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions (batch, tokens, heads, head_dim), got {tuple(x.shape)}")
    B, T, H, D = q.shape
    S, Hkv = k.shape[1], k.shape[2]
    if k.shape[:3] != v.shape[:3] or not 0 < v.shape[3] <= k.shape[3]:
        raise ValueError(
            f"k and v must have one shape (v's heads may be narrower), got {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if k.shape[0] != B or k.shape[3] != D:
        raise ValueError(f"k must be (B, S, Hkv, D) with B = {B}, D = {D} as in q, got {tuple(k.shape)}")
    if Hkv == 0 or H % Hkv:
        raise ValueError(f"the query heads ({H}) must be a multiple of the key/value heads ({Hkv})")
    if T > S:
        raise ValueError(f"queries are the last T of S positions, so T <= S; got T = {T}, S = {S}")
    if tuple(log_f.shape) != (B, S, H):
        raise ValueError(
            f"log_f must be (B, S, H) = {(B, S, H)}, one gate per key position and query head, got {tuple(log_f.shape)}"
        )
    if not q.dtype.is_floating_point or q.dtype.itemsize < 2 or k.dtype != q.dtype or v.dtype != q.dtype:
        dtypes = f"{q.dtype}, {k.dtype}, {v.dtype}"
        raise ValueError(f"q, k and v must share one floating dtype of 16 bits or more, got {dtypes}: cast them")
    if log_f.dtype not in (torch.float32, torch.float64):
        name = str(log_f.dtype).removeprefix("torch.")
        raise ValueError(f"log_f must be float32, got {name}: cast the gate logit to float32 before logsigmoid")
    if not q.device == k.device == v.device == log_f.device:
        devices = f"{q.device}, {k.device}, {v.device}, {log_f.device}"
        raise ValueError(f"q, k, v and log_f must be on one device, got {devices}")
    _check_documents(documents, B, S, q.device)
    _check_options(options, torch.float64 if q.dtype == torch.float64 else torch.float32)
    return resolved(options, D, S)


def _check_documents(documents: Documents, B: int, S: int, device: torch.device) -> None:
    cu_seqlens, seq_start, *_ = documents
    if cu_seqlens is not None:
        if B != 1:
            raise ValueError(
                f"cu_seqlens packs documents into one row, so the batch must be 1, got {B}: flatten it first"
            )
        fits = isinstance(cu_seqlens, Tensor) and cu_seqlens.dim() == 1 and cu_seqlens.numel() >= 2
        readable = _check_positions("cu_seqlens", cu_seqlens, fits, "(N + 1,) int32 with N >= 1 documents", device)
        if readable and (cu_seqlens[0] != 0 or cu_seqlens[-1] != S or bool((cu_seqlens.diff() < 0).any())):
            raise ValueError(f"cu_seqlens must rise from 0 to S = {S}, got {cu_seqlens.tolist()}")
    if seq_start is not None:
        wanted = f"({B},) int32, the first visible position of each row"
        fits = isinstance(seq_start, Tensor) and tuple(seq_start.shape) == (B,)
        readable = _check_positions("seq_start", seq_start, fits, wanted, device)
        if readable and bool(((seq_start < 0) | (seq_start > S)).any()):
            raise ValueError(f"seq_start must lie between 0 and S = {S}, got {seq_start.tolist()}")


def _check_positions(name: str, x: Tensor, fits: bool, wanted: str, device: torch.device) -> bool:
    """Return whether the values may be read: on a GPU that would stall it, in a compiled graph break it."""
    if not fits or x.dtype not in (torch.int32, torch.int64):
        found = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else repr(x)
        raise ValueError(f"{name} must be {wanted}, got {found}")
    if x.device != device:
        raise ValueError(f"{name} must be on {device} as q is, got {x.device}")
    return device.type == "cpu" and has_values(x)


def has_values(x: Tensor) -> bool:
    """Return whether x holds values, so that control flow may depend on them: False for a traced tensor."""
    return not torch.compiler.is_compiling() and type(x) in TENSORS


def _check_options(options: Options, dtype: torch.dtype) -> None:
    """dtype: of the scores."""
    scale, window, sink, softcap, horizon = options
    held = torch.finfo(dtype)
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(f"window must be an int >= 1 (keys seen, the query's own included) or None, got {window!r}")
    if isinstance(sink, bool) or not isinstance(sink, int) or sink < 0:
        raise ValueError(f"sink must be an int >= 0, the number of decay-free first positions, got {sink!r}")
    if softcap is not None and not (_is_finite(softcap) and held.tiny <= softcap <= held.max):
        raise ValueError(f"softcap must be a finite float > 0 that {dtype} holds, or None; got {softcap!r}")
    if horizon is not None and not (_is_finite(horizon) and horizon > 0):
        raise ValueError(f"horizon must be a finite float > 0, the nats a key may decay by, or None; got {horizon!r}")
    if scale is not None and not (_is_finite(scale) and abs(scale) <= held.max):
        raise ValueError(
            f"scale must be a finite float that {dtype} holds, or None for head_dim ** -0.5; got {scale!r}"
        )


def _is_finite(x) -> bool:
    return isinstance(x, numbers.Real) and not isinstance(x, bool) and abs(x) <= sys.float_info.max  # pyright: ignore[reportOperatorIssue]


def check_gates(log_f: Tensor) -> None:
    """Raise ValueError for positive log_f, where its values can be read without a stall: eager mode on a CPU."""
    if log_f.device.type != "cpu" or not has_values(log_f) or not log_f.numel() or under_transform():
        return
    top = log_f.detach().amax().item()
    if top > POSITIVE_LOG_F:
        raise ValueError(f"log_f must be <= 0, the log of a gate in [0, 1], got up to {top:.3g}: apply logsigmoid")


def check_cache(q: Tensor, k: Tensor, v: Tensor, c_hi: Tensor, c_lo: Tensor, options: Options, seq_start) -> Options:
    """`check` for `decode_attention`."""
    if q.dim() != 4 or k.dim() != 4:
        raise ValueError(f"q and k must be (batch, tokens, heads, head_dim), got {tuple(q.shape)} and {tuple(k.shape)}")
    wanted = [(q.shape[0], heads, k.shape[1]) for heads in (q.shape[2], k.shape[2])]
    if c_hi.shape != c_lo.shape or c_hi.shape not in wanted:
        raise ValueError(f"c_hi and c_lo must be (B, H or Hkv, S), {wanted}, got {(*c_hi.shape,)}, {(*c_lo.shape,)}")
    kinds = [(x.dtype, x.device, x.stride()) for x in (c_hi, c_lo)]
    if kinds[0] != kinds[1] or c_hi.dtype != torch.float32 or (c_hi.stride(2) != 1 and c_hi.shape[2] > 1):
        raise ValueError(f"c_hi and c_lo must be float32 on one device with the same strides, the last 1; got {kinds}")
    per_query = c_hi[:, :1].expand(-1, q.shape[2], -1)
    return check(q, k, v, per_query.transpose(1, 2), options, Documents(seq_start=seq_start))


def check_backward() -> None:
    """Raise ValueError in a backward that is to be differentiated itself, rather than give zero."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise ValueError("no second derivative: leave create_graph=True out, or use fox_kernels.reference")
