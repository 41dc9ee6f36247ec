"""Recomputed layers, tiled MLPs and fused norms: the plain model's gradients, each parameter's once, kept in little."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

import retrofox
from retrofox.anatomy import decoder_layers
from retrofox.config import ExtendStage, LoraConfig
from retrofox.training.lora import add_adapters
from retrofox.training.model_tweaks import fuse_norms, lower_precision, save_memory
from retrofox.training.objectives import Extend
from retrofox.training.tiling import Tiled, tile_modules, tile_tokens
from tests import conftest
from tests.training.conftest import packed_batch

PICO = {**conftest.PICO, "initializer_range": 0.15}
STAGE = {"objective": "extend", "tokens": 1024, "sequence_length": 40}


def gradients(model, autocast=False, **switches):
    """(loss, gradients by name) of one step with these switches, the model left as it was."""
    stage = ExtendStage.model_validate({**STAGE, **switches})
    save_memory(model, stage)
    model.train().zero_grad(set_to_none=True)
    torch.manual_seed(5)  # for dropout
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = Extend(model, stage, torch.device("cpu"))(model, packed_batch(rows=2))[0]
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    save_memory(model, ExtendStage.model_validate(STAGE))
    return loss.detach(), found


def assert_same(one, other, rel):
    """Gradients equal to `rel` of the largest of each; the same parameters have one."""
    assert one[0] == pytest.approx(float(other[0]), rel=rel)
    assert one[1].keys() == other[1].keys()
    for name, wanted in one[1].items():
        assert other[1][name].dtype == wanted.dtype
        error = (other[1][name] - wanted).abs().max()
        assert error <= rel * wanted.abs().max().clamp_min(1e-6), name


def test_fused_norms_change_nothing(pico_fox):
    model, ids = pico_fox(), packed_batch()["input_ids"]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        assert fuse_norms(model) == 5
        torch.testing.assert_close(model(input_ids=ids).logits, before, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recomputed", ["none", "full", 2])
@pytest.mark.parametrize("tile", ["none", 1, 7, 40, 64])  # of 80 tokens in all
def test_gradients_are_the_untiled_ones_to_float32_rounding(pico_fox, tile, recomputed):
    model = pico_fox()
    plain = gradients(model)
    assert_same(plain, gradients(model, tiled_mlp=tile, gradient_checkpointing=recomputed), rel=2e-6)


@pytest.mark.parametrize("family", ["gemma3_text", "phi3", "cohere2", "starcoder2", "olmo2"])
def test_families_with_other_norms_and_mlps(family):
    """Norms of 1 + w, with biases, and behind the MLP; gates and values in one product; no gate."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **PICO)
    model = retrofox.convert(AutoModelForCausalLM.from_config(config), fox=retrofox.FoxSpec(half_life=(2.0, 99.0)))
    switches = {"tiled_mlp": 7, "gradient_checkpointing": "full", "offload_activations": True}
    assert_same(gradients(model), gradients(model, **switches), rel=1e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_adapters_inside_the_mlp_get_their_gradients(pico_fox, dropout):
    """One tile drops what the whole MLP drops; with several, the backward drops what their forward dropped."""
    model = add_adapters(pico_fox(), LoraConfig(rank=2, dropout=dropout), "")
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=generator)
    if not dropout:
        assert_same(gradients(model), gradients(model, tiled_mlp=16), rel=5e-5)
        return
    found = gradients(model, tiled_mlp=16)
    adapter = decoder_layers(model)[0].mlp.down_proj.lora_B["default"].weight
    step = torch.zeros_like(adapter)
    step[3, 1] = 1e-3
    losses = []
    for sign in (1, -1):
        adapter.data += sign * step
        losses.append(float(gradients(model, tiled_mlp=16)[0]))
        adapter.data -= sign * step
    name = "base_model.model.model.layers.0.mlp.down_proj.lora_B.default.weight"
    assert (losses[0] - losses[1]) / 2e-3 == pytest.approx(float(found[1][name][3, 1]), rel=0.05)


@pytest.mark.parametrize("recomputed", ["none", "full"])
def test_under_autocast_weights_get_float32_gradients(pico_fox, recomputed):
    model = pico_fox()
    lower_precision(model, torch.bfloat16)
    plain = gradients(model, autocast=True, gradient_checkpointing=recomputed)
    tiled = gradients(model, autocast=True, gradient_checkpointing=recomputed, tiled_mlp=16)
    assert_same(plain, tiled, rel=0.05)
    assert all(gradient.dtype == torch.float32 for gradient in tiled[1].values())


def test_a_backward_under_autocast_finds_the_weights(pico_fox):
    """Autocast's copies of weights, made where no graph was, would take their gradients away."""
    mlp = decoder_layers(pico_fox())[0].mlp.train()
    x = torch.randn(1, 40, 32)
    with torch.autocast("cpu", torch.bfloat16):
        tiled = Tiled(mlp, 8, mlp.forward)
        (tiled(x).float().square().sum() + mlp(x).float().square().sum()).backward()
        found = mlp.up_proj.weight.grad.clone()
        mlp.zero_grad()
        (2 * mlp(x).float().square().sum()).backward()
    torch.testing.assert_close(found, mlp.up_proj.weight.grad, rtol=0.05, atol=0.05 * float(found.abs().max()))


def test_only_the_input_is_kept(pico_fox):
    """Of the MLP's tensors, 48 channels wide, none is kept for the backward."""
    for tile, wide in (("none", True), (8, False)):
        model, kept = pico_fox().train(), []

        def pack(x, kept=kept):
            kept.append(x.shape)
            return x

        save_memory(model, ExtendStage.model_validate({**STAGE, "tiled_mlp": tile}))
        objective = Extend(model, ExtendStage.model_validate(STAGE), torch.device("cpu"))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            objective(model, packed_batch())
        assert any(len(shape) == 3 and shape[-1] == 48 for shape in kept) == wide


def test_recomputing_a_layer_does_not_run_its_mlp_again(pico_llama):
    """Two passes over each MLP's tokens in all: the forward, and the tiles of the backward."""
    layer, seen = decoder_layers(pico_llama())[0].train(), []
    layer.mlp.down_proj.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape[1]))
    mlp = layer.mlp
    mlp.forward = Tiled(mlp, 10, mlp.forward)
    x = torch.randn(1, 40, 32, requires_grad=True)

    def run(x):
        return x + mlp(layer.post_attention_layernorm(x))

    checkpoint(run, x, use_reentrant=False).sum().backward()
    assert sum(seen) == 80
    assert max(seen) == 10


def test_a_parameter_gets_its_gradient_once(pico_fox):
    """What DDP and FSDP2 hang on: one accumulation a backward, whatever the number of tiles."""
    model, counts = pico_fox(), {}

    def count(name):
        return lambda parameter: counts.update({name: counts.get(name, 0) + 1})

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(count(name))
    gradients(model, tiled_mlp=8, gradient_checkpointing="full")
    assert set(counts.values()) == {1}
    assert sum(".mlp." in name for name in counts) == 6


def test_tiles_are_undone(pico_fox):
    model = pico_fox()
    assert tile_modules(model, 8) == 2
    tile_modules(model, "none")
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_tiles_by_width():
    def mlp(wide):
        return nn.Sequential(nn.Linear(8, wide, device="meta"), nn.Linear(wide, 8, device="meta"))

    assert tile_tokens(mlp(14336), "auto") == 8192
    assert tile_tokens(mlp(8192), "auto") == 16384
    assert tile_tokens(mlp(10**6), "auto") == 1024
    assert tile_tokens(mlp(14336), 300) == 300


def test_experts_are_left_alone(pico_llama):
    model = copy.deepcopy(pico_llama())
    for layer in decoder_layers(model):
        layer.mlp.gate = nn.Linear(32, 4)
    with pytest.raises(ValueError, match=r"have no MLP to tile .*: set tiled_mlp: none"):
        tile_modules(model, "auto")
    model.model.layers[0].mlp = pico_llama().model.layers[0].mlp
    assert tile_modules(model, "auto") == 1
