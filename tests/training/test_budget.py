"""The budget: a pressure on the gates' gradients that leaves the forward alone and ends at its target."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from retrofox.acceleration.fused_projections import untouched
from retrofox.config import Budget, ExtendStage, load_recipe
from retrofox.planning.live_share import live_shares
from retrofox.training.budget import SHORT, GatePressure, pressed_gates
from retrofox.training.model_tweaks import save_memory
from retrofox.training.train import train
from retrofox.training.trainer import FoxTrainer

TOKENS = 24


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(0, 64, (2, TOKENS // 2), generator=torch.Generator().manual_seed(0))


def pressure_on(model, world=1, **budget) -> GatePressure:
    stage = ExtendStage(objective="extend", tokens=960, sequence_length=12, budget=Budget(**{"share": 0.1, **budget}))
    return GatePressure(model, stage, TOKENS, world)


def gradients(model, ids) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    logits = model(ids, use_cache=False).logits
    logits.square().mean().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def penalty(pressure: GatePressure, log_f: list[torch.Tensor]) -> torch.Tensor:
    """The penalty as the module's docstring writes it."""
    falling = -torch.stack(log_f)
    lives = math.log(2) / falling
    return torch.where(lives > SHORT, lives.log2(), 0.0).mean()


@pytest.mark.parametrize("world", [1, 2])
def test_the_gradient_is_that_of_the_written_penalty_and_the_forward_the_same_bits(pico_fox, ids, world):
    model = pico_fox(half_life=(50.0, 5000.0)).train()
    pressure = pressure_on(model, world, weight=0.5, length=300)
    before, plain = gradients(model, ids)
    pressure.attach()
    pressure.target = 0.1
    after, pressed = gradients(model, ids)
    pressure.detach()
    assert torch.equal(before, after)
    heard: list[torch.Tensor] = []
    hooks = [gate.register_forward_hook(lambda *found: heard.append(found[2])) for gate in pressure.gates]
    model.zero_grad()
    model(ids, use_cache=False)
    (0.5 * world * penalty(pressure, heard)).backward()
    for hook in hooks:
        hook.remove()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert any("forget_gate" in name for name in wanted)
    for name, added in wanted.items():
        torch.testing.assert_close(pressed[name] - plain[name], added, rtol=1e-3, atol=1e-6)


def test_it_ends_where_the_target_is_reached(pico_fox, ids):
    model = pico_fox(half_life=(2.0, 20.0)).train()
    _, plain = gradients(model, ids)
    pressure = pressure_on(model, share=0.9, length=1 << 20)
    pressure.attach()
    pressure.target = 0.9
    _, pressed = gradients(model, ids)
    assert float(pressure.live()) < 0.9
    assert all(torch.equal(plain[name], pressed[name]) for name in plain)


@pytest.mark.parametrize("gate_heads", ["query", "kv"])
def test_what_is_alive_is_the_cache_that_the_log_tells(pico_fox, ids, gate_heads):
    model = pico_fox(half_life=(2.0, 2000.0), gate_heads=gate_heads, horizon=8.0).train()
    pressure = pressure_on(model, length=8192)
    pressure.attach()
    gradients(model, ids)
    told = live_shares((-pressure.means).tolist(), 8.0, 2)["live_cache_8k"]
    assert float(pressure.live()) == pytest.approx(told, rel=1e-4)
    assert 0.1 < told < 0.9


@pytest.mark.parametrize(
    ("gate_heads", "open_and_closed"), [("query", [False, False, True, True]), ("kv", [False, True])]
)
def test_open_heads_are_not_pressed(pico_fox, ids, gate_heads, open_and_closed):
    model = pico_fox(half_life=(50.0, 5000.0), gate_heads=gate_heads, open_heads=[[1, 0]]).train()
    _, plain = gradients(model, ids)
    pressure = pressure_on(model, share=0.6, weight=0.5, length=300)
    pressure.attach()
    pressure.target = 0.6
    _, pressed = gradients(model, ids)
    first, second = (name for name in plain if name.endswith("forget_gate.bias"))
    assert (pressed[second] != plain[second]).tolist() == open_and_closed  # 4 heads, 2 kv heads
    assert not torch.equal(pressed[first], plain[first])


def test_fused_projections_may_call_the_hooks_of_a_pressed_gate(pico_fox):
    pressure = pressure_on(pico_fox())
    pressure.attach()
    assert all(untouched(gate, but_output_hooks=True) for gate in pressure.gates)
    pressure.gates[0].register_forward_hook(lambda *found: None)
    assert not untouched(pressure.gates[0], but_output_hooks=True)


def test_recomputed_layers_press_once(pico_fox, ids):
    model = pico_fox(half_life=(50.0, 5000.0)).train()
    pressure = pressure_on(model, weight=0.5)
    pressure.attach()
    _, kept = gradients(model, ids)
    save_memory(model, ExtendStage(objective="extend", tokens=960, sequence_length=12, gradient_checkpointing="full"))
    _, again = gradients(model, ids)
    for name, grad in kept.items():
        torch.testing.assert_close(again[name], grad, rtol=1e-5, atol=1e-7)


def test_the_target_falls_over_the_first_part_of_the_stage(pico_fox):
    pressure = pressure_on(pico_fox(), share=0.2, anneal=0.5)  # 960 tokens, 24 a step: 20 steps of 40
    targets = []
    for step in (0, 9, 19, 39):
        pressure.move(step)
        targets.append(pressure.target)
    assert targets == pytest.approx([0.96, 0.6, 0.2, 0.2])


@pytest.fixture
def recipe(tmp_path, pico_fox, saved, write_recipe) -> Path:
    model = saved(pico_fox(half_life=(50.0, 5000.0)), tmp_path / "model")
    budget = {"share": 0.1, "length": "1Ki", "weight": 1.0}
    return write_recipe({"budget": budget}, model=str(model), checkpoint={"every_steps": 1, "keep": 9})


def test_training_presses_logs_the_share_and_leaves_no_hook(recipe, monkeypatch):
    left = []
    release = FoxTrainer.release

    def noted(self):
        model = release(self)
        left.extend(hook for gate in pressed_gates(model).values() for hook in gate._forward_hooks)
        return model

    monkeypatch.setattr(FoxTrainer, "release", noted)
    found = train(load_recipe(recipe))["stages"][0]["live_share"]
    plain = train(load_recipe(recipe, ["stages.0.budget=null", f"output={recipe.parent / 'plain'}"]))
    assert found["live_cache_8k"] < plain["stages"][0]["live_share"]["live_cache_8k"]
    assert left == []
    lines = [json.loads(line) for line in (recipe.parent / "run" / "log.jsonl").read_text().splitlines()]
    assert lines[-1]["live_operations_32k"] == found["live_operations_32k"]
