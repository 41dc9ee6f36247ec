"""The proof list at real sizes, on a GPU: `pytest -m gpu tests/kernels/test_gpu.py`, or run the file for a table."""

# The operator returns o or (o, lse), options travel as dicts and strict zips of slices are beyond the checker:
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

import itertools
import random

import pytest
import torch
from cases import LAYOUTS, Case, draw, errors, failures, gates
from fox_kernels import forgetting_attention
from launchers import check_decoding, check_merging, check_nan, check_one_gradient

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def proof_list() -> list[Case]:
    """Every line of the proof list, one feature at a time and then mixed."""
    r = random.Random(0)
    documents = sorted({1, 2, 4, 700, 701, 1030, *(r.randrange(1100) for _ in range(6))})
    cases = [Case(T=1025, H=4, Hkv=2, D=D, dtype=BF16) for D in (16, 32, 64, 80, 96, 128, 256)]
    cases += [Case(T=513, H=4, Hkv=2, D=D, dtype=FP16) for D in (16, 32, 64, 80, 96, 128, 256)]
    cases += [Case(T=257, H=4, Hkv=2, D=D, dtype=FP32) for D in (16, 32, 64, 80, 96, 128, 256)]
    cases += [Case(T=777, D=D, dtype=BF16, gate=g) for g in ("open", "short", "shut", "zeros") for D in (64, 128)]
    cases += [Case(T=300, D=64, dtype=FP32, gate=g) for g in ("open", "shut", "zeros")]
    for H, Hkv in ((1, 1), (3, 1), (8, 1), (8, 8), (10, 2), (7, 1), (12, 1)):
        cases.append(Case(T=400, H=H, Hkv=Hkv, D=64, dtype=BF16))
    for T, S in ((1, 1), (2, 2), (333, 1500), (1, 4097), (3, 2049), (16, 1000), (129, 130)):
        cases.append(Case(T=T, S=S, H=8, Hkv=2, D=128, dtype=BF16))
        cases.append(Case(T=T, S=S, H=4, Hkv=1, D=80, dtype=BF16, starts=[0, S // 3], options={"sink": 2}))
    extras = [
        {},
        {"window": 100},
        {"sink": 4},
        {"softcap": 20.0},
        {"window": 64, "sink": 4},
        {"sink": 1, "horizon": 8.0},
    ]
    for extra, D in itertools.product(extras, (64, 128)):
        cases.append(Case(B=1, T=1100, D=D, dtype=BF16, cuts=documents, options=extra))
        cases.append(Case(T=700, D=D, dtype=BF16, starts=[3, 700], options=extra))
        cases.append(Case(T=900, D=D, dtype=BF16, options=extra))
    for gate, D in itertools.product(("short", "open", "mixed"), (64, 128)):
        cases.append(Case(T=2048, D=D, dtype=BF16, gate=gate, options={"horizon": 8.0}))
    cases.append(Case(T=2048, D=64, dtype=BF16, gate="short", options={"horizon": 8.0, "softcap": 15.0, "sink": 4}))
    cases += [Case(T=500, D=64, dtype=BF16, layout=layout) for layout in LAYOUTS[1:]]
    cases += [Case(T=300, S=400, H=4, Hkv=2, D=D, dtype=BF16, layout="odd") for D in (16, 32, 80, 96, 128, 256)]
    cases += [Case(B=1, T=200, D=D, dtype=dtype, layout="odd") for D in (80, 96) for dtype in (FP16, FP32)]
    cases += [Case(T=500, D=64, dtype=BF16, options={"scale": s}) for s in (1.0, 0.0, -0.2, 1e-30, 20.0)]
    cases += [Case(T=400, S=500, D=64, dtype=BF16, options={"window": w}) for w in (1, 2, 5000)]
    cases += [Case(T=400, S=500, D=64, dtype=BF16, options={"sink": n}) for n in (100, 5000)]
    cases.append(Case(B=1, T=600, D=64, dtype=BF16, cuts=[0, 0, 5, 5, 300], options={"sink": 100}))
    everything = {"window": 90, "sink": 7, "softcap": 9.0, "horizon": 6.0, "scale": -0.1}
    for D, layout in ((64, "odd"), (80, "last"), (256, "expanded")):
        shape = {"B": 1, "T": 300, "S": 700, "H": 10, "Hkv": 2, "D": D, "dtype": BF16, "layout": layout}
        cases.append(Case(**shape, cuts=[1, 2, 2, 350, 600], starts=[200], options=everything))
    return cases


@pytest.mark.parametrize("case", proof_list(), ids=Case.name)
def test_error_at_most_twice_eager(case):
    """Of outputs written to poisoned memory, the same bit for bit in two runs."""
    torch.manual_seed(0)
    assert failures(case, "cuda") == []


def gate_error(T: int, mean: float, D: int = 64, dtype=BF16, backend="triton") -> float:
    """Return the RMS error of dlog_f relative to float64, for gates of a mean log f."""
    H = 2
    q, k, v, do = (torch.randn(1, T, H, D, device="cuda").to(dtype) for _ in range(4))
    log_f = torch.zeros(1, T, H, device="cuda")
    if mean < 0:
        log_f = log_f.exponential_().mul_(mean)
    results = []
    for dt, kwargs in ((torch.float64, {"backend": "chunked"}), (dtype, {"backend": backend})):
        inputs = [x.to(dt).requires_grad_() for x in (q, k, v)]
        gate = log_f.clone().requires_grad_()
        forgetting_attention(*inputs, gate, **kwargs).backward(do.to(dt))
        assert gate.grad is not None
        results.append(gate.grad.double())
    return ((results[1] - results[0]).norm() / results[0].norm()).item()


@pytest.mark.parametrize("mean", [0.0, -1.0, -3.0])
@pytest.mark.parametrize(("T", "D"), [(4096, D) for D in (16, 32, 64, 80, 96, 128, 256)] + [(32768, 64), (32768, 128)])
def test_gate_gradient_within_half_a_percent(T, D, mean):
    torch.manual_seed(0)
    assert gate_error(T, mean, D=D) <= 5e-3


def test_more_blocks_than_a_grid_dimension_holds():
    torch.manual_seed(0)
    assert failures(Case(B=70000, T=3, H=2, D=16, dtype=BF16, options={"horizon": 8.0}), "cuda") == []


def test_offsets_beyond_32_bits():
    torch.manual_seed(0)
    T, stride = 70000, 1 << 15  # the last row starts at element 2.3e9
    wide = torch.empty(T, stride, dtype=BF16, device="cuda")
    q, k, v = (wide[None, :, None, n * 16 : n * 16 + 16] for n in range(3))
    for x in (q, k, v):
        x.copy_(torch.randn(1, T, 1, 16, device="cuda"))
    log_f = gates("short", 1, T, 1, device="cuda")
    results = []
    for tensors in ((q, k, v), (q.contiguous(), k.contiguous(), v.contiguous())):
        inputs = [x.detach().requires_grad_() for x in tensors]
        o = forgetting_attention(*inputs, log_f, window=3000, backend="triton")
        results.append([o, *torch.autograd.grad(o.sum(dtype=FP32), inputs)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_parts_of_the_keys_merge_by_lse():
    check_merging("cuda", 640, 64)


def test_each_input_may_be_the_only_one_with_a_gradient():
    check_one_gradient("cuda")


def test_decode_on_a_padded_batch_from_a_longer_cache():
    check_decoding("cuda", 5000, BF16, 4e-3)


@pytest.mark.parametrize("D", [80, 96])
@pytest.mark.parametrize("T", [1, 3, 8])
def test_decoding_from_rows_of_odd_strides(T, D):
    torch.manual_seed(0)
    inputs, _, _ = draw(Case(T=T, S=900, H=16, Hkv=2, D=D, dtype=BF16, layout="odd"), "cuda")
    with torch.no_grad():
        o = forgetting_attention(*inputs, backend="triton")
        exact = forgetting_attention(*[x.double() for x in inputs], backend="chunked")
    assert (o - exact).norm() <= 4e-3 * exact.norm()


def test_nan_in_a_gate_is_no_empty_row():
    check_nan("cuda")


if __name__ == "__main__":
    for proof in proof_list():
        rows = errors(proof, "cuda")
        verdict = "FAIL" if failures(proof, "cuda") else "ok"
        print(verdict, proof.name(), " ".join(f"{name} {a:.1e}/{b:.1e}" for name, a, b in rows), flush=True)
