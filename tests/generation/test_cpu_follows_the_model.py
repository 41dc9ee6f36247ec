"""CPU `generate` runs the model's modules: what changes the base's text changes the converted model's alike."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama

import retrofox

OPTIONS = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}


class NotSiLU(nn.Module):
    def forward(self, x):
        return x.relu()


def hook_on_activation(model):
    for layer in model.model.layers:
        layer.mlp.act_fn.register_forward_hook(lambda module, args, out: out * 0.25)


def activation_replaced(model):
    for layer in model.model.layers:
        layer.mlp.act_fn.forward = torch.tanh


def activation_of_a_like_name(model):
    for layer in model.model.layers:
        layer.mlp.act_fn = NotSiLU()


@pytest.fixture
def twins(pico_llama):
    """(a base, its converted form with open gates and every rotary pair): the same function."""
    return pico_llama(), retrofox.convert(pico_llama(), fox=retrofox.FoxSpec(rope="keep", init="open")).eval()


@pytest.fixture
def ids():
    return torch.randint(2, 288, (1, 20), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("change", [hook_on_activation, activation_replaced, activation_of_a_like_name])
def test_a_changed_activation_gives_the_bases_tokens(twins, ids, change):
    base, model = twins
    before = base.generate(ids, **OPTIONS)
    for each in twins:
        change(each)
    wanted = base.generate(ids, **OPTIONS)
    assert not torch.equal(wanted, before)
    assert torch.equal(model.generate(ids, **OPTIONS), wanted)


@pytest.mark.parametrize("name", ["LlamaMLP", "LlamaRMSNorm"])
def test_a_patched_class_gives_the_bases_tokens(twins, ids, monkeypatch, name):
    base, model = twins
    before = base.generate(ids, **OPTIONS)
    own = getattr(modeling_llama, name).forward
    monkeypatch.setattr(getattr(modeling_llama, name), "forward", lambda self, x: own(self, x).sin())
    wanted = base.generate(ids, **OPTIONS)
    assert not torch.equal(wanted, before)
    assert torch.equal(model.generate(ids, **OPTIONS), wanted)


def test_a_global_hook_gives_the_bases_tokens(twins, ids):
    base, model = twins
    before = base.generate(ids, **OPTIONS)

    def hook(module, args, out):
        return out * 0.25 if isinstance(module, modeling_llama.LlamaMLP) else None

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        wanted, found = (each.generate(ids, **OPTIONS) for each in (base, model))
    finally:
        handle.remove()
    assert not torch.equal(wanted, before)
    assert torch.equal(found, wanted)
