"""The Triton kernels on a CPU, in Triton's interpreter: float32 and float16 at small shapes.

The interpreter has to be on before the kernels are imported, so one subprocess runs everything and reports as JSON. All
the while no kernel may touch memory outside the tensors which it was given.
bfloat16 is left to the GPU: the interpreter multiplies its raw bits.
"""

import json
import sys
import traceback
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("triton", reason="Triton is not installed here")

FEATURES = {
    "plain": {},
    "head dim 80": {"D": 80},
    "head dim 96, GQA 3": {"D": 96, "H": 3},
    "T < S": {"T": 20, "S": 75},
    "one token": {"T": 1, "S": 1},
    "decoding": {"T": 1, "S": 300, "H": 4, "options": {"sink": 3, "window": 100}},
    "documents": {"B": 1, "T": 90, "cuts": [1, 2, 2, 40, 41]},
    "documents, sinks, window": {"B": 1, "T": 90, "cuts": [1, 2, 50], "options": {"sink": 4, "window": 9}},
    "padding": {"T": 70, "starts": [33, 70]},
    "window": {"T": 100, "options": {"window": 33}},
    "window and sinks": {"T": 100, "options": {"window": 20, "sink": 1}},
    "sinks": {"T": 70, "options": {"sink": 40}},
    "softcap": {"options": {"softcap": 4.0}},
    "horizon, unequal heads": {"T": 150, "H": 4, "Hkv": 2, "gate": "unequal", "options": {"horizon": 5.0}},
    "horizon, T < S": {"T": 45, "S": 133, "H": 2, "gate": "unequal", "options": {"horizon": 9.0, "window": 70}},
    "horizon and sinks": {"T": 150, "gate": "unequal", "options": {"horizon": 3.0, "sink": 2}},
    "horizon, documents, sinks": {"B": 1, "T": 140, "cuts": [1, 2, 50], "options": {"horizon": 9.0, "sink": 3}},
    "horizon, padding, softcap": {"T": 90, "starts": [33, 90], "options": {"horizon": 4.0, "softcap": 4.0}},
    "horizon, last stride": {"T": 40, "S": 200, "H": 1, "layout": "last", "options": {"horizon": 8.0, "sink": 1}},
    "horizon, decoding": {"T": 2, "S": 300, "H": 4, "gate": "unequal", "options": {"horizon": 6.0, "sink": 3}},
    "shut": {"gate": "shut"},
    "zeros": {"T": 100, "gate": "zeros"},
    "open": {"gate": "open"},
    "strided": {"layout": "packed"},
    "last stride": {"layout": "last", "options": {"scale": -0.1}},
}
CHECKS = (
    "merging", "decoding", "helpers", "operator", "one_gradient", "nan", "copies_by_tma", "softcap", "refusals",
)  # fmt: skip
EXAMPLES = 24


def properties() -> list[str]:
    """Return the smallest problem that hypothesis finds to fail, with its errors; empty if it finds none."""
    import torch
    from cases import failures, problems
    from hypothesis import HealthCheck, given, settings

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


def leaves_its_tensors() -> list[str]:
    """Return what is wrong with the watch over the kernels' memory, which a row shorter by one must set off."""
    import bounds
    import torch
    from fox_kernels.common import cumsum
    from triton.runtime.errors import InterpreterError

    def shorter(x):
        first, end = extent(x)
        return first, end - x.element_size()

    extent = bounds.extent
    with mock.patch.object(bounds, "extent", shorter), bounds.enforced():
        try:
            cumsum.cumulative(torch.zeros(1, 100, 2))
        except InterpreterError as error:
            return [] if "a kernel left its tensors" in str(error) else [str(error)]
    return ["not seen"]


def run_all() -> dict[str, list[str]]:
    """Return the failures by name; runs in the subprocess, with the interpreter on."""
    import bounds

    with bounds.enforced():
        return run_each() | {"watch over memory": leaves_its_tensors()}


def run_each() -> dict[str, list[str]]:
    import launchers
    import torch
    from cases import Case, failures

    dtypes = (torch.float32, torch.float16)
    report = {}
    for n, (name, fields) in enumerate(FEATURES.items()):
        torch.manual_seed(n)
        report[name] = failures(Case(dtype=dtypes[n % 2], **fields))
    report["any problem"] = properties()
    arguments = {
        "merging": (35, 16),
        "decoding": (260, torch.float32, 1e-5),
        "helpers": (70,),
    }
    for check in CHECKS:
        device = () if check == "copies_by_tma" else ("cpu",)
        try:
            getattr(launchers, f"check_{check}")(*device, *arguments.get(check, ()))
            report[check] = []
        except AssertionError:
            report[check] = [traceback.format_exc()]
    return report


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [*FEATURES, "any problem"])
def test_error_at_most_twice_eager(name, report):
    assert report[name] == []


@pytest.mark.timeout(600)
def test_a_kernel_that_leaves_its_tensors_is_seen(report):
    assert report["watch over memory"] == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize("check", CHECKS)
def test_launchers_keep_their_promise(check, report):
    assert report[check] == []


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    print(json.dumps(run_all()))
