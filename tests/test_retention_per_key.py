"""Retention per key beside forget gates: the same model where gates are constant, its definition where they are not."""

from __future__ import annotations

import importlib
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from retrofox.model import modeling_fox

pytest.importorskip("triton", reason="Triton is not installed here")
BENCHMARKS = str(Path(__file__).resolve().parents[1] / "benchmarks")
sys.path.insert(0, BENCHMARKS)
retention_per_key: Any = importlib.import_module("retention_per_key")

IDS = torch.randint(2, 288, (2, 70), generator=torch.Generator().manual_seed(5))
FOX: dict[str, Any] = {"gate_heads": "kv", "horizon": 4.0, "sink_tokens": 1}


@pytest.fixture
def retained(monkeypatch):
    """Replaces the attention of converted models."""
    return lambda: monkeypatch.setattr(modeling_fox, "attend", retention_per_key.attend)


@torch.no_grad()
def test_constant_gates_are_the_same_model(pico_fox, retained):
    model = pico_fox(stirred=False, **FOX)
    documents = torch.tensor([0, 30, 70, 100, 140], dtype=torch.int32)
    rows, packed = model(IDS).logits, model(IDS, cu_seqlens=documents).logits
    retained()
    torch.testing.assert_close(model(IDS).logits, rows, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model(IDS, cu_seqlens=documents).logits, packed, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_token_after_a_cache_sees_what_it_sees_in_the_whole_text(pico_fox, retained):
    model = pico_fox(**FOX)
    gated = model(IDS).logits
    retained()
    whole, cache = model(IDS).logits, DynamicCache(config=model.config)
    assert not torch.allclose(whole, gated, atol=1e-2), "gates that depend on the text are another model"
    steps = [model(part, **{modeling_fox.CACHE: cache}).logits for part in IDS.split([40, 1, 29], 1)]
    torch.testing.assert_close(torch.cat(steps, 1), whole, atol=1e-4, rtol=1e-4)


def test_a_key_fades_with_its_own_age_alone():
    """Of two keys with equal products the weights are e^(age log beta), and nothing beyond the horizon."""
    length, horizon = 6, 3.0
    log_beta = torch.tensor([[-0.1, -2.0, -0.5, -0.7, 0.0, -1.0]])
    q, k, v = torch.zeros(length, 1, 4), torch.zeros(length, 1, 4), torch.eye(length)[:, None]
    out = retention_per_key.reference(q, k, v, log_beta, torch.zeros(length), 0.5, horizon)
    for i in range(length):
        decays = [(i - j) * float(log_beta[0, j]) for j in range(i + 1)]
        weights = torch.tensor([math.exp(x) if x > -horizon else 0.0 for x in decays] + [0.0] * (length - 1 - i))
        torch.testing.assert_close(out[i, 0], weights / weights.sum())


def test_the_kernels_give_the_reference_and_its_gradients():
    """In Triton's interpreter, which has to be on before they are imported."""
    program = "import torch, retention_per_key as r; r.SIZE = 32; assert r.check('cpu', torch.float32, 200) < 1e-5"
    path = os.pathsep.join([BENCHMARKS, *sys.path])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_pressure_adds_the_gradient_of_the_share_while_it_is_too_large():
    pressure = retention_per_key.Pressure(0.16, 0.5, horizon=8.0, calls=1, steps=1)
    log_beta = (-torch.logspace(-5, -1, 40, dtype=torch.float64)).view(1, 20, 2).requires_grad_()
    pressure.press(log_beta * 1.0).sum().backward()
    share, weight = pressure.history[0].tolist()
    reach = 8.0 / log_beta.detach().abs() / 32768
    assert share == pytest.approx(float(reach.clamp_max(1.0).mean()))
    assert weight == pytest.approx(0.5 + 0.1 * (share - 1.0)), "the first target is the whole cache"
    x = 32768 * log_beta.detach().neg().requires_grad_() / 8.0
    (slope,) = torch.autograd.grad(((1 - torch.exp(-x)) / x).mean(), x)
    torch.testing.assert_close(log_beta.grad, 1.0 + weight * slope * (-32768 / 8.0), rtol=1e-4, atol=1e-6)
    pressure.press(log_beta * 1.0)
    assert float(pressure.history[1][1]) == pytest.approx(weight + 0.1 * (share - 0.16))
