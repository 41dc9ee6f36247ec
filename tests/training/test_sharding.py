"""FSDP2's units, and what is left to accelerate and torch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from retrofox.training.sharding import shards_layers, units


@pytest.mark.parametrize(
    ("count", "size", "least", "wanted"),
    [
        (30, 3_540_000, 24_000_000, [8, 7, 7, 8]),  # SmolLM2-135M
        (16, 60_820_000, 24_000_000, [1] * 16),  # Llama-3.2-1B
        (3, 10, 100, [3]),  # all of them have fewer
        (5, 10, 20, [2, 3]),
    ],
)
def test_small_layers_share_a_unit(count, size, least, wanted):
    layers = [nn.Linear(1, size, bias=False, device="meta") for _ in range(count)]
    groups = units(layers, least)
    assert [len(group) for group in groups] == wanted
    assert [layer for group in groups for layer in group] == layers


def plugin(**values) -> SimpleNamespace:
    plain = {"auto_wrap_policy": transformer_auto_wrap_policy, "transformer_cls_names_to_wrap": None}
    return SimpleNamespace(**{**plain, "activation_checkpointing": False, "ignored_modules": None, **values})


def test_what_accelerate_is_asked_for_is_left_to_it():
    model = nn.Linear(2, 2)
    assert shards_layers(plugin(), model)
    for values in (
        {"auto_wrap_policy": size_based_auto_wrap_policy},
        {"transformer_cls_names_to_wrap": ["LlamaMLP"]},
        {"activation_checkpointing": True},
        {"ignored_modules": "lm_head"},
    ):
        assert not shards_layers(plugin(**values), model)
    packed = nn.Linear(2, 2)
    packed.weight = nn.Parameter(torch.zeros(2, 2, dtype=torch.uint8), requires_grad=False)  # 4 bits, two by two
    assert not shards_layers(plugin(), packed)
