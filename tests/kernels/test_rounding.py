"""What rounding the softmax's weights to 16 bits costs: o less than in the usual order of sums, dv less than all of it;
gates by TMA change nothing."""

from unittest import mock

import pytest
import torch
from cases import gates
from fox_kernels import forgetting_attention, reference

pytest.importorskip("triton", reason="Triton is not installed here")
from fox_kernels.common import cumsum, first_weights
from fox_kernels.options import Options
from fox_kernels.triton import forward
from fox_kernels.triton.tiles import Tile

# Errors of o in the usual order of sums, computed in torch for the problem below: weights relative to the largest score
# so far, rounded to 16 bits for the product with v, o divided by their sum before they were rounded.
USUAL = {"open": 1.333e-4, "mixed": 1.025e-4, "short": 1.319e-4}


def of_o() -> dict[str, float]:
    """Return the errors of o before it is rounded, by gates; runs interpreted."""
    errors = {}
    for gate in USUAL:
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, 160, 4, 16).half() for _ in range(3))
        log_f = gates(gate, 1, 160, 4)
        exact = reference.forgetting_attention(*(x.double() for x in (q, k, v, log_f)))
        sums, lost = cumsum.cumulative(log_f), torch.empty_like(q)
        o, _ = forward.launch_forward(q, k, v, *sums, Options(0.25), residual=lost)
        errors[gate] = ((o.double() + lost.double() - exact).norm() / exact.norm()).item()
        by_tma = {"describable": lambda *tensors: True, "tile_for": lambda *_: Tile(32, 32, 4, 1, 2, True)}
        with mock.patch.multiple(forward, **by_tma):
            described, _ = forward.launch_forward(q, k, v, *sums, Options(0.25))
        assert torch.equal(described, o)
    return errors


def problem(T: int, D: int, gate: str, sink: int = 0, softcap: float | None = None):
    """Return q, k, v, do in half precision, 4 query heads on 2 kv heads, log_f, and the weights in float64."""
    torch.manual_seed(1)
    q, do = (torch.randn(2, T, 4, D).half() for _ in range(2))
    k, v = (torch.randn(2, T, 2, D).half() for _ in range(2))
    log_f = gates(gate, 2, T, 4)
    s = torch.einsum("bihd,bjhd->bhij", q.double(), k.double().repeat_interleave(2, 2)) / 4
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    c = log_f.double().cumsum(1).transpose(1, 2)
    s += torch.where(torch.arange(T) < sink, 0.0, c[..., :, None] - c[..., None, :])
    return q, k, v, do, log_f, s.masked_fill(torch.ones(T, T).triu(1) > 0, -torch.inf).softmax(-1)


def products(p, do):
    """Return sum_i p_ij do_i (B, T, Hkv, D) in float64, over the query heads of a group too."""
    return torch.einsum("bhij,bihd->bjhd", p, do.double()).unflatten(2, (2, 2)).sum(3)


def of_dv() -> dict[str, list[float]]:
    """Return the errors of dv with all weights rounded and ours, by gates; runs interpreted."""
    errors = {}
    for gate in USUAL:
        q, k, v, do, log_f, p = problem(160, 16, gate)
        v.requires_grad_()
        o = forgetting_attention(q, k, v, log_f, scale=0.25, backend="triton")
        (ours,) = torch.autograd.grad(o, v, do)
        exact, rounded = products(p, do), products(p.half().double(), do).half()
        errors[gate] = [((x.double() - exact).norm() / exact.norm()).item() for x in (rounded, ours)]
    return errors


def of_the_first() -> dict[str, float]:
    """Return how far what the kernel finds lost is from what is, relative; runs interpreted."""
    errors = {}
    for T, D, sink, softcap in ((70, 16, 0, None), (64, 80, 3, None), (20, 32, 0, 4.0), (1, 16, 0, None)):
        q, k, v, do, log_f, p = problem(T, D, "mixed", sink, softcap)
        sums = cumsum.cumulative(log_f)
        options = Options(0.25, sink=sink, softcap=softcap)
        _, lse2 = forward.launch_forward(q, k, v, *sums, options)
        lost = first_weights.lost_to_rounding(q, k, do, lse2, *sums, options)
        first = p[..., :64, :64].float()
        exact = products((first - first.half().float()).double(), do[:, :64]).transpose(1, 2)
        assert (lost[:, :, T:] == 0).all()
        errors[f"{T}, {D}, {sink}, {softcap}"] = ((lost[:, :, :T] - exact).norm() / exact.norm().clamp(1e-9)).item()
    return errors


def in_interpreter() -> dict:
    return {"o": of_o(), "dv": of_dv(), "first": of_the_first()}


@pytest.mark.timeout(300)
def test_rounded_weights_cost_o_less_than_in_the_usual_order(report):
    for gate, error in report["o"].items():
        assert error <= 0.95 * USUAL[gate], (gate, error)


def test_rounded_weights_cost_dv_less_than_all_of_them_would(report):
    for gate, (all_rounded, ours) in report["dv"].items():
        assert ours <= {"open": 0.9, "mixed": 0.97, "short": 0.97}[gate] * all_rounded, (gate, ours, all_rounded)


def test_what_the_first_weights_lose_is_found(report):
    assert max(report["first"].values()) < 0.1, report["first"]  # weights near the middle round either way
