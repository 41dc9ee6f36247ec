"""Forgetting Attention of whole rows by torch's flash kernel in parts, beside the operator in float64."""

from __future__ import annotations

import pytest
import torch
from fox_kernels import forgetting_attention

from retrofox.model import parts
from retrofox.model.cache import GateCache

CASES = {  # rows, queries, keys, sinks, nats a token
    "one block": (1, 100, 100, 0, 0.01),
    "sinks": (2, 100, 100, 3, 0.01),
    "blocks": (1, 700, 700, 1, 0.01),
    "short blocks": (2, 300, 300, 2, 0.2),
    "open": (1, 300, 300, 1, 0.0),
    "hardly closing": (1, 300, 300, 0, 1e-4),
    "a prompt's second part": (2, 290, 700, 3, 0.05),
    "written out": (2, 256, 256, 2, 0.03),
    "written out, closing fast": (1, 256, 256, 2, 3.0),
    "few queries": (1, 2, 400, 1, 0.5),
    "two tokens": (3, 2, 2, 1, 2.0),
    "written out, no sinks": (2, 64, 64, 0, 0.1),
    "all but one are sinks": (1, 40, 40, 39, 0.1),
}


def inputs(rows: int, queries: int, keys: int, nats: float) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((6, queries), (2, keys), (2, keys))
    q, k, v = (torch.randn(rows, heads, n, 16, generator=generator) for heads, n in shapes)
    return [q, k, v, -2 * nats * torch.rand(rows, keys, 6, generator=generator)]


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_agrees_with_float64(case):
    rows, queries, keys, sink, nats = CASES[case]
    q, k, v, log_f = inputs(rows, queries, keys, nats)
    out = parts.by_parts(q, k, v, GateCache(None, log_f).cumulative(), None, sink)
    assert out is not None
    assert out.is_contiguous()
    q, k, v = (x.transpose(1, 2).double() for x in (q, k, v))
    torch.testing.assert_close(
        out.double(), forgetting_attention(q, k, v, log_f.double(), sink=sink), atol=4e-6, rtol=0
    )


@torch.no_grad()
def test_gates_that_close_too_fast_and_calls_that_end_among_sinks_are_left():
    q, k, v, log_f = inputs(1, 200, 200, 0.01)

    def tried(log_f, queries=200, sink=0):
        return parts.by_parts(q[:, :, -queries:], k, v, GateCache(None, log_f).cumulative(), None, sink)

    shut = log_f.clone()
    shut[:, 100, 0] = -1e4
    lost = log_f.clone()
    lost[:, 100, 0] = float("nan")
    assert tried(log_f) is not None
    assert tried(shut) is tried(lost) is tried(log_f, sink=200) is tried(log_f, queries=100, sink=150) is None


@torch.no_grad()
def test_a_short_prompt_takes_one_call_and_a_later_part_takes_parts(monkeypatch):
    calls, flash = [], parts.FLASH
    monkeypatch.setattr(parts, "FLASH", lambda *args, **kwargs: calls.append(args) or flash(*args, **kwargs))

    def counted(case):
        rows, queries, keys, sink, nats = CASES[case]
        q, k, v, log_f = inputs(rows, queries, keys, nats)
        calls.clear()
        assert parts.by_parts(q, k, v, GateCache(None, log_f).cumulative(), None, sink) is not None
        return len(calls)

    assert counted("written out") == 0  # torch's SDPA with a bias
    assert counted("written out, closing fast") == 1  # row
    assert counted("a prompt's second part") > 2


def test_only_float32_in_inference():
    q, k, v, _ = inputs(1, 8, 8, 0.01)
    assert not parts.divides(q, k, v)
    with torch.no_grad():
        assert parts.divides(q, k, v)
        assert not parts.divides(q[:, :, :1], k, v)
        assert not parts.divides(*(x.bfloat16() for x in (q, k, v)))
        with torch.autocast("cpu", torch.bfloat16):
            assert not parts.divides(q, k, v)


@torch.no_grad()
def test_open_gates_are_sdpa_bit_for_bit():
    q, k, v, _ = inputs(2, 300, 300, 0.0)
    log_f = torch.full((2, 300, 6), -1e-13)  # what init="open" has
    out = parts.by_parts(q, k, v, GateCache(None, log_f).cumulative(), None, 0)
    plain = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    assert out is not None
    assert torch.equal(out, plain.transpose(1, 2))


def test_gradients_autocast_and_other_dtypes_are_left():
    q, k, v, _ = inputs(1, 20, 20, 0.0)
    assert not parts.divides(q, k, v)  # gradients are recorded
    with torch.no_grad():
        assert parts.divides(q, k, v)
        assert not parts.divides(q.bfloat16(), k.bfloat16(), v.bfloat16())
        with torch.autocast("cpu", torch.bfloat16):
            assert not parts.divides(q, k, v)
