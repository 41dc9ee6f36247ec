"""Tensors of more than 2^31 elements, grids of more than 65535 blocks and 32768 tokens, by every backend, on a GPU.

A float64 reference of that size does not fit, so a large problem is compared with the same rows run on their own.
"""

import pytest
import torch
from cases import gates, laid_out
from fox_kernels import deterministic as deterministically
from fox_kernels import forgetting_attention
from fox_kernels.common import cumsum
from test_gpu import NO_GLUON, gluon

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


def check_rows(rows: list[int], B: int, T: int, H: int, Hkv: int, D: int, **options) -> None:
    """A batch of B gives in these rows, forward and backward, what the rows give in a batch of their own."""
    torch.manual_seed(0)
    q, do = (torch.randn(B, T, H, D, device="cuda", dtype=BF16) for _ in range(2))
    k, v = (torch.randn(B, T, Hkv, D, device="cuda", dtype=BF16) for _ in range(2))
    log_f = gates("short", B, T, H, device="cuda")

    def results(choose) -> list[torch.Tensor]:
        inputs = [choose(x).requires_grad_() for x in (q, k, v, log_f)]
        o = forgetting_attention(*inputs, **options)
        return [o.detach(), *torch.autograd.grad(o, inputs, choose(do))]

    expected = results(lambda x: x[rows].contiguous())
    whole = results(lambda x: x.detach())
    for name, a, b in zip(("o", "dq", "dk", "dv", "dlog_f"), whole, expected, strict=True):
        for n, row in enumerate(rows):
            assert (a[row] - b[n]).float().norm() <= 1e-3 * b[n].float().norm(), (name, row)


@pytest.mark.parametrize("backend", ["triton", gluon])
def test_more_than_two_to_the_31_elements(backend):
    if torch.cuda.mem_get_info()[0] < 40e9:
        pytest.skip("needs 40 GB of free GPU memory")
    B, T, H, D = 65, 8192, 32, 128
    assert B * T * H * D > 2**31
    check_rows([0, B - 1], B, T, H, 2, D, backend=backend)
    torch.cuda.empty_cache()


@pytest.mark.parametrize("backend", ["triton", gluon])
def test_keys_and_values_are_neither_repeated_nor_copied(backend):
    """64 query heads share two of k and v, 4 MB each; what grows with all heads are the gates' sums, 2 MB each."""
    T, S, H, D = 64, 8192, 64, 128

    def peak(layout: str) -> int:
        torch.manual_seed(0)
        shapes = ((T, H), (S, 2), (S, 2), (T, H))
        q, k, v, do = (laid_out(torch.randn(1, n, h, D, device="cuda", dtype=BF16), layout) for n, h in shapes)
        inputs = [x.requires_grad_() for x in (q, k, v, gates("mixed", 1, S, H, device="cuda").mul_(1e-2))]
        taken = 0
        for _ in range(4):  # the first run compiles, the next is recorded
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = asked_for("current")
            torch.autograd.grad(forgetting_attention(*inputs, backend=backend), inputs, do)
            taken = asked_for("peak") - before
        return taken

    def asked_for(when: str) -> int:  # what is handed out may be 1 MB larger, as blocks happen to be split
        return torch.cuda.memory_stats()[f"requested_bytes.all.{when}"]

    plain = peak("plain")
    assert plain <= 48 << 20  # repeated, k and v alone would take 256 MB
    for layout in ("heads", "packed", "tokens first"):
        assert peak(layout) <= plain + (1 << 16), layout


@pytest.mark.parametrize("horizon", [None, 8.0])
@pytest.mark.parametrize("backend", ["triton", gluon])
def test_more_than_65535_blocks(backend, horizon):
    rows = range(0, 35001, 100)  # enough for the Hopper backward to walk as it does in the whole batch
    check_rows([*rows], 35001, 70, 2, 1, 64, backend=backend, horizon=horizon)


def test_decoding_from_a_cache_of_more_than_two_to_the_31_elements():
    torch.manual_seed(0)
    B, S, H, Hkv, D = 17, 131072, 16, 8, 128
    q = torch.randn(B, 1, H, D, device="cuda", dtype=BF16)
    k, v = (torch.randn(B, S, Hkv, D, device="cuda", dtype=BF16) for _ in range(2))
    log_f = -torch.rand(B, S, H, device="cuda") * 1e-4
    assert k.numel() > 2**31
    with torch.no_grad():
        whole = forgetting_attention(q, k, v, log_f)
        alone = forgetting_attention(q[-1:], k[-1:], v[-1:], log_f[-1:])
    assert (whole[-1:] - alone).norm() <= 4e-3 * alone.norm()  # the keys are split otherwise, o is rounded to bf16


def test_cumulative_gates_of_a_million_tokens():
    log_f = gates("short", 1, 1 << 20, 2, device="cuda")
    hi, lo = cumsum.cumulative(log_f)
    exact = log_f.double().transpose(1, 2).cumsum(-1) / torch.log(torch.tensor(2.0, dtype=torch.float64)).item()
    assert (hi.double() + lo.double() - exact).abs().max() <= 1e-12 * exact.abs().max()


@pytest.mark.skipif(bool(NO_GLUON), reason=str(NO_GLUON))
@pytest.mark.parametrize(("H", "Hkv", "D", "deterministic"), [(10, 5, 64, True), (6, 6, 128, True), (10, 5, 64, False)])
def test_walks_that_begin_in_rounds_give_the_same_gradients(H, Hkv, D, deterministic, monkeypatch):
    """Bit for bit where dq is summed in order; 131072 tokens and some, so that the last round is not full."""
    from fox_kernels.hopper import backward

    torch.manual_seed(0)
    T = backward.LONG + 200
    q, do = (torch.randn(1, T, H, D, device="cuda", dtype=BF16) for _ in range(2))
    k, v = (torch.randn(1, T, Hkv, D, device="cuda", dtype=BF16) for _ in range(2))
    inputs = [x.requires_grad_() for x in (q, k, v, gates("open", 1, T, H, device="cuda"))]

    def gradients(long: int) -> tuple[torch.Tensor, ...]:
        monkeypatch.setattr(backward, "LONG", long)
        backward._plans.clear()
        with deterministically(deterministic):
            o = forgetting_attention(*inputs, backend="gluon")
            return torch.autograd.grad(o, inputs, do)

    rounds, as_they_come = gradients(backward.LONG), gradients(1 << 30)
    for name, a, b in zip(("dq", "dk", "dv", "dlog_f"), rounds, as_they_come, strict=True):
        if deterministic:
            assert torch.equal(a, b), name
        else:
            assert (a - b).float().norm() <= 1e-3 * b.float().norm(), name
