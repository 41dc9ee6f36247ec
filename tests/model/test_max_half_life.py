"""`max_half_life`: heads that are not open forget at least that fast, and a horizon then bounds what a layer sees."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import retrofox
from retrofox.anatomy import attentions, reach

LONGEST, HORIZON = 8.0, 2.0


@pytest.fixture(params=["kv", "query"])
def bounded(request, pico_fox) -> Any:
    return pico_fox(
        gate_heads=request.param, half_life=(4, 4096), max_half_life=LONGEST, horizon=HORIZON, open_heads=((1, 0),)
    )


def log_f(model: Any, tokens: torch.Tensor) -> list[torch.Tensor]:
    heard: list[torch.Tensor] = []
    hooks = [a.forget_gate.register_forward_hook(lambda *call: heard.append(call[2])) for _, a in attentions(model)]
    model(tokens, use_cache=False)
    for hook in hooks:
        hook.remove()
    return heard


def test_every_gate_but_an_open_heads_forgets_so_fast(bounded, tokens):
    first, second = log_f(bounded, tokens)
    bound = -math.log(2) / LONGEST
    assert first.amax() <= bound
    of_open_head, others = second.chunk(2, -1)  # the query heads of two kv heads, or their gates
    assert others.amax() <= bound
    assert of_open_head.amin() > bound / 4
    assert first.amin() < bound * 1.01, "the text still decides how much faster"


def test_the_gradient_is_that_of_an_unbounded_gate(bounded, pico_fox, tokens):
    heads = bounded.config.fox["gate_heads"]
    plain = pico_fox(gate_heads=heads, half_life=(4, 4096), horizon=HORIZON, open_heads=((1, 0),))
    for model in (bounded, plain):
        log_f(model, tokens)[0].sum().backward()
    gates = [next(attentions(model))[1].forget_gate.weight.grad for model in (bounded, plain)]
    torch.testing.assert_close(*gates)


def test_a_layer_sees_no_further_than_its_reach(pico_fox):
    model = pico_fox(half_life=(4, 4096), max_half_life=LONGEST, horizon=HORIZON)
    seen = [reach(attention) or 0 for _, attention in attentions(model)]
    assert seen == [math.ceil(HORIZON * LONGEST / math.log(2)) + 1] * 2
    ids = torch.randint(2, 288, (1, 80), generator=torch.Generator().manual_seed(3))
    other = ids.clone()
    other[:, 5] = (other[:, 5] + 1) % 280 + 2  # not the sink
    with torch.no_grad():
        ours, theirs = model(ids).logits, model(other).logits
    far = 5 + sum(seen)
    torch.testing.assert_close(ours[:, far:], theirs[:, far:])
    assert (ours - theirs)[:, 5 : 5 + seen[0]].abs().amax(-1).min() > 1e-2


def test_a_layer_with_an_open_head_or_without_a_horizon_has_no_reach(bounded, pico_fox):
    first, second = (attention for _, attention in attentions(bounded))
    assert reach(first) is not None
    assert reach(second) is None
    assert {reach(attention) for _, attention in attentions(pico_fox(max_half_life=LONGEST))} == {None}


def test_a_saved_model_keeps_its_bound(bounded, tokens, tmp_path):
    bounded.save_pretrained(tmp_path / "model")
    loaded = retrofox.load(tmp_path / "model")
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, bounded.eval()(tokens).logits)
    assert loaded.config.fox["max_half_life"] == LONGEST
