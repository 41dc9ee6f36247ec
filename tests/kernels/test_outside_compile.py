"""torch.compile on a machine without a GPU: one operator, one graph for all lengths, the bits of eager mode."""

import pytest
import torch
from cases import Case, draw, results
from fox_kernels import autograd, forgetting_attention

OPTIONS = {"window": 9, "sink": 2, "softcap": 4, "horizon": 4, "scale": 0.3}


@pytest.fixture(autouse=True)
def _nothing_compiled_before():
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("problem", "options"),
    [({}, {}), ({"layout": "last"}, OPTIONS), ({"B": 1, "cuts": [0, 1, 20]}, {"sink": 1}), ({"starts": [3, 40]}, {})],
    ids=str,
)
def test_one_graph_for_every_length(problem, options):
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(forgetting_attention, fullgraph=True, dynamic=True, backend=count)
    for T, S in ((40, 40), (33, 70), (7, 90), (300, 301), (50, 51)):
        inputs, gradients, given = draw(Case(T=T, S=S, D=8, options=options, **problem))
        ways = (results(way, inputs, gradients, given) for way in (compiled, forgetting_attention))
        for found, wanted in zip(*ways, strict=True):
            assert torch.equal(found, wanted)
    assert len(graphs) <= 2  # as many queries as keys, and fewer


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by torch 2.14's own check
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_the_operator_passes_torchs_own_check(dtype):
    inputs, _, options = draw(Case(T=20, S=33, H=4, Hkv=2, D=8, dtype=dtype, starts=[3, 33]))
    further = (None, options["seq_start"], 0.25, 9, 1, 5.0, 2.0, "chunked", True, True)
    torch.library.opcheck(autograd.attention, (*inputs, *further))
