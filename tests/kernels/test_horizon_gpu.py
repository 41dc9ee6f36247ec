"""A horizon on a GPU: both kernels against the float64 reference, heads that forget at rates unlike each other's."""

# The operator returns o or (o, lse), options travel as dicts:
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

import itertools
import math

import pytest
import torch
from cases import Case, errors, failures
from fox_kernels import decode_attention, decodes, forgetting_attention
from fox_kernels.common import cumsum
from test_large_gpu import NO_GLUON

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BF16 = torch.bfloat16
BACKENDS = ("triton", pytest.param("gluon", marks=pytest.mark.skipif(bool(NO_GLUON), reason=str(NO_GLUON))))


def problems() -> list[Case]:
    """Heads whose half-lives lie between 16 and 2^20 tokens, at lengths that fill no tile."""
    cases = []
    for D, horizon in itertools.product((64, 128), (8.0, 16.0)):
        usual = {"D": D, "dtype": BF16, "gate": "half-lives"}
        for H, Hkv in ((4, 4), (8, 2), (10, 2), (12, 1)):  # groups of fewer and of more heads than are walked together
            cases.append(Case(T=1500, H=H, Hkv=Hkv, options={"horizon": horizon}, **usual))
        grouped = usual | {"H": 6, "Hkv": 2}
        cases.append(Case(T=700, S=1525, options={"horizon": horizon}, **grouped))
        cases.append(Case(T=1300, options={"horizon": horizon, "window": 300}, **grouped))
        cases.append(Case(T=1000, starts=[130, 1000], options={"horizon": horizon}, **grouped))
        cases.append(Case(B=1, T=1700, cuts=[1, 3, 700, 701, 1030], options={"horizon": horizon}, **grouped))
        cases.append(Case(B=1, T=900, S=1464, cuts=[300], starts=[764], options={"horizon": horizon}, **grouped))
    for gate in ("open", "short", "shut", "zeros"):
        cases.append(Case(T=777, H=4, Hkv=2, D=64, dtype=BF16, gate=gate, options={"horizon": 8.0}))
    cases.append(Case(T=600, D=96, dtype=BF16, gate="half-lives", options={"horizon": 8.0}))
    cases.append(Case(T=600, D=64, dtype=torch.float16, gate="half-lives", options={"horizon": 8.0}))
    return cases


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", problems(), ids=Case.name)
def test_error_at_most_twice_eager(case, backend):
    """Of outputs written to poisoned memory, the same bit for bit in two runs."""
    torch.manual_seed(0)
    assert failures(case, "cuda", backend=backend) == []


@pytest.mark.parametrize("D", [64, 128])
def test_sinks_beyond_a_horizon_are_seen(D):
    """By the Triton kernels, which "auto" chooses for them."""
    torch.manual_seed(0)
    options = {"horizon": 8.0, "sink": 4}
    case = Case(B=1, T=1500, H=8, Hkv=2, D=D, dtype=BF16, gate="half-lives", cuts=[1, 700], options=options)
    assert failures(case, "cuda", backend="auto") == []


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("D", [64, 128])
def test_at_a_length_of_many_tiles(D, backend):
    torch.manual_seed(0)
    case = Case(B=1, T=8192, H=4, Hkv=2, D=D, dtype=BF16, gate="half-lives", options={"horizon": 8.0})
    for name, mine, eager in errors(case, "cuda", backend=backend):
        assert mine <= 2 * eager + 1e-3, name


@pytest.mark.parametrize("backend", BACKENDS)
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


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_a_gate_reaches_what_comes_after_it(backend):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 900, 2, 64, device="cuda", dtype=BF16, requires_grad=True) for _ in range(3))
    log_f = torch.full((1, 900, 2), -0.1, device="cuda")
    log_f[:, 150, 0] = torch.nan
    o = forgetting_attention(q, k, v, log_f, horizon=8.0, backend=backend)
    o.float().sum().backward()
    assert bool(o[:, 150:, 0].isnan().all())
    assert bool(torch.isfinite(o[:, :150]).all())
    assert bool(torch.isfinite(o[:, :, 1]).all())


@pytest.mark.parametrize(("B", "T"), [(1, 1), (16, 1), (3, 4)])
def test_decoding_reads_live_pages_alone(B, T):
    """Keys that every head of a group has left behind are poisoned, but for the rest of a block of 64."""
    torch.manual_seed(0)
    S, H, Hkv, D, horizon = 20000, 8, 4, 128, 8.0
    q, k, v = (torch.randn(B, n, heads, D, device="cuda", dtype=BF16) for n, heads in ((T, H), (S, Hkv), (S, Hkv)))
    half_lives = torch.logspace(4, 14, H, base=2, device="cuda")
    log_f = -(math.log(2) / half_lives).expand(B, S, H).contiguous()
    c = cumsum.cumulative(log_f)
    exact = forgetting_attention(*(x.double() for x in (q, k, v)), log_f, horizon=horizon, backend="chunked")
    for head in range(Hkv):
        slowest = half_lives[head * 2 + 1].item()
        dead = max(0, S - T - math.ceil(horizon / math.log(2) * slowest) - 64)
        k[:, :dead, head] = torch.nan
        v[:, :dead, head] = torch.nan
    assert decodes(q, k, v)
    o = decode_attention(q, k, v, *c, horizon=horizon)
    assert (o - exact).norm() <= 4e-3 * exact.norm()
