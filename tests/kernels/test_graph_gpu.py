"""Forward and backward recorded: compiled whole by torch, captured in CUDA graphs, by every backend, on a GPU."""

from functools import partial

import pytest
import torch
from cases import Case, draw, results
from fox_kernels import forgetting_attention
from test_gpu import gluon

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
PROBLEMS = {
    "plain": Case(T=600, D=64, dtype=BF16),
    "head dim 96, GQA": Case(T=300, H=6, Hkv=2, D=96, dtype=BF16),
    "documents, window": Case(B=1, T=600, D=128, dtype=BF16, cuts=[1, 2, 300], options={"window": 100}),
    "padding, horizon": Case(T=600, D=64, dtype=BF16, starts=[5, 600], options={"horizon": 8.0}),
}


def replayed(step, inputs) -> tuple[list, list]:
    """Return what a graph captured of step gives when it is replayed with other inputs, and what step gives then."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for x in inputs:
            x.copy_(x.roll(1, 1))
    graph.replay()
    torch.cuda.synchronize()
    return captured, step()


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("backend", ["triton", gluon])
def test_captured_in_a_graph_with_its_gradients(backend, problem):
    torch.manual_seed(0)
    inputs, gradients, options = draw(PROBLEMS[problem], "cuda")
    operator = partial(forgetting_attention, backend=backend)
    captured, expected = replayed(lambda: results(operator, inputs, gradients, options), inputs)
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


@pytest.mark.parametrize("options", [{}, {"sink": 2, "horizon": 8.0}], ids=str)
def test_decoding_captured_in_a_graph(options):
    torch.manual_seed(0)
    inputs, _, given = draw(Case(T=1, S=3000, H=8, Hkv=2, D=128, dtype=BF16, starts=[0, 700]), "cuda")
    inputs = [x.detach() for x in inputs]
    captured, expected = replayed(lambda: [forgetting_attention(*inputs, **given, **options)], inputs)
    assert torch.equal(captured[0], expected[0])


@pytest.mark.filterwarnings("default")  # inductor has advice of its own
@pytest.mark.parametrize(("dynamic", "compiler"), [(False, "inductor"), (True, "aot_eager")])  # inductor takes a minute
@pytest.mark.parametrize("backend", ["triton", gluon])
def test_compiled_whole_at_two_lengths(backend, dynamic, compiler):
    torch.manual_seed(0)

    def step(q, k, v, log_f):
        o, lse = forgetting_attention(q, k, v, log_f, window=200, return_lse=True, backend=backend)
        return o * 2, lse * 2

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend=compiler)
    for T in (600, 475):
        inputs, (do, dlse), _ = draw(Case(T=T, D=64, dtype=BF16), "cuda")
        expected, got = step(*inputs), compiled(*inputs)
        for a, b in zip(expected, got, strict=True):
            assert torch.equal(a, b)
        wanted, found = (torch.autograd.grad(x, inputs, (do, dlse)) for x in (expected, got))
        assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
