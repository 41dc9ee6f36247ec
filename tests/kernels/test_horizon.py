"""The edges that a horizon leaves each head: by one kernel as by their definition. In Triton's interpreter."""

import json
import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")


def by_definition(c: torch.Tensor, horizon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return start and end of c (B, H, S) float64, natural units."""
    S = c.shape[-1]
    before = torch.ones(S, S, dtype=torch.bool).tril()
    near = (c[..., None, :] < (c + horizon)[..., None]) & before | torch.eye(S, dtype=torch.bool)
    start = near.int().argmax(-1)
    end = S - near.flip(-2).int().argmax(-2)
    return start, end


def differences() -> list[str]:
    """Problems for which the kernel's edges are not those of the definition and of the documents together."""
    from fox_kernels.common.cumsum import cumulative
    from fox_kernels.common.edges import edges
    from fox_kernels.common.horizon import edges_within

    wrong = []
    for seed, (S, horizon) in enumerate(((1, 8.0), (300, 0.5), (300, 8.0), (513, 3.0))):
        torch.manual_seed(seed)
        log_f = -torch.rand(1, S, 4) * torch.tensor([2.0, 0.1, 0.01, 0.0])
        c_hi, c_lo = cumulative(log_f)
        start, end = by_definition(log_f.double().cumsum(1).transpose(1, 2), horizon)
        cu_seqlens = torch.tensor([0, S // 3, S // 3, S], dtype=torch.int32)
        for cuts, padding in ((None, None), (cu_seqlens, None), (None, torch.tensor([S // 2], dtype=torch.int32))):
            known = edges(1, S, cuts, padding, None, "cpu")
            wanted = torch.stack((start, end))
            if known is not None:
                wanted[0] = wanted[0].maximum(known[0, :S])
                wanted[1] = wanted[1].minimum(known[1, :S])
            if not torch.equal(edges_within(c_hi, c_lo, known, horizon), wanted.int()):
                wrong.append(f"{S} {horizon} {cuts} {padding}")
    c_hi[:, :, 100:] = torch.nan
    start, end = edges_within(c_hi, c_lo, None, horizon)
    if not torch.equal(start[..., 100:], torch.arange(100, S).expand(1, 4, -1)) or end[..., :100].max() > 100:
        wrong.append("a query whose c is NaN doesn't see its own key alone")
    return wrong


def test_the_edges_are_those_of_the_definition(report):
    assert report == []


if __name__ == "__main__":
    assert os.environ["TRITON_INTERPRET"] == "1"
    print(json.dumps(differences()))
