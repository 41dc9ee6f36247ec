"""Norms with residual sums, and SiLU products: in Triton's interpreter, on a GPU, and compiled without one."""

import pytest
import torch
from cases import broken

pytest.importorskip("triton", reason="Triton is not installed here")
from fox_kernels.decoding.elementwise import add_norm, gate_rows, silu_mul, takes, takes_few
from twins import add_norm_torch, gate_torch, silu_mul_torch

CASES = ((1, 576, torch.float32), (300, 48, torch.float16), (3, 1000, torch.float32), (16, 4096, torch.float16))


def close(a, b, dtype) -> None:
    torch.testing.assert_close(
        a, b, atol=1e-6, rtol={torch.float32: 2e-6}.get(dtype, 2e-3 if dtype == torch.float16 else 1e-2)
    )


def check_twins(device: str, dtypes=()) -> None:
    torch.manual_seed(0)
    for rows, K, dtype in (*CASES, *((4, 576, dtype) for dtype in dtypes)):
        x, r, w = (torch.randn(*shape, device=device).to(dtype) for shape in ((rows, 1, K), (rows, 1, K), (K,)))
        with torch.no_grad():
            for residual in (None, r, r.transpose(0, 1).contiguous().transpose(0, 1)):
                got, wanted = add_norm(x, residual, w, 1e-5), add_norm_torch(x, residual, w, 1e-5)
                assert torch.equal(got[0], wanted[0])
                close(got[1], wanted[1], dtype)
            weight, bias = torch.randn(6, K, device=device) / K**0.5, 9 * torch.randn(6, device=device)
            torch.testing.assert_close(gate_rows(x, weight, bias), gate_torch(x, weight, bias), atol=1e-6, rtol=1e-5)
            close(silu_mul(5 * x, r), silu_mul_torch(5 * x, r), dtype)


def check_what_they_take(device: str) -> None:
    x, w = torch.randn(2, 1, 64, device=device), torch.ones(64, device=device)
    assert not takes(x)  # gradients are recorded
    with torch.no_grad():
        assert takes(x, w)
        assert takes_few(x)
        assert not takes(x, w.double())
        assert not takes(x.transpose(0, 2), w)
        many = x.expand(2, 500, 64).contiguous()
        assert takes(many, w)
        assert not takes_few(many)


CHECKS = {"twins": check_twins, "what they take": check_what_they_take}


def in_interpreter() -> dict[str, str]:
    return broken(CHECKS, "cpu")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("check", CHECKS)
def test_in_the_interpreter(check, report):
    assert not report[check]


@pytest.mark.gpu
def test_on_a_gpu():
    check_twins("cuda", (torch.bfloat16,))
