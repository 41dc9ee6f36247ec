"""The one place that chooses the implementation of the operator, and says why."""

import re
import sys

import torch

from .arguments import for_backward, under_autocast
from .host.device import capability, triton_unsupported
from .options import Options, given

Tensor = torch.Tensor

BACKENDS = ("auto", "reference", "chunked", "triton", "gluon")

NUMBER = re.compile(r"(?<!\w)-?\d[\d.e+-]*")  # not the 16 of float16
_announced: set[tuple[str, str]] = set()


def gluon_unsupported(q: Tensor, v: Tensor, options: Options, differentiated: bool) -> str | None:
    """Return why the Hopper kernels (Gluon) can't run a problem that the Triton kernels can, or None if they can."""
    if q.device.type != "cuda" or capability(q.device)[0] != 9:
        return "the GPU is not a Hopper (compute capability 9.0); on others the kernels were compiled, not run"
    if v.shape[-1] != q.shape[-1]:
        return f"the heads of v have {v.shape[-1]} channels, those of q and k {q.shape[-1]}"
    if differentiated and options.sink > 0 and options.horizon is not None:
        return "its backward has no horizon together with sink tokens"
    from .hopper.forward import unsupported

    return unsupported(q, options)


def choose(
    q: Tensor, k: Tensor, v: Tensor, log_f: Tensor | None = None, *, backend: str = "auto", **options
) -> tuple[str, str]:
    """Return (backend, reason): which implementation `forgetting_attention` runs for these arguments, and why.

    Backends: "reference" (whole matrix), "chunked" (plain torch, any device that has float64), "triton" (Ampere on),
    "gluon" (Hopper); the last two launch the kernels for decoding where a few queries meet many keys. Options as in
    `forgetting_attention`. Gradients decide, too: of q, k, v and, if given, log_f.
    Raises ValueError when a backend asked for by name can't run the problem, or is unknown.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
    wanted, _ = given(**options)
    q, k, v = under_autocast(q, k, v)  # as the operator does
    if backend in ("reference", "chunked"):
        return backend, "asked for"
    no_triton = triton_unsupported(q)
    if backend == "triton":
        if no_triton is not None:
            raise ValueError(f'backend="triton" can\'t run: {no_triton}; use backend="auto" or "chunked"')
        return backend, "asked for"
    if no_triton is not None and backend == "auto":
        return "chunked", no_triton
    wanted = wanted._replace(scale=1.0) if wanted.scale is None else wanted
    no_gluon = no_triton or gluon_unsupported(q, v, wanted, for_backward(q, k, v, log_f))
    if backend == "gluon":
        if no_gluon is not None:
            other = "triton" if no_triton is None else "chunked"
            raise ValueError(f'backend="gluon" can\'t run: {no_gluon}; use backend="auto" or "{other}"')
        return backend, "asked for"
    return ("gluon", "Hopper GPU") if no_gluon is None else ("triton", f"CUDA tensors; not gluon: {no_gluon}")


def announce(backend: str, reason: str) -> None:
    """Print a choice that is not this machine's usual to stderr, once: not again for other numbers in its reason."""
    kind = backend, NUMBER.sub("", reason)
    if kind not in _announced:
        _announced.add(kind)
        if backend != usual():
            print(f"fox_kernels: backend {backend} ({reason})", file=sys.stderr)


def usual() -> str:
    """Return what a machine should run: "gluon" on a Hopper, "triton" on other GPUs, "chunked" without one."""
    if not torch.cuda.is_available():
        return "chunked"
    return "gluon" if torch.cuda.get_device_capability()[0] == 9 else "triton"
