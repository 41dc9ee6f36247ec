"""Where what positions see begins and ends, for all heads and within a horizon: by kernels as by torch."""

import itertools

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from cases import gates
from fox_kernels.common.cumsum import cumulative
from fox_kernels.common.edges import edges
from fox_kernels.common.horizon import edges_within
from twins import edges_torch

CUTS = (None, [0, 9], [0, 3, 4, 9], [0, 0, 1, 9, 9], [0, *range(1, 2000, 3), 2500], [0, 2, 2, 7])  # the last is short


def differences(device) -> list[str]:
    """Problems for which the kernel and its twin differ."""
    wrong = []
    dtypes = (torch.int32, torch.int64)
    for cuts, starts, window, dtype in itertools.product(CUTS, (None, [0], [4], [9], [2, 9, 0]), (None, 1, 5), dtypes):
        S, B = (9 if cuts is None or cuts[-1] < 9 else cuts[-1]), len(starts or [0])
        if cuts is not None and B > 1:
            continue
        cu_seqlens = None if cuts is None else torch.tensor(cuts, dtype=dtype, device=device)
        seq_start = None if starts is None else torch.tensor(starts, dtype=dtype, device=device)
        got = edges(B, S, cu_seqlens, seq_start, window, device)
        wanted = edges_torch(B, S, cu_seqlens, seq_start, window, device)
        same = got is wanted is None
        if got is not None and wanted is not None:
            same = torch.equal(got[:, : B * S].view(2, B, S), wanted)
        if not same:
            wrong.append(f"{cuts and cuts[:6]} {starts} {window} {dtype}")
    return wrong


@pytest.mark.gpu
def test_the_kernel_finds_what_torch_finds_on_a_gpu():
    assert differences("cuda") == []


def by_definition(c: torch.Tensor, horizon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return start and end of c (B, H, S) float64, natural units."""
    S = c.shape[-1]
    before = torch.ones(S, S, dtype=torch.bool).tril()
    near = (c[..., None, :] < (c + horizon)[..., None]) & before | torch.eye(S, dtype=torch.bool)
    start = near.int().argmax(-1)
    end = S - near.flip(-2).int().argmax(-2)
    return start, end


def differences_within() -> list[str]:
    """Problems for which the kernel's edges are not those of the definition and of the documents together."""
    wrong = []
    for seed, (S, horizon) in enumerate(((1, 8.0), (300, 0.5), (300, 8.0), (513, 3.0))):
        torch.manual_seed(seed)
        log_f = -torch.rand(1, S, 4) * torch.tensor([2.0, 0.1, 0.01, 0.0])
        log_f[..., 3] = gates("halves", 1, S)
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


def in_interpreter() -> dict[str, list[str]]:
    return {"documents": differences("cpu"), "horizon": differences_within()}


def test_the_kernel_finds_what_torch_finds_and_with_a_horizon_what_its_definition_says(report):
    assert report == {"documents": [], "horizon": []}
