"""The kernels attacked from outside, on inputs that the proof list has none of: in Triton's interpreter on a CPU.

No kernel may touch memory outside the tensors which it was given.
"""

import pytest
import torch
from cases import broken
from fox_kernels import forgetting_attention

pytest.importorskip("triton", reason="Triton is not installed here")
import bounds
from fox_kernels import forward_backward
from fox_kernels.layer.norm import head_norm
from fox_kernels.layer.shift import shift
from fox_kernels.options import Backend, Documents, Options, Saved

FP16 = torch.float16


def check_heads_far_apart_in_memory() -> None:
    """A head's distance times its number passes 2^31: x of the fused helpers may be laid out heads first."""
    torch.manual_seed(0)
    room = torch.empty(2**31 + 2**20, dtype=FP16)  # of which little is touched, so little exists

    def far(n: int) -> torch.Tensor:
        x = room.as_strided((1, 3, 3, 16), (0, 16, 2**30 + 16, 1), 64 * n)
        return x.copy_(torch.randn(1, 3, 3, 16)).detach().requires_grad_(n == 0)

    x, dy, gain, amount = far(0), far(1), torch.rand(3, 16), torch.rand(1, 3, 3)
    for function in (lambda x: head_norm(x, gain, None), lambda x: shift(x, amount)):
        near, wanted = x.detach().clone(memory_format=torch.contiguous_format).requires_grad_(), dy.contiguous()
        y, z = function(x), function(near)
        assert torch.equal(y, z)
        assert torch.equal(*torch.autograd.grad(y, x, dy), *torch.autograd.grad(z, near, wanted))


def check_nan_through_lse(device: str = "cpu", backend: str = "triton") -> None:
    """Merging parts by lse gives NaN as the gradient of -inf, of rows that see nothing: it stays out of the others."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 100, 2, 64, device=device).to(FP16).requires_grad_() for _ in range(3))
    log_f = -torch.rand(2, 100, 2, device=device)
    start = torch.tensor([33, 100], dtype=torch.int32, device=device)
    inputs = (q, k, v, log_f.requires_grad_())
    o, lse = forgetting_attention(*inputs, seq_start=start, return_lse=True, backend=backend)
    both = torch.logaddexp(lse, lse)
    seen = both > -torch.inf
    found = torch.autograd.grad(o.float().sum() + both.masked_fill(~seen, 0).sum(), inputs, retain_graph=True)
    wanted = torch.autograd.grad(o.float().sum() + lse.masked_fill(~seen, 0).sum(), inputs)
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


CHECKS = {name: check for name, check in dict(globals()).items() if name.startswith("check_")}


def in_interpreter() -> dict[str, str]:
    with bounds.enforced():
        return broken(CHECKS)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("check", CHECKS)
def test_in_the_interpreter(check, report):
    assert not report[check]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_nan_through_lse_on_a_gpu(backend):
    check_nan_through_lse("cuda", backend)


def test_what_the_hopper_backward_is_handed_of_rows_that_see_nothing(monkeypatch):
    handed = []

    def launch(do, dlse2, q, k, v, *_, **__):
        handed.append(dlse2)
        return q, k, v, torch.zeros(1, 1, 3)

    monkeypatch.setattr(forward_backward, "launchers", lambda backend: (None, launch))
    monkeypatch.setattr(forward_backward.cumsum, "gate_gradient", lambda dc, log_f: log_f)
    x, lse2 = torch.zeros(1, 3, 1, 8), torch.tensor([[[-torch.inf, 1.0, 2.0]]])
    for start, expected in (
        (torch.tensor([1], dtype=torch.int32), [0.0, torch.nan, 3.0]),
        (None, [torch.nan] * 2 + [3.0]),
    ):
        given = torch.tensor([[[torch.nan, torch.nan, 3.0]]])
        documents, way = Documents(seq_start=start), Backend("gluon", True, True)
        forward_backward.differentiate(x, given, x, x, x, x, Saved(x, lse2, x, x), Options(1.0), documents, way)
        torch.testing.assert_close(handed.pop(), torch.tensor([[expected]]), equal_nan=True)
