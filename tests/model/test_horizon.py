"""The horizon: keys that have decayed by more are masked, alike in every path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fox_kernels.reference import forgetting_attention as reference

import retrofox
from retrofox.acceleration import attention_dispatch
from retrofox.anatomy import attention_mode
from retrofox.model import modeling_fox as scores
from retrofox.model.attention_torch import forgetting_attention as by_torch
from retrofox.model.attention_torch import masked_attention, visible_keys
from tests.model.conftest import ids_of, logits

SPEC = {"half_life": (1.0, 40.0), "horizon": 3.0}
OPTIONS = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}


@pytest.mark.parametrize("sink", [0, 2])
def test_a_layers_attention_is_the_references(pico_fox, path, monkeypatch, sink):
    seen = []
    attend = scores.attend

    def noted(call):
        out = attend(call)
        seen.append((call.query, call.key, call.value, call.gates.log_f, call.options, out))
        return out

    monkeypatch.setattr("retrofox.model.modeling_fox.attend", noted)
    logits(pico_fox(**SPEC, sink_tokens=sink), ids_of(2, 60))
    for query, key, value, log_f, options, out in seen:
        q, k, v = (x.transpose(1, 2).double() for x in (query, key, value))
        given = {"scale": options["scale"], "sink": sink}
        outputs: list[Any] = [reference(q, k, v, log_f.double(), horizon=h, **given) for h in (3.0, None)]
        wanted, open_ = outputs
        torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)
        assert (wanted - open_).abs().max() > 1e-2


def test_a_decay_of_just_the_horizon_hides_a_key():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 70, 1, 8) for _ in range(3))
    for log_f in (torch.full((1, 70, 1), -rate) for rate in (0.5, 0.25, 1.0)):
        torch.testing.assert_close(by_torch(q, k, v, log_f, horizon=5.0), reference(q, k, v, log_f, horizon=5.0))


def test_gates_in_other_modes_have_no_horizon(pico_fox):
    model, whole = pico_fox(**SPEC), pico_fox(half_life=SPEC["half_life"])
    for mode in ("original", "open"):
        with attention_mode(model, mode), attention_mode(whole, mode):
            assert torch.equal(logits(model, ids_of(1, 40)), logits(whole, ids_of(1, 40)))


def test_decoding_kernels_take_the_horizon(pico_fox, monkeypatch):
    """Torch takes the place of the kernels, which have tests of their own."""
    model, ids, calls = pico_fox(**SPEC), ids_of(2, 60), []

    def decoded(q, k, v, high, low, *, seq_start, window, **options):
        calls.append(options)
        assert (seq_start, window) == (None, None)
        last = torch.arange(k.shape[1] - q.shape[1], k.shape[1])
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return masked_attention(q, k, v, (high, low), visible_keys(last, k.shape[2], None, None), **options)

    wanted = model.generate(ids, **OPTIONS)
    monkeypatch.setattr(scores, "SHORT_SCORES", 0)
    monkeypatch.setattr(attention_dispatch, "decodes", lambda q, k, v: q.shape[1] == 1)
    monkeypatch.setattr(attention_dispatch, "decode_attention", decoded)
    assert torch.equal(model.generate(ids, **OPTIONS), wanted)
    assert {options["horizon"] for options in calls} == {SPEC["horizon"]}


def test_gradients_are_those_of_a_masked_softmax(pico_fox, monkeypatch):
    ids, gradients = ids_of(1, 40), []
    for short in (0, 1 << 30):
        monkeypatch.setattr(scores, "SHORT_SCORES", short)
        if short:
            monkeypatch.setattr(scores, "choose", lambda call: ("bias", "a test asks for it"))
        model = pico_fox(**SPEC)
        model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), "16", True])
def test_a_horizon_that_is_no_number_of_nats_is_refused(value):
    with pytest.raises(ValueError, match="horizon"):
        retrofox.FoxSpec(horizon=value)
