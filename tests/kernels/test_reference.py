"""The specification itself, and the chunked path against it."""

import itertools
from typing import Any

import pytest
import torch
from cases import Case, draw, failures, gates, problems, results
from fox_kernels import choose, choose_backend, chunked, forgetting_attention, reference
from fox_kernels.options import Backend, Documents, Options
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

FP64, FP32 = torch.float64, torch.float32
OPTIONS: list[dict[str, Any]] = [
    {},
    {"window": 3, "sink": 2},
    {"softcap": 2.0, "sink": 1},
    {"scale": 0.7},
    {"horizon": 2.0, "sink": 1},
    {"cu_seqlens": torch.tensor([0, 1, 3, 3, 7], dtype=torch.int32), "sink": 1},
    {"seq_start": torch.tensor([4], dtype=torch.int32)},
    {"seq_start": torch.tensor([7], dtype=torch.int32)},
]


def by_chunks(*inputs, **options):
    return forgetting_attention(*inputs, backend="chunked", **options)


OPERATORS = (reference.forgetting_attention, by_chunks)


def doubles(T=4, S=7, H=2, Hkv=1, D=3, DV=None):
    torch.manual_seed(0)
    widths = ((T, H, D), (S, Hkv, D), (S, Hkv, DV or D))
    q, k, v = (torch.randn(1, n, h, d, dtype=FP64, requires_grad=True) for n, h, d in widths)
    return q, k, v, (-2 * torch.rand(1, S, H, dtype=FP64)).requires_grad_()


def agree(case: Case, tolerance: float) -> None:
    """Assert that chunked gives what the reference gives, outputs and gradients."""
    inputs, gradients, options = draw(case)
    mine = results(by_chunks, inputs, gradients, options)
    spec = results(reference.forgetting_attention, inputs, gradients, options)
    for a, b in zip(mine, spec, strict=True):
        assert torch.isfinite(a).all()
        assert (a - b).norm() <= tolerance * (b.norm() + 1), case.name()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_gradcheck(operator, options):
    def finite(*inputs):
        o, lse = operator(*inputs, return_lse=True, **options)
        return o, lse.masked_fill(lse == -torch.inf, 0)

    assert torch.autograd.gradcheck(finite, doubles(DV=2))


def test_definition_by_hand():
    """o and lse of a small problem, summed key by key from the formula."""
    T, S, H = 3, 5, 2
    q, k, v, log_f = (x.detach() for x in doubles(T, S, H))
    window, sink, softcap, scale = 3, 1, 1.5, 0.9
    o, lse = reference.forgetting_attention(
        q, k, v, log_f, window=window, sink=sink, softcap=softcap, scale=scale, return_lse=True
    )
    for t, h in itertools.product(range(T), range(H)):
        i = S - T + t
        scores = {}
        for j in range(i + 1):
            if i - j < window or j < sink:
                raw = softcap * torch.tanh(scale * (q[0, t, h] @ k[0, j, 0]) / softcap)
                scores[j] = raw if j < sink else raw + log_f[0, j + 1 : i + 1, h].sum()
        expected_lse = torch.logsumexp(torch.stack(list(scores.values())), 0)
        expected = sum((s - expected_lse).exp() * v[0, j, 0] for j, s in scores.items())
        torch.testing.assert_close(o[0, t, h], expected)
        torch.testing.assert_close(lse[0, t, h], expected_lse)


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_key_beyond_the_horizon_counts_for_nothing(operator):
    """Each gate forgets one nat, so that a horizon of 3 leaves a query its own key and two before it, and the sink."""
    q, k, v, log_f = (x.detach() for x in doubles(7, 7))
    horizon = operator(q, k, v, log_f * 0 - 1, horizon=3.0, sink=1)
    torch.testing.assert_close(horizon, operator(q, k, v, log_f * 0 - 1, window=3, sink=1))


@pytest.mark.parametrize("operator", OPERATORS)
def test_each_head_has_its_own_horizon_and_no_gradient_passes_it(operator):
    q, k, v, log_f = doubles(7, 7, 2, 2)
    slow = log_f.detach() * torch.tensor([1.0, 1e-3])
    grad = torch.autograd.grad(operator(q, k, v, slow, horizon=1.5)[:, -1].sum(), v)[0]
    assert (grad[0, :, 0] == 0).any()
    assert (grad[0, :, 1] > 0).all()


def test_open_gates_are_causal_attention():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 40, 4, 16) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
    for operator in OPERATORS:
        torch.testing.assert_close(operator(q, k, v, torch.zeros(2, 40, 4)), expected.transpose(1, 2))


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(problems([FP64, FP32], head_dims=(5, 16), longest=140), st.sampled_from((1, chunked.SCORES_PER_CHUNK)))
def test_chunked_equals_the_reference_on_any_problem(case, scores_per_chunk):
    """Also in chunks of 32 queries, so that every boundary is crossed."""
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "SCORES_PER_CHUNK", scores_per_chunk)
        agree(case, 1e-11 if case.dtype == FP64 else 2e-5)  # shut gates: dlog_f is a difference of large sums


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_chunked_in_16_bits_is_no_worse_than_twice_eager(dtype):
    torch.manual_seed(0)
    for gate in ("open", "mixed", "shut", "zeros"):
        case = Case(T=130, D=16, H=4, Hkv=2, dtype=dtype, gate=gate, options={"sink": 2, "window": 50})
        assert failures(case, backend="chunked") == []


def test_long_sequences_keep_their_precision():
    """One query at the end of 32768 tokens of mean log f = -1, float32 against float64."""
    torch.manual_seed(0)
    S = 32768
    q, k, v = (torch.randn(1, n, 1, 16) for n in (1, S, S))
    log_f = -torch.empty(1, S, 1).exponential_()
    log_f[:, -40:] *= 0.1
    o = by_chunks(q, k, v, log_f)
    exact = by_chunks(q.double(), k.double(), v.double(), log_f.double())
    assert (o - exact).norm() < 1e-5 * exact.norm()


def test_a_query_that_sees_nothing_gives_zero_and_no_nan():
    q, k, v, log_f = doubles(7, 7)
    start = torch.tensor([5], dtype=torch.int32)
    for operator in OPERATORS:
        o, lse = operator(q, k, v, log_f, seq_start=start, return_lse=True)
        assert (o[:, :5] == 0).all()
        assert (lse[:, :5] == -torch.inf).all()
        assert torch.isfinite(lse[:, 5:]).all()
        for grad in torch.autograd.grad(o.sum() + lse[:, 5:].sum(), (q, k, v, log_f)):
            assert torch.isfinite(grad).all()
            assert grad[:, :5].abs().max() < 1e-12


def test_packed_documents_are_the_documents_alone():
    torch.manual_seed(0)
    cuts = [0, 1, 2, 9, 60]
    q, k, v = (torch.randn(1, 60, 2, 8, dtype=FP64) for _ in range(3))
    log_f = -torch.rand(1, 60, 2, dtype=FP64)
    packed = forgetting_attention(q, k, v, log_f, cu_seqlens=torch.tensor(cuts, dtype=torch.int32), sink=1)
    for a, b in itertools.pairwise(cuts):
        alone = forgetting_attention(*(x[:, a:b] for x in (q, k, v, log_f)), sink=1)
        torch.testing.assert_close(packed[:, a:b], alone, rtol=1e-10, atol=1e-12)


def test_autocast_chooses_the_inputs_dtype_and_nothing_else():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 70, 2, 16, requires_grad=True) for _ in range(3))
    log_f = gates("mixed", 1, 70, 2).requires_grad_()
    halves = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    expected = forgetting_attention(*halves, log_f)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = forgetting_attention(q, k.bfloat16(), v, log_f)
        grads = torch.autograd.grad(o.sum(), (q, k, v, log_f))
        assert torch.equal(forgetting_attention(q.detach(), k.detach(), v.detach(), log_f.detach()), expected)
    assert torch.equal(o, expected)
    for grad, x in zip(grads, torch.autograd.grad(expected.sum(), (*halves, log_f)), strict=True):
        assert torch.equal(grad, x.float())


@pytest.mark.parametrize("shape", [(1, 0, 5), (1, 0, 0), (0, 3, 5)])
@pytest.mark.parametrize("options", [{}, {"window": 3, "sink": 1, "softcap": 2.0, "horizon": 3.0}], ids=str)
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_no_queries_no_error(backend, shape, options):
    B, T, S = shape
    q = torch.randn(B, T, 2, 4, requires_grad=True)
    k, v = (torch.randn(B, S, 1, d, requires_grad=True) for d in (4, 3))
    log_f = torch.zeros(B, S, 2, requires_grad=True)
    o, lse = forgetting_attention(q, k, v, log_f, return_lse=True, backend=backend, **options)
    assert o.shape == (B, T, 2, 3)
    assert not any(x.any() for x in torch.autograd.grad(o.sum() + lse.sum(), (q, k, v, log_f)))


def test_gates_of_zero_cut_the_past_off():
    q, k, v, log_f = (x.detach() for x in doubles(7, 7))
    log_f[:, 4] = -torch.inf
    for operator in OPERATORS:
        whole = operator(q, k, v, log_f)
        late = operator(*(x[:, 4:] for x in (q, k, v, log_f)))
        torch.testing.assert_close(whole[:, 4:], late, rtol=1e-8, atol=1e-8)


def test_memory_of_a_long_context_is_linear():
    """4096 tokens: neither pass may hold a T x S matrix of floats per head (64 MB each here)."""
    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                sizes.append(out.untyped_storage().nbytes())
            return out

    inputs = *(torch.randn(1, 4096, 2, 8) for _ in range(3)), -torch.rand(1, 4096, 2)
    given = Options(1.0), Documents(), Backend("chunked", True, True)
    with Watch():
        saved, _ = chunked.attend(*inputs, *given)
        chunked.differentiate(saved.o, None, *inputs, saved, *given)
    assert max(sizes) <= 8 << 20


def test_second_derivatives_and_transforms_are_the_reference_s_alone():
    inputs = doubles()
    o = forgetting_attention(*inputs, backend="chunked")
    with pytest.raises(ValueError, match="no second derivative"):
        torch.autograd.grad(o.sum(), inputs, create_graph=True)
    q, k, v, log_f = inputs
    first = torch.autograd.grad(reference.forgetting_attention(*inputs).sum(), q, create_graph=True)[0]
    assert torch.autograd.grad(first.square().sum(), q)[0].abs().max() > 0

    def loss(q, backend):
        return forgetting_attention(q, k.detach(), v.detach(), log_f.detach(), backend=backend).sum()

    torch.testing.assert_close(torch.func.grad(loss)(q.detach(), "reference"), first.detach())
    with pytest.raises(ValueError, match=r'under torch.func .* backend="reference"'):
        torch.func.grad(loss)(q.detach(), "auto")
    with torch.autograd.forward_ad.dual_level(), pytest.raises(ValueError, match="forward-mode AD"):
        loss(q.detach(), "auto")


@pytest.mark.parametrize("horizon", [None, 8.0])
@pytest.mark.parametrize("operator", OPERATORS)
def test_nan_of_a_query_or_a_gate_reaches_what_depends_on_it_alone(operator, horizon):
    torch.manual_seed(0)
    whole = [torch.randn(1, 90, 2, 8), torch.randn(1, 90, 1, 8), torch.randn(1, 90, 1, 8), -torch.rand(1, 90, 2)]
    clean = operator(*whole, horizon=horizon)
    for n, first, last in ((0, 40, 41), (3, 40, 90)):  # of q one row, of log_f all rows from it on
        x = [y.clone() for y in whole]
        x[n][0, 40, 1] = torch.nan
        o = operator(*x, horizon=horizon)
        assert bool(o[0, first:last, 1].isnan().all())
        for others in (o[0, :, 0] - clean[0, :, 0], o[0, :first, 1] - clean[0, :first, 1]):
            assert float(others.abs().max()) < 1e-6


def test_a_choice_is_said_once_whatever_the_numbers_in_its_reason(monkeypatch, capsys):
    q, k, v, log_f = (x.detach() for x in doubles())
    assert choose(q, k, v)[0] == choose(q, k, v, log_f)[0] == "chunked"
    monkeypatch.setattr(choose_backend, "usual", lambda: "gluon")
    choose_backend._announced.clear()
    why = "CUDA tensors; not gluon:"
    for queries in (1, 57):
        forgetting_attention(q, k, v, log_f, backend="reference")
        choose_backend.announce("triton", f"{why} {queries} queries are less than its tile of 64")
    choose_backend.announce("triton", f"{why} head_dim 256 is not one of (64, 80, 96, 128)")
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "fox_kernels: backend reference (asked for)"
    assert said[1] == f"fox_kernels: backend triton ({why} 1 queries are less than its tile of 64)"
    assert len(said) == 3


@pytest.mark.parametrize(("major", "usual"), [(None, "chunked"), (8, "triton"), (9, "gluon"), (12, "triton")])
def test_what_the_machine_should_run(major, usual, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: major is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))
    assert choose_backend.usual() == usual


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_fake_tensors_take_the_shapes_through(backend, options):
    with FakeTensorMode() as mode:
        inputs = [
            x.requires_grad_() for x in (torch.randn(1, n, h, d) for n, h, d in ((4, 2, 3), (7, 1, 3), (7, 1, 2)))
        ]
        inputs.append(torch.randn(1, 7, 2, requires_grad=True))
        given = {name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        o, lse = forgetting_attention(*inputs, return_lse=True, backend=backend, **given)
        grads = torch.autograd.grad(o.sum() + lse.sum(), inputs)
    assert (o.shape, lse.shape) == ((1, 4, 2, 2), (1, 4, 2))
    assert [x.shape for x in grads] == [x.shape for x in inputs]
