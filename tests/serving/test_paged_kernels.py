"""The kernels over pages against float64: in Triton's interpreter, and on a GPU by `pytest -m gpu`."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from tests.serving import paged_texts
from tests.serving.paged_texts import ATTENDED, PAST, SHAPES, attended, everything

IN_INTERPRETER = paged_texts.__file__


def check_written(found):
    assert found["rows"] == 0.0
    assert found["c"] <= 1e-7 * max(1.0, found["largest"])


def check_attended(found, within=1e-5):
    assert found["error"] <= within
    assert found["padding"] == 0.0


def check_gathered(found):
    assert found["key"] == found["value"] == 0.0
    assert found["log_f"] <= 1e-7


@pytest.mark.parametrize("name", SHAPES)
def test_new_tokens_are_in_their_rows_with_c_in_the_interpreter(report, name):
    check_written(report["write"][name])


@pytest.mark.parametrize("name", ATTENDED)
def test_tokens_attend_to_their_pages_in_the_interpreter(report, name):
    """With a horizon not to blocks that no head of the group sees: these are poisoned."""
    found = report["attend"][name]
    check_attended(found)
    assert "horizon" not in ATTENDED[name] or name == "a window within a horizon" or found["poisoned"] >= 64


@pytest.mark.parametrize("name", PAST)
def test_the_kernel_copies_a_past_in_the_interpreter(report, name):
    check_gathered(report["gather"][name])


@pytest.mark.gpu
def test_the_kernels_write_attend_and_copy_on_a_gpu():
    found = everything("cuda")
    for kind, check in (("write", check_written), ("attend", check_attended), ("gather", check_gathered)):
        for differences in found[kind].values():
            check(differences)
    for shape in ATTENDED.values():
        half = attended(**shape, device="cuda", dtype=torch.bfloat16)
        check_attended(half, 0.02)  # outputs of size 3
