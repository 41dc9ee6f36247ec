"""What rounding the softmax's weights to 16 bits costs: o less than in the usual order of sums, dv less than all of it;
gates by TMA change nothing."""

# The reference returns o or (o, lse):
# pyright: reportOperatorIssue=false, reportAttributeAccessIssue=false

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed here")

GATES = ("open", "mixed", "short")


def usual(scores, v, block: int):
    """Online softmax of scores (H, T, T) from the diagonal outwards: weights relative to the largest score so far and
    rounded to v's 16 bits for the product with v (H, T, D), o divided by their sum before they were rounded."""
    import torch

    H, T, _ = scores.shape
    m, total, o = torch.full((H, T, 1), -torch.inf), torch.zeros(H, T, 1), torch.zeros(v.shape)
    for n in reversed(range(0, T, block)):
        s = scores[..., n : n + block]
        top = torch.maximum(m, s.amax(-1, keepdim=True))
        base = top.masked_fill(top == -torch.inf, 0)
        p, alpha = (s - base).exp(), (m - base).exp()
        total = total * alpha + p.sum(-1, keepdim=True)
        o = o * alpha + p.to(v.dtype).float() @ v[:, n : n + block].float()
        m = top
    return o / total


def of_o() -> dict[str, list[float]]:
    """Return the errors of o before it is rounded, in the usual order and ours, by gates; runs interpreted."""
    import torch
    from cases import gates
    from fox_kernels import reference
    from fox_kernels.common import cumsum
    from fox_kernels.options import Options
    from fox_kernels.plain import forward
    from fox_kernels.plain.tiles import Tile

    errors = {}
    for gate in GATES:
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, 160, 4, 16).half() for _ in range(3))
        log_f = gates(gate, 1, 160, 4)
        exact = reference.forgetting_attention(*(x.double() for x in (q, k, v, log_f)))
        sums, lost = cumsum.cumulative(log_f), torch.empty_like(q)
        o, _ = forward.launch_forward(q, k, v, *sums, Options(0.25), residual=lost, tile=Tile(32, 32, 4, 1))
        c = log_f.double().cumsum(1)[0].T
        scores = torch.einsum("qhd,khd->hqk", q[0].double(), k[0].double()) / 4 + c[:, :, None] - c[:, None, :]
        scores = scores.masked_fill(torch.ones(160, 160).triu(1) > 0, -torch.inf).float()
        twin = usual(scores, v[0].transpose(0, 1), 32).transpose(0, 1)[None]
        errors[gate] = [((x.double() - exact).norm() / exact.norm()).item() for x in (twin, o.double() + lost.double())]
        forward.describable = lambda *tensors: True
        described, _ = forward.launch_forward(q, k, v, *sums, Options(0.25), tile=Tile(32, 32, 4, 1, 2, True))
        assert torch.equal(described, o)
    return errors


def problem(T: int, D: int, gate: str, sink: int = 0, softcap: float | None = None):
    """Return q, k, v, do in half precision, 4 query heads on 2 kv heads, log_f, and the weights in float64."""
    import torch
    from cases import gates

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
    import torch

    return torch.einsum("bhij,bihd->bjhd", p, do.double()).unflatten(2, (2, 2)).sum(3)


def of_dv() -> dict[str, list[float]]:
    """Return the errors of dv with all weights rounded and ours, by gates; runs interpreted."""
    import torch
    from fox_kernels import forgetting_attention

    errors = {}
    for gate in GATES:
        q, k, v, do, log_f, p = problem(160, 16, gate)
        v.requires_grad_()
        o = forgetting_attention(q, k, v, log_f, scale=0.25, backend="triton")
        (ours,) = torch.autograd.grad(o, v, do)
        exact, rounded = products(p, do), products(p.half().double(), do).half()
        errors[gate] = [((x.double() - exact).norm() / exact.norm()).item() for x in (rounded, ours)]
    return errors


def of_the_first() -> dict[str, float]:
    """Return how far what the kernel finds lost is from what is, relative; runs interpreted."""
    from fox_kernels.common import cumsum, first_weights
    from fox_kernels.options import Options
    from fox_kernels.plain.forward import launch_forward

    errors = {}
    for T, D, sink, softcap in ((70, 16, 0, None), (64, 80, 3, None), (20, 32, 0, 4.0), (1, 16, 0, None)):
        q, k, v, do, log_f, p = problem(T, D, "mixed", sink, softcap)
        sums = cumsum.cumulative(log_f)
        options = Options(0.25, sink=sink, softcap=softcap)
        _, lse2 = launch_forward(q, k, v, *sums, options)
        lost = first_weights.lost_to_rounding(q, k, do, lse2, *sums, options)
        first = p[..., :64, :64].float()
        exact = products((first - first.half().float()).double(), do[:, :64]).transpose(1, 2)
        assert (lost[:, :, T:] == 0).all()
        errors[f"{T}, {D}, {sink}, {softcap}"] = ((lost[:, :, :T] - exact).norm() / exact.norm().clamp(1e-9)).item()
    return errors


@pytest.mark.timeout(300)
def test_rounded_weights_cost_o_less_than_in_the_usual_order(report):
    for gate, (in_usual_order, ours) in report["o"].items():
        assert ours <= 0.95 * in_usual_order, (gate, ours, in_usual_order)


def test_rounded_weights_cost_dv_less_than_all_of_them_would(report):
    for gate, (all_rounded, ours) in report["dv"].items():
        assert ours <= {"open": 0.9, "mixed": 0.97, "short": 0.97}[gate] * all_rounded, (gate, ours, all_rounded)


def test_what_the_first_weights_lose_is_found(report):
    assert max(report["first"].values()) < 0.1, report["first"]  # weights near the middle round either way


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    print(json.dumps({"o": of_o(), "dv": of_dv(), "first": of_the_first()}))
