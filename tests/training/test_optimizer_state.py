"""Optimizer state in CPU memory: the same bits as without, the same state_dict, refused where it can't be."""

from __future__ import annotations

import copy

import pytest
import torch

from retrofox.training import optimizer_state
from retrofox.training.optimizer_state import offloaded


def parameters():
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in ((30, 4), (7,), (2, 3, 5), (64,))]


def groups_of(params):
    return [{"params": params[:1], "lr": 0.1, "role": "rest"}, {"params": params[1:], "lr": 0.02, "weight_decay": 0.0}]


def train(optimizer, params, steps, first=0):
    for step in range(first, first + steps):
        torch.manual_seed(step)
        for index, parameter in enumerate(params):
            parameter.grad = torch.randn(parameter.shape) if (index + step) % 3 else None  # some have none
        optimizer.step()


@pytest.mark.parametrize("visiting", [1, 200, 1 << 20])
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {}),
    ],
)
def test_the_same_bits_and_the_same_state(cls, options, visiting, monkeypatch):
    monkeypatch.setattr(optimizer_state, "VISITING", visiting)
    plain, moved = parameters(), parameters()
    one, other = cls(groups_of(plain), **options), offloaded(cls)(groups_of(moved), **options)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)) for o in (one, other)]
    for step in range(4):
        train(one, plain, 1, step)
        train(other, moved, 1, step)
        for schedule in schedules:
            schedule.step()
    assert all(torch.equal(x, y) for x, y in zip(plain, moved, strict=True))
    wanted, found = one.state_dict(), other.state_dict()
    assert wanted["param_groups"] == found["param_groups"]
    assert wanted["state"].keys() == found["state"].keys()
    for number, state in wanted["state"].items():
        assert state.keys() == found["state"][number].keys()
        for key, value in state.items():
            assert torch.equal(value, found["state"][number][key]) if value is not None else True


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("after", [True, False])
def test_resumed_from_either_form(before, after):
    def optimizer(params, on_cpu):
        return (offloaded(torch.optim.AdamW) if on_cpu else torch.optim.AdamW)(groups_of(params), fused=True)

    whole = parameters()
    train(optimizer(whole, False), whole, 0)
    uninterrupted = optimizer(whole, False)
    train(uninterrupted, whole, 5)
    params = parameters()
    first = optimizer(params, before)
    train(first, params, 3)
    saved = copy.deepcopy(first.state_dict())
    assert all(state["step"] == 2 for state in saved["state"].values())
    second = optimizer(params, after)
    second.load_state_dict(saved)
    train(second, params, 2, first=3)
    assert all(torch.equal(x, y) for x, y in zip(whole, params, strict=True))


def test_other_optimizers_are_refused():
    class Other(torch.optim.SGD):
        pass

    with pytest.raises(ValueError, match="moves the state of torch's own optimizers, and Other is from"):
        offloaded(Other)
