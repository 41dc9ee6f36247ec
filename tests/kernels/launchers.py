"""What the launchers promise beyond the public operator: caches that grow, helpers like their twins.

Needs Triton, real or interpreted, at import.
"""

import warnings
from functools import partial
from unittest import mock

import pytest
import torch
import twins
from cases import Case, draw, errors, gates, results
from fox_kernels import autograd, forgetting_attention
from fox_kernels.common import cumsum
from fox_kernels.triton import backward, forward
from fox_kernels.triton.tiles import Tile


def check_nan(device: str) -> None:
    """NaN in a gate reaches what comes after it, o and lse, of its own head only; in decoding too."""
    torch.manual_seed(0)
    for T, S in ((100, 100), (1, 300)):
        inputs, _, _ = draw(Case(B=1, T=T, S=S, H=2, Hkv=2, D=64), device)
        inputs[3] = inputs[3].detach().clone()
        inputs[3][:, S - 9, 0] = float("nan")
        with warnings.catch_warnings():  # the interpreter takes maxima by numpy, which warns of rows of nothing but NaN
            warnings.simplefilter("ignore", RuntimeWarning)
            o, lse = forgetting_attention(*[x.detach() for x in inputs], return_lse=True, backend="triton")
        for x in (o[0].isnan().any(-1), lse[0].isnan()):
            assert x[max(0, T - 9) :, 0].all()
            assert not x[: max(0, T - 9), 0].any()
            assert not x[:, 1].any()


def check_softcap(device: str) -> None:
    """A cap far above the scores, and one far below, cost float32 none of its digits."""
    for softcap, scale in ((200.0, 0.25), (2.0, 2.0), (30.0, 1e-6)):
        torch.manual_seed(0)
        for name, mine, eager in errors(Case(D=16, options={"softcap": softcap, "scale": scale}), device):
            assert mine <= 2 * eager + 5e-7, (name, mine, eager, softcap)


def check_helpers(device: str, S: int) -> None:
    """Each fused helper equals its eager twin, whether a row is one block or several."""
    check_sums(device, S)
    with mock.patch.object(cumsum, "LARGEST", 16):
        check_sums(device, S)


def check_sums(device: str, S: int) -> None:
    torch.manual_seed(0)
    for dtype, kind in ((torch.float32, "mixed"), (torch.float64, "short"), (torch.float32, "zeros")):
        log_f = gates(kind, 2, S, 3, device=device).to(dtype)
        hi, lo = cumsum.cumulative(log_f)
        twin_hi, twin_lo = twins.cumulative_torch(log_f)
        exact = twin_hi.double() + twin_lo.double()
        assert (hi.double() + lo.double() - exact).abs().max() <= 1e-13 * exact.abs().max() + 1e-12
        dc = torch.randn(2, 3, S, device=device)
        gradient, twin = cumsum.gate_gradient(dc, log_f), twins.gate_gradient_torch(dc, log_f)
        assert (gradient - twin).abs().max() <= 1e-5
        assert gradient.dtype == dtype
        relative = cumsum.block_relative(hi, lo, 32)[..., :S]
        last = torch.arange(S, device=device).div(32, rounding_mode="floor").mul(32).add(31).clamp_max(S - 1).long()
        assert torch.allclose(relative.double(), exact[..., last] - exact, rtol=1e-6, atol=1e-6)


def check_operator(device: str, backend: str = "triton") -> None:
    """Eager mode, the operator and a compiled function give the same bits, decoding too; it passes torch's opcheck."""
    torch.manual_seed(0)
    options = {"window": 9, "sink": 1, "softcap": 5.0}
    inputs, gradients, options = draw(Case(T=40, D=16, starts=[3, 40], options=options), device)
    arguments = (*inputs, None, options["seq_start"], 0.25, 9, 1, 5.0, None, backend, True, True)
    torch.library.opcheck(autograd.attention, arguments)

    def operator(*args, **kwargs):
        return forgetting_attention(*args, backend=backend, **kwargs)

    compiled = torch.compile(operator, fullgraph=True, backend="aot_eager")
    expected = results(operator, inputs, gradients, options)
    for way in (compiled, watched(operator)):
        for got, value in zip(results(way, inputs, gradients, options), expected, strict=True):
            assert torch.equal(got, value)
    decoded, _, _ = draw(Case(T=1, S=300, H=4, D=16), device)
    with torch.no_grad():
        assert torch.equal(compiled(*decoded, sink=2), operator(*decoded, sink=2))


def watched(operator):
    """Return the operator under a dispatch mode, which sees its calls: they then go through torch.library."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def run(*args, **kwargs):
        with Watch():
            return operator(*args, **kwargs)

    return run


def check_one_gradient(device: str, backend: str = "triton") -> None:
    """With one input that requires a gradient, it gets the one it gets beside the others; no second derivative."""
    torch.manual_seed(0)
    inputs, (do, _), _ = draw(Case(T=20, D=16), device)

    def gradients(*wanted, **kwargs):
        given = [x if any(x is y for y in wanted) else x.detach() for x in inputs]
        o = forgetting_attention(*given, backend=backend)
        return torch.autograd.grad((o * do).sum(), wanted, **kwargs)

    together = gradients(*inputs)
    for x, expected in zip(inputs, together, strict=True):
        assert torch.equal(gradients(x)[0], expected)
    with pytest.raises(ValueError, match="second derivative"):
        gradients(*inputs, create_graph=True)


def check_copies_by_tma() -> None:
    """In the interpreter, what TMA would copy comes from tensor descriptors: same results, for every choice of them."""
    torch.manual_seed(0)
    case = Case(T=45, S=77, H=4, Hkv=2, D=32, starts=[3, 60], options={"sink": 2})
    inputs, gradients, options = draw(case)
    operator = partial(forgetting_attention, backend="triton")
    expected = results(operator, inputs, gradients, options)
    halves = [x.detach().half().requires_grad_() if n < 3 else x for n, x in enumerate(inputs)]
    for tma in (1, 2, 3):
        by_tma = {"describable": lambda *tensors: True, "tile_for": lambda *_, tma=tma: Tile(32, 32, 4, 1, tma)}
        with mock.patch.multiple(forward, **by_tma), mock.patch.multiple(backward, **by_tma):
            found = results(operator, halves, gradients, options)
        for got, value in zip(found, expected, strict=True):
            assert (got.float() - value).norm() <= 4e-3 * value.norm()
