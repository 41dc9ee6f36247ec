"""The switches that save memory, on a GPU: the gradients of a run without them, less memory, as much as planned."""

from __future__ import annotations

import gc

import pytest
import torch

import retrofox
from retrofox.config import ExtendStage, validate
from retrofox.planning.hardware import hardware
from retrofox.planning.memory import memory
from retrofox.planning.shape import shape_of
from retrofox.support.memory import reset_peak
from retrofox.training.measure import measure_steps
from retrofox.training.model_tweaks import lower_precision, save_memory
from retrofox.training.objectives import Extend
from retrofox.training.param_groups import set_trainable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]
WIDE = {
    "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "initializer_range": 0.02,
}  # fmt: skip
ALL = {"gradient_checkpointing": "full", "tiled_mlp": 1024, "offload_activations": True}


@pytest.fixture
def model(pico_llama):
    spec = retrofox.FoxSpec(half_life=(16.0, 4096.0), max_wavelength=40.0)
    model = retrofox.convert(pico_llama(**WIDE), fox=spec).to("cuda").train()
    lower_precision(model, torch.bfloat16)
    return model


def step(model, tokens, **switches):
    """(loss, gradients, peak bytes above the model) of a forward and backward."""
    stage = ExtendStage.model_validate({"objective": "extend", "tokens": tokens, "sequence_length": tokens, **switches})
    save_memory(model, stage)
    model.zero_grad(set_to_none=True)
    objective = Extend(model, stage, torch.device("cuda"))
    ids = torch.randint(0, 280, (1, tokens), generator=torch.Generator().manual_seed(0)).cuda()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16):
        loss = objective(model, {"input_ids": ids, "targets": ids})[0]
    (loss / tokens).backward()
    torch.cuda.synchronize()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return float(loss.detach()) / tokens, found, torch.cuda.max_memory_allocated() - before


def test_tiled_and_offloaded_gradients_are_the_plain_ones(model):
    plain = step(model, 8192, gradient_checkpointing="full")
    noise = step(model, 8192, gradient_checkpointing="full")  # the kernels' own, unordered
    for switches in ({"offload_activations": True}, ALL):
        found = step(model, 8192, **{"gradient_checkpointing": "full", **switches})
        assert found[0] == pytest.approx(plain[0], rel=1e-3)
        assert found[1].keys() == plain[1].keys()
        for name, wanted in plain[1].items():
            own = (noise[1][name] - wanted).norm()
            assert (found[1][name] - wanted).norm() <= 3 * own + 0.02 * wanted.norm(), name


def test_tiled_and_offloaded_steps_take_less_memory(model):
    tokens = 65536
    for _ in range(2):  # the first loads the kernels
        full = step(model, tokens, gradient_checkpointing="full")[2]
    tiled = step(model, tokens, gradient_checkpointing="full", tiled_mlp=1024)[2]
    both = step(model, tokens, gradient_checkpointing="full", tiled_mlp=1024, offload_activations=True)[2]
    checkpoint = 2 * tokens * 512
    assert tiled < full - 2 * 2 * tokens * 2048  # at least two of its tensors as wide as the MLP
    assert both < tiled - 3 * checkpoint  # six of eight are gone, the others come and go


@pytest.mark.parametrize("switches", [{"gradient_checkpointing": "full"}, ALL], ids=["full", "tiled and offloaded"])
def test_the_plan_is_within_ten_percent(model, switches):
    device, tokens = torch.device("cuda"), 131072
    stage = {"objective": "extend", "tokens": 100 * tokens, "sequence_length": tokens, **switches}
    recipe = validate({"model": "m", "output": "unused", "data": {"train": ["unused"]}, "stages": [stage]})
    set_trainable(model, recipe.stages[0])
    planned = memory(shape_of(model.config.to_dict()), recipe, recipe.stages[0], hardware("h100"))
    gc.collect()
    torch.cuda.empty_cache()
    before = reset_peak(device)
    found = measure_steps(recipe, recipe.stages[0], model, device, steps=2, documents=1, before=before)
    assert sum(planned.values()) == pytest.approx(1e9 * found["peak_memory_gb"], rel=0.1)
