"""The Hopper kernels on a GPU: `pytest -m gpu tests/kernels/test_hopper_gpu.py`."""

import itertools
from typing import Any

import pytest
import torch
from cases import Case, failures, gates
from fox_kernels import forward_backward, reference
from fox_kernels.common import cumsum
from fox_kernels.hopper import forward as hopper_forward
from fox_kernels.hopper.backward import launch_backward
from fox_kernels.hopper.forward import launch_forward
from fox_kernels.options import Documents, Options, Saved

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
MISSING = hopper_forward.gluon_missing() or ("" if HOPPER else "needs a Hopper GPU")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(MISSING), reason=str(MISSING))]

BF16, FP16 = torch.bfloat16, torch.float16


def problems() -> list[Case]:
    """Every option that the Hopper kernels take, at lengths that fill no tile."""
    cases = [Case(T=1025, H=4, Hkv=2, D=D, dtype=dtype) for D in (64, 80, 96, 128) for dtype in (BF16, FP16)]
    cases += [Case(T=777, D=D, dtype=BF16, gate=g) for g in ("open", "short", "shut", "zeros") for D in (64, 128)]
    cases += [Case(T=T, S=S, H=8, Hkv=2, D=128, dtype=BF16) for T, S in ((64, 64), (333, 1500), (129, 130))]
    extras = [{}, {"window": 100}, {"sink": 4}, {"horizon": 8.0}]
    for extra, D in itertools.product(extras, (64, 128)):
        cases.append(Case(B=1, T=1100, D=D, dtype=BF16, cuts=[1, 3, 700, 701, 1030], options=extra))
        cases.append(Case(T=700, H=4, D=D, dtype=BF16, starts=[3, 700], options=extra))
        cases.append(Case(T=900, H=3, D=D, dtype=BF16, options=extra))
        # queries that begin amid a block of keys, in tiles of which padding hides all rows or the first ones
        cases.append(Case(B=3, T=700, S=705, H=4, D=D, dtype=BF16, starts=[705, 400, 130], options=extra))
        cases.append(Case(B=1, T=700, S=764, D=D, dtype=BF16, cuts=[300], starts=[764], options=extra))
    cases += [Case(T=2048, D=D, dtype=BF16, gate="short", options={"horizon": 8.0}) for D in (64, 128)]
    # groups of more heads than are walked together, and with a horizon, by which heads end at different query tiles
    for H, D in itertools.product((8, 12), (64, 128)):
        cases.append(Case(T=700, S=800, H=H, Hkv=1, D=D, dtype=BF16))
        cases.append(Case(T=1500, H=H, Hkv=1, D=D, dtype=BF16, gate="short", options={"horizon": 8.0}))
    cases += [Case(T=500, D=64, dtype=BF16, layout=layout) for layout in ("heads", "packed", "last")]
    return cases


@pytest.mark.parametrize("case", problems(), ids=Case.name)
def test_error_at_most_twice_eager(case):
    torch.manual_seed(0)
    assert failures(case, "cuda", backend="gluon") == []


@pytest.mark.parametrize("T", [4096, 4608])  # D = 64 is cut in two ways
@pytest.mark.parametrize("D", [64, 80, 96, 128])
@pytest.mark.parametrize(("gate", "official"), [("open", 2.055e-3), ("short", 2.037e-3)])
def test_error_of_o_below_the_official_kernels(gate, official, D, T):
    """Of two runs on an H100, 4096 tokens, 8 heads of 64 channels; with 128 channels it had 2.061e-3 and 2.049e-3."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, T, 2, D, device="cuda", dtype=BF16) for _ in range(3))
    log_f = gates(gate, 1, T, 2, device="cuda")
    o, _ = launch_forward(q, k, v, *cumsum.cumulative(log_f), Options(D**-0.5))
    exact, _ = reference.forgetting_attention(q.double(), k.double(), v.double(), log_f.double(), return_lse=True)
    assert (o.double() - exact).norm() < official * exact.norm()


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (12, 1)])
def test_ordered_backward_is_the_same_bit_for_bit(D, heads):
    torch.manual_seed(0)
    q, do = (torch.randn(2, 2000, heads[0], D, device="cuda", dtype=BF16) for _ in range(2))
    k, v = (torch.randn(2, 2000, heads[1], D, device="cuda", dtype=BF16) for _ in range(2))
    c = cumsum.cumulative(torch.nn.functional.logsigmoid(torch.randn(2, 2000, heads[0], device="cuda") + 4))
    options = Options(D**-0.5)
    saved = Saved(*launch_forward(q, k, v, *c, options), *c)
    first = launch_backward(do, None, q, k, v, saved, options)
    for _ in range(5):
        again = launch_backward(do, None, q, k, v, saved, options)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    unordered = launch_backward(do, None, q, k, v, saved, options, deterministic=False)
    for a, b in zip(first, unordered, strict=True):
        assert (a.float() - b.float()).norm() <= 1e-3 * a.float().norm()


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("seq_start", [None, [0], [300], [1000]], ids=str)
@pytest.mark.parametrize("D", [64, 128])
def test_every_element_is_written(D, seq_start, deterministic):
    """Outputs come from freshly poisoned memory; queries that see nothing, whole tiles of them, have no gradient."""
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(1, 1000, 4, D, device="cuda", dtype=BF16) for _ in range(4))
    c = cumsum.cumulative(torch.zeros(1, 1000, 4, device="cuda"))
    torch.full((64 << 20,), float("nan"), device="cuda")  # freed: the allocator hands it out again
    start = None if seq_start is None else torch.tensor(seq_start, dtype=torch.int32, device="cuda")
    padded = 0 if seq_start is None else seq_start[0]
    given = Options(D**-0.5), Documents(seq_start=start)
    o, lse2 = launch_forward(q, k, v, *c, *given)
    torch.full((64 << 20,), float("nan"), device="cuda")
    saved = Saved(o, lse2, *c)
    dq, dk, dv, dc = launch_backward(do, None, q, k, v, saved, *given, deterministic=deterministic)
    assert all(bool(torch.isfinite(x).all()) for x in (o, lse2[..., padded:], dq, dk, dv, dc))
    assert all(x[:, :padded].count_nonzero() == 0 for x in (o, dq, dk, dv))


@pytest.mark.parametrize("D", [64, 128])
def test_nan_in_a_gate_reaches_the_outputs_behind_it(D):
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(1, 400, 2, D, device="cuda", dtype=BF16) for _ in range(4))
    log_f = torch.full((1, 400, 2), -0.1, device="cuda")
    log_f[:, 150, 0] = torch.nan
    c = cumsum.cumulative(log_f)
    o, lse2 = launch_forward(q, k, v, *c, Options(D**-0.5))
    dq, dk, dv, _ = launch_backward(do, None, q, k, v, Saved(o, lse2, *c), Options(D**-0.5))
    assert all(bool(x[:, 150:, 0].isnan().all()) for x in (o, lse2.transpose(1, 2), dq, dk, dv))
    assert all(bool(torch.isfinite(x[:, :, 1]).all()) for x in (o, lse2.transpose(1, 2), dq, dk, dv))
    assert all(bool(torch.isfinite(x[:, :128, 0]).all()) for x in (o, lse2.transpose(1, 2), dq))


def test_the_switch_reaches_the_kernel_through_autograd(monkeypatch):
    import fox_kernels

    told = []

    def watched(*arguments, **options):
        told.append(options["deterministic"])
        return launch_backward(*arguments, **options)

    monkeypatch.setattr(forward_backward, "launchers", lambda backend: (hopper_forward.launch_forward, watched))
    q = torch.randn(1, 271, 3, 64, device="cuda", dtype=BF16, requires_grad=True)
    log_f = torch.zeros(1, 271, 3, device="cuda")  # a kind of call that no other test makes: none runs from a tape
    for value in (True, False):
        with fox_kernels.deterministic(value):
            o: Any = fox_kernels.forgetting_attention(q, q, q, log_f, backend="gluon")
        o.sum().backward()
    assert told == [True, False]


def test_captured_in_a_graph():
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(1, 512, 4, 64, device="cuda", dtype=BF16) for _ in range(4))
    c = cumsum.cumulative(torch.full((1, 512, 4), -0.01, device="cuda"))

    def step():
        o, lse2 = launch_forward(q, k, v, *c, Options(0.125))
        return o, *launch_backward(do, None, q, k, v, Saved(o, lse2, *c), Options(0.125))

    expected = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(expected, captured, strict=True))
