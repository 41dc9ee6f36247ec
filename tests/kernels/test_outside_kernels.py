"""The kernels attacked from outside, on inputs that the proof list has none of: in Triton's interpreter on a CPU.

The interpreter has to be on before the kernels are imported, so one subprocess runs everything and reports as JSON. No
kernel may touch memory outside the tensors which it was given.
"""

# The operator returns o or (o, lse), options travel as dicts and strict zips of slices are beyond the checker:
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

import json
import sys
import traceback
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

FP16, FP32 = torch.float16, torch.float32


def check_softcaps_far_above_the_scores() -> None:
    """tanh by exp2 is good for 6e-8 of the cap, which a cap of 1e5 makes more than float16's rounding."""
    from cases import Case, failures
    from fox_kernels import prune

    prune.WORTH = 0
    for dtype, softcap, options in ((FP16, 1e5, {"prune": -4.0}), (FP16, 1e8, {}), (FP16, 1e38, {}), (FP32, 1e31, {})):
        torch.manual_seed(0)
        assert failures(Case(B=1, T=60, D=16, dtype=dtype, gate="short", options={"softcap": softcap} | options)) == []
    assert failures(Case(T=1, S=300, D=16, dtype=FP16, gate="short", options={"softcap": 1e8, "prune": -8.0})) == []


CHECKS = [name for name in dict(globals()) if name.startswith("check_")]


def run_all() -> dict[str, str]:
    """Return the traceback of each check that fails; runs in the subprocess, with the interpreter on."""
    import bounds

    report = {}
    for check in CHECKS:
        try:
            with bounds.enforced():
                globals()[check]()
        except AssertionError:
            report[check] = traceback.format_exc()
    return report


@pytest.mark.timeout(600)
@pytest.mark.parametrize("check", CHECKS)
def test_in_the_interpreter(check, report):
    assert report.get(check) is None, report[check]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    print(json.dumps(run_all()))
