"""What the operator says to arguments that it can't take, and to ways of differentiating it that it doesn't know."""

# Wrong types are the point:
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

import pytest
import torch
from fox_kernels import decode_attention, forgetting_attention


def problem(T: int = 6, S: int = 6, **named) -> list[torch.Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, h, 16, **named) for n, h in ((T, 4), (S, 2), (S, 2)))
    return [q, k, v, -torch.rand(1, S, 4)]


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("option", ["scale", "softcap", "horizon"])
def test_numbers_beyond_a_float_are_refused(option, backend):
    with pytest.raises(ValueError, match=f"{option} "):
        forgetting_attention(*problem(), backend=backend, **{option: 10**400})


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_scores_need_a_scale_and_a_softcap_that_their_dtype_holds(backend):
    q, k, v, log_f = problem()
    for option in ({"scale": -1e39}, {"softcap": 1e39}, {"softcap": 1e-46}):
        with pytest.raises(ValueError, match=r"a finite float .*that torch\.float32 holds, or None"):
            forgetting_attention(q, k, v, log_f, backend=backend, **option)
        o = forgetting_attention(q.double(), k.double(), v.double(), log_f, backend=backend, **option)
        assert bool(o.isfinite().all())


@pytest.mark.parametrize("backend", ["reference", "chunked"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_window_and_sinks_may_be_longer_than_any_document(backend, compiled):
    def run(*inputs, **options):
        return forgetting_attention(*inputs, backend=backend, **options)

    inputs = problem()
    far = torch.compile(run, fullgraph=True, backend="eager") if compiled else run
    assert torch.equal(far(*inputs, window=10**30, sink=10**30), run(*inputs, window=6, sink=6))


def test_tensors_that_are_not_dense_are_refused():
    q, k, v, log_f = problem()
    rows = [x[0] for x in (k, k)]
    others = {"sparse": k.to_sparse(), "nested": torch.nested.nested_tensor(rows, layout=torch.jagged)}
    for name, other in others.items():
        with pytest.raises(ValueError, match=f"k must be a dense tensor, got a .*{name}.* one: pad rows or pack them"):
            forgetting_attention(q, other, v, log_f)


def test_8_bits_are_refused():
    q, k, v, log_f = problem()
    with pytest.raises(ValueError, match=r"16 bits or more, got torch\.float8_e4m3fn"):
        forgetting_attention(*(x.to(torch.float8_e4m3fn) for x in (q, k, v)), log_f)


def test_batched_gradients_are_refused_but_by_the_reference():
    inputs = [x.requires_grad_() for x in problem()]
    for backend in ("reference", "chunked"):
        o = forgetting_attention(*inputs, backend=backend)
        do = torch.randn(3, *o.shape)
        if backend == "reference":
            batch = torch.autograd.grad(o, inputs, do, is_grads_batched=True, retain_graph=True)
            for x, y in zip(batch, torch.autograd.grad(o, inputs, do[1]), strict=True):
                torch.testing.assert_close(x[1], y)
        else:
            with pytest.raises(ValueError, match="leave is_grads_batched=True out"):
                torch.autograd.grad(o, inputs, do, is_grads_batched=True)


def test_decoding_says_which_argument_is_wrong():
    q, k, v, _ = problem(T=1)
    c = torch.zeros(1, 4, 6)
    for message, arguments in (
        ("q must be a torch.Tensor, got list", ([1], k, v, c, c)),
        ("c_hi must be a torch.Tensor, got NoneType", (q, k, v, None, c)),
    ):
        with pytest.raises(ValueError, match=message):
            decode_attention(*arguments)
