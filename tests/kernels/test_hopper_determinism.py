"""The switch between repeatable and fast gradients: what the launchers are told, in eager mode and compiled."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import fox_kernels
import twins
from fox_kernels import autograd, determinism, forward_backward
from fox_kernels.common import cumsum
from fox_kernels.options import Documents, Options


@pytest.fixture
def asked(monkeypatch):
    """Let launchers that need no GPU stand in for the Hopper ones; return what each backward was asked for."""
    told = []

    def forward(q, k, v, c_hi, c_lo, *given, **options):
        return torch.zeros_like(q), torch.zeros(q.shape[0], q.shape[2], q.shape[1])

    def backward(do, dlse2, q, k, v, saved, *given, deterministic):
        told.append(deterministic)
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), torch.zeros_like(saved.c_hi)

    monkeypatch.setattr(forward_backward, "launchers", lambda backend: (forward, backward))
    monkeypatch.setattr(cumsum, "cumulative", lambda log_f, counter: twins.cumulative_torch(log_f))
    monkeypatch.setattr(cumsum, "gate_gradient", twins.gate_gradient_torch)
    return told


def forward(q, log_f) -> Any:
    return autograd.forgetting_attention(q, q, q, log_f, Options(0.25), Documents(), "gluon", return_lse=False)


def leaves():
    return torch.randn(1, 8, 2, 16, requires_grad=True), torch.zeros(1, 8, 2)


def test_gradients_are_repeatable_unless_switched_off(asked):
    forward(*leaves()).sum().backward()
    with fox_kernels.deterministic(False):
        o = forward(*leaves())
        with fox_kernels.deterministic(True):
            forward(*leaves()).sum().backward()
    o.sum().backward()  # after the block: it follows its forward
    fox_kernels.set_deterministic(False)  # until set again
    forward(*leaves()).sum().backward()
    fox_kernels.set_deterministic(True)
    forward(*leaves()).sum().backward()
    assert asked == [True, True, False, False, True]


def test_torch_deterministic_algorithms_win():
    torch.use_deterministic_algorithms(True)
    try:
        with fox_kernels.deterministic(False):
            assert determinism.is_deterministic()
    finally:
        torch.use_deterministic_algorithms(False)


def test_an_error_in_the_block_restores_the_switch():
    with pytest.raises(RuntimeError, match="inside"), fox_kernels.deterministic(False):
        raise RuntimeError("inside")
    assert determinism.is_deterministic()


def test_a_compiled_function_follows_the_switch(asked):
    compiled = torch.compile(forward, backend="aot_eager", fullgraph=True)
    for value in (True, False, True):
        with fox_kernels.deterministic(value):
            o = compiled(*leaves())
        o.sum().backward()
    assert asked == [True, False, True]
