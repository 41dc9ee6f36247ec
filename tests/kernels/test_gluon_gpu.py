"""What the Hopper kernels take, at the edges of every option and with all that go together, on a GPU."""

# pyright: reportArgumentType=false

import pytest
import torch
from cases import LAYOUTS, Case, failures
from test_large_gpu import NO_GLUON

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(NO_GLUON), reason=str(NO_GLUON))]

BF16, FP16 = torch.bfloat16, torch.float16


def edges() -> list[Case]:
    cases = [Case(T=500, D=64, dtype=BF16, layout=layout) for layout in LAYOUTS[4:]]
    cases += [Case(T=300, H=H, Hkv=Hkv, D=64, dtype=BF16) for H, Hkv in ((10, 2), (7, 1))]
    for D in (64, 128):
        cases += [Case(T=400, S=500, D=D, dtype=BF16, options={"window": w}) for w in (1, 2, 5000)]
        cases.append(Case(T=400, S=500, D=D, dtype=BF16, options={"sink": 64}))
        cases.append(Case(B=1, T=600, D=D, dtype=BF16, cuts=[0, 0, 5, 5, 300], options={"sink": 64}))
        cases.append(Case(T=200, S=700, D=D, dtype=BF16, starts=[499, 700], options={"horizon": 8.0}))
    cases += [Case(T=300, D=64, dtype=BF16, options={"scale": s}) for s in (1e-35, 1e-10, 1.0, 20.0)]
    for D, layout in ((64, "last"), (80, "odd"), (128, "expanded")):
        shape = {"B": 1, "T": 300, "S": 700, "H": 10, "Hkv": 2, "D": D, "dtype": FP16, "layout": layout}
        documents = {"cuts": [1, 2, 2, 350, 600], "starts": [200]}
        cases.append(Case(**shape, **documents, options={"sink": 7, "scale": 0.1}))
        cases.append(Case(**shape, **documents, gate="zeros", options={"window": 90, "horizon": 8.0, "scale": 0.1}))
    return cases


@pytest.mark.parametrize("case", edges(), ids=Case.name)
def test_error_at_most_twice_eager(case):
    """Of outputs written to poisoned memory, the same bit for bit in two runs; what Gluon can't run, Triton does."""
    torch.manual_seed(0)
    assert failures(case, "cuda", backend="auto") == []
