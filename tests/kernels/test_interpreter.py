"""The Triton kernels on a CPU, in Triton's interpreter: float32 and float16 at small shapes.

All the while no kernel may touch memory outside the tensors which it was given. bfloat16 is left to the GPU: the
interpreter multiplies its raw bits.
"""

from functools import partial
from unittest import mock

import pytest
import torch
from cases import Case, broken, failures, problems
from hypothesis import HealthCheck, given, settings

pytest.importorskip("triton", reason="Triton is not installed here")
import bounds
import launchers
from fox_kernels.common import cumsum
from triton.runtime.errors import InterpreterError

HALF = torch.float16
FEATURES = {
    "plain": {},
    "head dim 96, GQA 3": {"D": 96, "H": 3},
    "MLA, 192 and 128": {"T": 40, "D": 192, "DV": 128, "H": 1},
    "MLA, decoding": {"T": 1, "S": 300, "D": 192, "DV": 128, "options": {"horizon": 6.0, "sink": 1}},
    "one token": {"T": 1, "S": 1},
    "decoding": {"T": 1, "S": 300, "H": 4, "options": {"sink": 3, "window": 100}},
    "documents, sinks, window": {"B": 1, "T": 90, "cuts": [1, 2, 2, 50], "options": {"sink": 4, "window": 9}},
    "padding": {"T": 70, "starts": [33, 70]},
    "window and sinks": {"T": 100, "options": {"window": 20, "sink": 1}},
    "sinks": {"T": 70, "options": {"sink": 40}},
    # tanh by exp2 is good for 6e-8 of the cap, which one of 1e5 makes more than float16's rounding
    "softcap 1e5, horizon": {"D": 16, "dtype": HALF, "gate": "short", "options": {"softcap": 1e5, "horizon": 8.0}},
    "softcap 1e8, decoding": {"T": 1, "S": 300, "dtype": HALF, "gate": "short", "options": {"softcap": 1e8}},
    "softcap 1e38": {"D": 16, "dtype": HALF, "gate": "short", "options": {"softcap": 1e38}},
    "softcap 1e31, float32": {"D": 16, "dtype": torch.float32, "gate": "short", "options": {"softcap": 1e31}},
    "horizon, unequal heads": {"T": 150, "H": 4, "Hkv": 2, "gate": "unequal", "options": {"horizon": 5.0}},
    "horizon, T < S": {"T": 45, "S": 133, "H": 2, "gate": "unequal", "options": {"horizon": 9.0, "window": 70}},
    "horizon and sinks": {"T": 150, "gate": "unequal", "options": {"horizon": 3.0, "sink": 2}},
    "horizon, documents, sinks": {"B": 1, "T": 140, "cuts": [1, 2, 50], "options": {"horizon": 9.0, "sink": 3}},
    "horizon, padding, softcap": {"T": 90, "starts": [33, 90], "options": {"horizon": 4.0, "softcap": 4.0}},
    "horizon, last stride": {"T": 40, "S": 200, "H": 1, "layout": "last", "options": {"horizon": 8.0, "sink": 1}},
    "horizon, decoding": {"T": 2, "S": 300, "H": 4, "gate": "unequal", "options": {"horizon": 6.0, "sink": 3}},
    "shut": {"gate": "shut"},
    "zeros": {"T": 100, "gate": "zeros"},
    "last stride": {"layout": "last", "options": {"scale": -0.1}},
    "decays of just a horizon": {"T": 90, "gate": "halves", "options": {"horizon": 3.0}},
}
CHECKS = {
    "helpers": ("cpu", 70), "copies_by_tma": (),
    **dict.fromkeys(("operator", "one_gradient", "nan", "softcap"), ("cpu",)),
}  # fmt: skip
EXAMPLES = 24


def properties() -> list[str]:
    """Return the smallest problem that hypothesis finds to fail, with its errors; empty if it finds none."""

    @settings(
        max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )  # fmt: skip
    @given(problems((torch.float32, torch.float16)))
    def check(case):
        torch.manual_seed(0)
        found = failures(case)
        assert not found, found

    try:
        check()
    except AssertionError as error:
        return [str(error)]
    return []


def check_watch() -> None:
    """A kernel that leaves its tensors is seen: here all of them seem empty."""
    nothing = mock.patch.object(bounds, "extent", lambda x: (x.data_ptr(), x.data_ptr()))
    with nothing, pytest.raises(InterpreterError, match="a kernel left its tensors"):
        cumsum.cumulative(torch.zeros(1, 100, 2))


def in_interpreter() -> dict:
    """Return the failures by name."""
    with bounds.enforced():
        return run_each()


def run_each() -> dict:
    report = {}
    for n, (name, fields) in enumerate(FEATURES.items()):
        torch.manual_seed(n)
        report[name] = failures(Case(**{"dtype": (torch.float32, torch.float16)[n % 2], **fields}))
    report["any problem"] = properties()
    checks = {f"check {name}": partial(getattr(launchers, f"check_{name}"), *CHECKS[name]) for name in CHECKS}
    checks["check watch"] = check_watch
    return report | broken(checks)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [*FEATURES, "any problem"])
def test_error_at_most_twice_eager(name, report):
    assert report[name] == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize("check", [*CHECKS, "watch"])
def test_launchers_keep_their_promise(check, report):
    assert not report[f"check {check}"]
