"""Which implementation runs, and the reason that is printed, on GPUs that are not here: fake tensors stand in."""

import re
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton", reason="Triton is not installed here")
from fox_kernels import choose, forgetting_attention
from fox_kernels.hopper import forward as hopper_forward
from fox_kernels.host import device

BF16 = torch.bfloat16
# shape and options of a problem -> backend on a Hopper GPU with Triton 3.6, and what its reason says
CHOICES: list[tuple[dict[str, Any], str, str]] = [
    ({}, "gluon", "^Hopper GPU$"),
    ({"D": 128, "window": 9, "dtype": torch.float16}, "gluon", "^Hopper GPU$"),
    ({"D": 80, "sink": 64, "starts": [0, 3]}, "gluon", "^Hopper GPU$"),
    ({"D": 128, "DV": 64}, "triton", "not gluon: the heads of v have 64 channels, those of q and k 128$"),
    ({"D": 192}, "triton", r"^CUDA tensors; not gluon: head_dim 192 is not one of \(64, 80, 96, 128, 256\)"),
    ({"D": 256}, "gluon", "Hopper GPU"),
    ({"dtype": torch.float32}, "triton", "dtype torch.float32 is not bfloat16 or float16"),
    ({"softcap": 5.0}, "triton", "no softcap"),
    ({"window": 9, "sink": 1}, "triton", "no window together with sink"),
    ({"horizon": 8.0, "sink": 1}, "gluon", "Hopper GPU"),
    ({"horizon": 8.0}, "gluon", "Hopper GPU"),
    ({"sink": 65}, "triton", "sink 65 is more than 64"),
    ({"scale": -0.1}, "triton", "scale -0.1 is not between"),
    ({"scale": 1e-30}, "triton", "scale 1e-30 is not between"),
    ({"T": 63}, "triton", "63 queries are less than its tile of 64"),
    ({"capability": (8, 0)}, "triton", "not a Hopper"),
    ({"capability": (10, 0)}, "triton", "not a Hopper"),
    ({"gluon": "triton 3.10 is not 3.6 to 3.9"}, "triton", "^CUDA tensors; not gluon: triton 3.10 is not 3.6 to 3.9$"),
    ({"capability": (7, 5)}, "chunked", "older than Ampere"),
    ({"D": 48}, "chunked", "head_dim 48 is not one of"),
    ({"dtype": torch.float64}, "chunked", "dtype torch.float64 is not one of"),
    ({"rocm": True}, "chunked", "proven on CUDA only"),
]


@pytest.fixture
def problem(monkeypatch):
    """Return a function that makes fake inputs on a GPU that does as told, and the operator's options."""

    def make(T=128, D=64, DV=None, dtype=BF16, capability=(9, 0), gluon=None, rocm=False, starts=None, **options):
        monkeypatch.setattr(torch.version, "cuda", None if rocm else "13.0")
        monkeypatch.setitem(device._capabilities, torch.device("cuda:0"), capability)
        monkeypatch.setattr(hopper_forward, "GLUON_MISSING", gluon)
        widths = ((T, 4, D), (128, 2, D), (128, 2, DV or D))
        q, k, v = (torch.empty(2, n, h, d, dtype=dtype, device="cuda") for n, h, d in widths)
        if starts is not None:
            options["seq_start"] = torch.empty(2, dtype=torch.int32, device="cuda")
        return (q, k, v, torch.empty(2, 128, 4, device="cuda")), options

    with FakeTensorMode():
        yield make


@pytest.mark.parametrize(("given", "backend", "reason"), CHOICES, ids=str)
def test_the_choice_on_a_gpu_and_its_reason(problem, given, backend, reason):
    inputs, options = problem(**given)
    chosen, said = choose(*inputs, **options)
    assert chosen == backend
    assert re.search(reason, said), said
    able = {"gluon": ("triton", "gluon"), "triton": ("triton",), "chunked": ()}[backend]
    why = said.removeprefix("CUDA tensors; not gluon: ")
    other = "triton" if able else "chunked"
    for name in ("triton", "gluon"):
        if name in able:
            assert choose(*inputs, **options, backend=name) == (name, "asked for")
        else:
            with pytest.raises(ValueError, match="can't run") as refused:
                choose(*inputs, **options, backend=name)
            assert str(refused.value) == f'backend="{name}" can\'t run: {why}; use backend="auto" or "{other}"'


def test_gradients_choose_by_what_the_backward_has(problem):
    (q, k, v, log_f), options = problem(horizon=8.0, sink=1)
    log_f.requires_grad_()
    reason = "CUDA tensors; not gluon: its backward has no horizon together with sink tokens"
    assert choose(q, k, v, log_f, **options) == ("triton", reason)
    with torch.no_grad():
        assert choose(q, k, v, log_f, **options)[0] == "gluon"


def test_the_choice_is_that_of_the_dtype_that_autocast_takes(problem, monkeypatch):
    inputs, options = problem(dtype=torch.float32)
    assert choose(*inputs, **options)[0] == "triton"
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")  # not without a GPU
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: BF16)
    assert choose(*inputs, **options) == ("gluon", "Hopper GPU")


@pytest.mark.parametrize("given", [{}, {"D": 256, "softcap": 5.0}, {"T": 3, "horizon": 4.0}], ids=str)
def test_fake_tensors_take_the_shapes_through_the_operator(problem, given):
    inputs, options = problem(**given)
    with torch.no_grad():  # torch without CUDA can't differentiate on it
        o, lse = forgetting_attention(*inputs, return_lse=True, **options)
    T, D = given.get("T", 128), given.get("D", 64)
    assert (o.shape, o.dtype, o.device.type) == ((2, T, 4, D), BF16, "cuda")
    assert (lse.shape, lse.dtype) == ((2, T, 4), torch.float32)
