"""What rounding the softmax's weights to 16 bits costs o: less than in the usual order of sums; gates by TMA change
nothing."""

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


def measured() -> dict[str, list[float]]:
    """Return the errors of o before it is rounded, in the usual order and ours, by gates; runs interpreted."""
    import torch
    from cases import gates
    from fox_kernels import cumsum, forward, reference
    from fox_kernels.tiles import Tile

    errors = {}
    for gate in GATES:
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, 160, 4, 16).half() for _ in range(3))
        log_f = gates(gate, 1, 160, 4)
        exact = reference.forgetting_attention(*(x.double() for x in (q, k, v, log_f)))
        sums, lost = cumsum.cumulative(log_f), torch.empty_like(q)
        o, _ = forward.launch_forward(q, k, v, *sums, scale=0.25, residual=lost, tile=Tile(32, 32, 4, 1))
        c = log_f.double().cumsum(1)[0].T
        scores = torch.einsum("qhd,khd->hqk", q[0].double(), k[0].double()) / 4 + c[:, :, None] - c[:, None, :]
        scores = scores.masked_fill(torch.ones(160, 160).triu(1) > 0, -torch.inf).float()
        twin = usual(scores, v[0].transpose(0, 1), 32).transpose(0, 1)[None]
        errors[gate] = [((x.double() - exact).norm() / exact.norm()).item() for x in (twin, o.double() + lost.double())]
        forward.describable = lambda *tensors: True
        described, _ = forward.launch_forward(q, k, v, *sums, scale=0.25, tile=Tile(32, 32, 4, 1, 2, 1))
        assert torch.equal(described, o)
    return errors


@pytest.mark.timeout(300)
def test_rounded_weights_cost_o_less_than_in_the_usual_order(report):
    for gate, (in_usual_order, ours) in report.items():
        assert ours <= 0.95 * in_usual_order, (gate, ours, in_usual_order)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    print(json.dumps(measured()))
