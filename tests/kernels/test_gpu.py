"""The proof list at real sizes, on a GPU: `pytest -m gpu tests/kernels/test_gpu.py`."""

import itertools
import random

import pytest
import torch
from cases import LAYOUTS, ROUNDING, Case, draw, failures, gates, poisoned
from fox_kernels import forgetting_attention, reference
from fox_kernels.common import cumsum
from fox_kernels.hopper import backward as hopper_backward
from fox_kernels.hopper import forward as hopper_forward
from fox_kernels.hopper.backward import launch_backward
from fox_kernels.hopper.forward import launch_forward
from fox_kernels.options import Documents, Options, Saved
from launchers import check_one_gradient

pytestmark = pytest.mark.gpu

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
NO_GLUON = hopper_forward.gluon_missing() or ("" if HOPPER else "needs a Hopper GPU")
on_hopper = pytest.mark.skipif(bool(NO_GLUON), reason=str(NO_GLUON))
gluon = pytest.param("gluon", marks=on_hopper)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def proof_list() -> list[Case]:
    """Every line of the proof list, one feature at a time and then mixed, at lengths that fill no tile."""
    r = random.Random(0)
    documents = sorted({1, 2, 4, 700, 701, 1030, *(r.randrange(1100) for _ in range(6))})
    cases = [Case(T=1025, H=4, Hkv=2, D=D, dtype=BF16) for D in (16, 32, 64, 80, 96, 128, 192, 256)]
    cases += [Case(T=513, H=4, Hkv=2, D=D, dtype=FP16) for D in (16, 32, 64, 80, 96, 128, 192, 256)]
    cases += [Case(T=257, H=4, Hkv=2, D=D, dtype=FP32) for D in (16, 32, 64, 80, 96, 128, 192, 256)]
    cases += [Case(T=1025, H=4, Hkv=4, D=192, DV=128, dtype=dtype) for dtype in (BF16, FP16)]
    cases.append(Case(T=257, H=4, Hkv=4, D=192, DV=128, dtype=FP32))
    cases += [Case(T=777, D=D, dtype=BF16, gate=g) for g in ("open", "short", "shut", "zeros") for D in (64, 128)]
    cases += [Case(T=300, D=64, dtype=FP32, gate=g) for g in ("open", "shut", "zeros")]
    for H, Hkv in ((1, 1), (3, 1), (8, 1), (8, 8), (10, 2), (7, 1), (12, 1)):
        cases.append(Case(T=400, H=H, Hkv=Hkv, D=64, dtype=BF16))
    # groups of more heads than are walked together, and with a horizon, by which heads end at different query tiles
    for H, D in itertools.product((8, 12), (64, 128)):
        cases.append(Case(T=700, S=800, H=H, Hkv=1, D=D, dtype=BF16))
        cases.append(Case(T=1500, H=H, Hkv=1, D=D, dtype=BF16, gate="short", options={"horizon": 8.0}))
    for T, S in ((1, 1), (2, 2), (64, 64), (333, 1500), (1, 4097), (3, 2049), (16, 1000), (129, 130)):
        cases.append(Case(T=T, S=S, H=8, Hkv=2, D=128, dtype=BF16))
        cases.append(Case(T=T, S=S, H=4, Hkv=1, D=80, dtype=BF16, starts=[0, S // 3], options={"sink": 2}))
    extras = (
        {}, {"window": 100}, {"sink": 4}, {"softcap": 20.0}, {"horizon": 8.0}, {"window": 64, "sink": 4},
        {"sink": 1, "horizon": 8.0},
    )  # fmt: skip
    for extra, D in itertools.product(extras, (64, 128)):
        cases.append(Case(B=1, T=1100, D=D, dtype=BF16, cuts=documents, options=extra))
        cases.append(Case(T=700, D=D, dtype=BF16, starts=[3, 700], options=extra))
        cases.append(Case(T=900, H=3, D=D, dtype=BF16, options=extra))
        # queries that begin amid a block of keys, in tiles of which padding hides all rows or the first ones
        cases.append(Case(B=3, T=700, S=705, H=4, D=D, dtype=BF16, starts=[705, 400, 130], options=extra))
        cases.append(Case(B=1, T=700, S=764, D=D, dtype=BF16, cuts=[300], starts=[764], options=extra))
    for gate, D in itertools.product(("short", "open", "mixed"), (64, 128)):
        cases.append(Case(T=2048, D=D, dtype=BF16, gate=gate, options={"horizon": 8.0}))
    cases.append(Case(T=2048, D=64, dtype=BF16, gate="short", options={"horizon": 8.0, "softcap": 15.0, "sink": 4}))
    cases += [Case(T=500, D=64, dtype=BF16, layout=layout) for layout in LAYOUTS[1:]]
    cases += [Case(T=300, S=400, H=4, Hkv=2, D=D, dtype=BF16, layout="odd") for D in (16, 32, 80, 96, 128, 256)]
    cases += [Case(B=1, T=200, D=D, dtype=dtype, layout="odd") for D in (80, 96) for dtype in (FP16, FP32)]
    cases += [Case(T=500, D=64, dtype=BF16, options={"scale": s}) for s in (1.0, 0.0, -0.2, 1e-35, 1e-10, 20.0)]
    limits = [{"window": n} for n in (1, 2, 5000)] + [{"sink": n} for n in (64, 100, 5000)]
    cases += [Case(T=400, S=500, D=D, dtype=BF16, options=limit) for limit in limits for D in (64, 128)]
    for D in (64, 128):
        cuts = [0, 0, 5, 5, 300]
        cases += [Case(B=1, T=600, D=D, dtype=BF16, cuts=cuts, options={"sink": sink}) for sink in (64, 100)]
        cases.append(Case(T=200, S=700, D=D, dtype=BF16, starts=[499, 700], options={"horizon": 8.0}))
    together = (
        {"window": 90, "sink": 7, "softcap": 9.0, "horizon": 6.0, "scale": -0.1},
        {"sink": 7, "scale": 0.1},  # as much as the Hopper kernels take together
        {"window": 90, "horizon": 8.0, "scale": 0.1},
    )
    layouts = (
        (64, BF16, "odd"),
        (64, FP16, "last"),
        (80, FP16, "odd"),
        (128, FP16, "expanded"),
        (256, BF16, "expanded"),
    )
    for (D, dtype, layout), options in itertools.product(layouts, together):
        shape = {"B": 1, "T": 300, "S": 700, "H": 10, "Hkv": 2, "D": D, "dtype": dtype, "layout": layout}
        cases.append(Case(**shape, cuts=[1, 2, 2, 350, 600], starts=[200], options=options))
    return cases


def horizons() -> list[Case]:
    """Heads whose half-lives lie between 16 and 2^20 tokens, at lengths that fill no tile."""
    cases = []
    for D, horizon in itertools.product((64, 128), (8.0, 16.0)):
        usual = {"D": D, "dtype": BF16, "gate": "half-lives"}
        for H, Hkv in ((4, 4), (8, 2), (10, 2), (12, 1)):  # groups of fewer and of more heads than are walked together
            cases.append(Case(T=1500, H=H, Hkv=Hkv, options={"horizon": horizon}, **usual))
        grouped = usual | {"H": 6, "Hkv": 2}
        for sink in (1, 64):
            far = {"options": {"horizon": horizon, "sink": sink}} | grouped
            cases += [Case(T=1500, **far), Case(T=700, S=1525, **far), Case(T=1000, starts=[130, 1000], **far)]
            cases += [Case(B=1, T=1700, cuts=[1, 3, 700, 701, 1030], **far), Case(T=900, **(far | {"H": 12, "Hkv": 1}))]
            cases.append(Case(B=1, T=900, S=1464, cuts=[300], starts=[764], **far))
        cases.append(Case(T=700, S=1525, options={"horizon": horizon}, **grouped))
        cases.append(Case(T=1300, options={"horizon": horizon, "window": 300}, **grouped))
        cases.append(Case(T=1000, starts=[130, 1000], options={"horizon": horizon}, **grouped))
        cases.append(Case(B=1, T=1700, cuts=[1, 3, 700, 701, 1030], options={"horizon": horizon}, **grouped))
        cases.append(Case(B=1, T=900, S=1464, cuts=[300], starts=[764], options={"horizon": horizon}, **grouped))
    for gate in ("open", "short", "shut", "zeros"):
        cases.append(Case(T=777, H=4, Hkv=2, D=64, dtype=BF16, gate=gate, options={"horizon": 8.0}))
    for D in (64, 128):  # of many tiles
        for sink in (0, 1):
            options = {"horizon": 8.0, "sink": sink}
            cases.append(Case(B=1, T=8192, H=4, Hkv=2, D=D, dtype=BF16, gate="half-lives", options=options))
    for D in (80, 96, 256):
        cases.append(Case(T=600, D=D, dtype=BF16, gate="half-lives", options={"horizon": 8.0, "sink": 3}))
    cases.append(Case(T=600, D=64, dtype=FP16, gate="half-lives", options={"horizon": 8.0}))
    return cases


@pytest.mark.parametrize("backend", ["triton", "auto"])  # auto: Gluon where it can
@pytest.mark.parametrize("case", [*proof_list(), *horizons()], ids=Case.name)
def test_error_at_most_twice_eager(case, backend):
    """Of outputs written to poisoned memory, the same bit for bit in two runs."""
    torch.manual_seed(0)
    assert failures(case, "cuda", backend) == []


@on_hopper
@pytest.mark.parametrize("case", [case for case in horizons() if case.options.get("sink")], ids=Case.name)
def test_sinks_beside_a_horizon_in_the_forward_alone(case):
    """By the Hopper kernels, whose backward has no such thing."""
    torch.manual_seed(0)
    inputs, _, options = draw(case, "cuda")
    exact = reference.forgetting_attention(*[x.double() for x in inputs], return_lse=True, **options)
    eager = reference.forgetting_attention(*inputs, return_lse=True, **options)
    with torch.no_grad(), poisoned():
        mine = forgetting_attention(*inputs, return_lse=True, backend="gluon", **options)
        again = forgetting_attention(*inputs, return_lse=True, backend="gluon", **options)
    for x, repeated, y, z in zip(mine, again, eager, exact, strict=True):
        assert torch.equal(x, repeated)
        x, y, z = (w.double().masked_fill(w == -float("inf"), 0) for w in (x, y, z))
        assert (x - z).norm() <= 2 * (y - z).norm() + ROUNDING[case.dtype] * z.norm()


@on_hopper
@pytest.mark.parametrize("case", [case for case in (*proof_list(), *horizons()) if case.Hkv < case.H], ids=Case.name)
def test_groups_whose_heads_walk_together(case, monkeypatch):
    """As groups of more tokens do."""
    monkeypatch.setattr(hopper_backward, "WALKS", 0)
    torch.manual_seed(0)
    assert failures(case, "cuda", "auto") == []


def gate_error(T: int, mean: float, D: int, backend: str, dtype=BF16) -> float:
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


@pytest.mark.parametrize("backend", ["triton", "auto"])
@pytest.mark.parametrize("mean", [0.0, -1.0, -3.0])
@pytest.mark.parametrize(("T", "D"), [(4096, D) for D in (16, 32, 64, 80, 96, 128, 256)] + [(32768, 64), (32768, 128)])
def test_gate_gradient_within_half_a_percent(T, D, mean, backend):
    torch.manual_seed(0)
    assert gate_error(T, mean, D, backend) <= 5e-3


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


def test_each_input_may_be_the_only_one_with_a_gradient():
    check_one_gradient("cuda")


@pytest.mark.parametrize("D", [80, 96])
@pytest.mark.parametrize("T", [1, 3, 8])
def test_decoding_from_rows_of_odd_strides(T, D):
    torch.manual_seed(0)
    inputs, _, _ = draw(Case(T=T, S=900, H=16, Hkv=2, D=D, dtype=BF16, layout="odd"), "cuda")
    with torch.no_grad():
        o = forgetting_attention(*inputs, backend="triton")
        exact = forgetting_attention(*[x.double() for x in inputs], backend="chunked")
    assert (o - exact).norm() <= 4e-3 * exact.norm()


@pytest.mark.parametrize("backend", ["triton", gluon])
@pytest.mark.parametrize("positive", [0.0, 1e-3])
def test_a_key_that_lies_at_the_horizon_itself_hangs_no_kernel(positive, backend):
    """Decays of whole nats tie with it, and c may rise by its rounding, or by what a caller should not have given."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2000, n, 64, device="cuda", dtype=BF16, requires_grad=True) for n in (4, 2, 2))
    log_f = torch.where(torch.rand(2, 2000, 4, device="cuda") < 0.05, -1.0, positive)
    outputs = []
    for _ in range(2):
        o = forgetting_attention(q, k, v, log_f, horizon=3.0, backend=backend)
        outputs.append((o, *torch.autograd.grad(o.float().sum(), (q, k, v))))
    for once, twice in zip(*outputs, strict=True):
        assert torch.equal(once, twice)
        assert bool(torch.isfinite(once).all())


@pytest.mark.parametrize("backend", ["triton", gluon])
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("horizon", [None, 8.0])
def test_nan_in_a_gate_reaches_what_comes_after_it_and_its_gradients(horizon, D, backend):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 900, 2, D, device="cuda", dtype=BF16, requires_grad=True) for _ in range(3))
    log_f = torch.full((1, 900, 2), -0.1, device="cuda")
    log_f[:, 150, 0] = torch.nan
    o = forgetting_attention(q, k, v, log_f, horizon=horizon, backend=backend)
    assert bool(o[:, 150:, 0].isnan().all())
    assert all(bool(torch.isfinite(x).all()) for x in (o[:, :150], o[:, :, 1]))
    if horizon is None:
        dq, dk, dv = torch.autograd.grad(o.float().sum(), (q, k, v))
        assert all(bool(x[:, 150:, 0].isnan().all()) for x in (dq, dk, dv))
        assert all(bool(torch.isfinite(x[:, :, 1]).all()) for x in (dq, dk, dv))
        assert bool(torch.isfinite(dq[:, :128, 0]).all())


@on_hopper
@pytest.mark.parametrize("T", [4096, 4608])  # D = 64 is cut in two ways
@pytest.mark.parametrize("D", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("gate", "official"), [("open", 2.055e-3), ("short", 2.037e-3)])
def test_error_of_o_below_the_official_kernels(gate, official, D, T):
    """Of two runs on an H100, 4096 tokens, 8 heads of 64 channels; with 128 channels it had 2.061e-3 and 2.049e-3."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, T, 2, D, device="cuda", dtype=BF16) for _ in range(3))
    log_f = gates(gate, 1, T, 2, device="cuda")
    o, _ = launch_forward(q, k, v, *cumsum.cumulative(log_f), Options(D**-0.5))
    exact, _ = reference.forgetting_attention(q.double(), k.double(), v.double(), log_f.double(), return_lse=True)
    assert (o.double() - exact).norm() < official * exact.norm()


@on_hopper
@pytest.mark.parametrize("D", [64, 128, 256])
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


@on_hopper
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
