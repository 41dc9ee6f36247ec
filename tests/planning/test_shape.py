"""Parameters counted from a config.json are those of the model that it builds."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import retrofox
from retrofox.config import LoraConfig
from retrofox.model.configuration_fox import SUPPORTED
from retrofox.planning.hours import flops_per_token
from retrofox.planning.memory import adapter_parameters
from retrofox.planning.shape import FAMILIES, shape_of
from retrofox.training.lora import add_adapters
from tests.conftest import DEEPSEEK, MLA

SMALL = {
    "vocab_size": 288, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 12, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
FEW = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
OWN = {"mixtral": FEW, "qwen3_moe": FEW, "granitemoe": FEW, "olmoe": FEW, "cohere": {"use_qk_norm": True}}
OWN |= {"deepseek_v2": {**DEEPSEEK, "q_lora_rank": None}, "youtu": {**MLA, "attention_bias": True}}
OWN |= {"deepseek_v3": {**DEEPSEEK, "n_shared_experts": 2}, "glm4_moe_lite": DEEPSEEK}
OWN["qwen2_moe"] = {**FEW, "shared_expert_intermediate_size": 20}


def empty(family: str, **changes):
    config = AutoConfig.for_model(family, **{**SMALL, **OWN.get(family, {}), **changes})
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def count(model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_every_family_that_can_be_converted_is_known():
    assert FAMILIES.keys() == SUPPORTED.keys()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_the_models(family):
    model = empty(family)
    assert shape_of(model.config.to_dict()).parameters == count(model)


@pytest.mark.parametrize("biases", [{"attention_bias": True}, {"mlp_bias": True}, {"tie_word_embeddings": True}])
def test_biases_and_a_tied_head_are_counted(biases):
    model = empty("llama", **biases)
    assert shape_of(model.config.to_dict()).parameters == count(model)


@pytest.mark.parametrize("fox", [{}, {"gate": "bias"}, {"gate": "none"}, {"pro": "all"}])
def test_what_a_conversion_adds_is_counted(pico_llama, fox):
    base = pico_llama()
    shape = shape_of(base.config.to_dict(), retrofox.FoxSpec(**fox))
    converted = retrofox.convert(base, fox=retrofox.FoxSpec(**fox))
    assert shape.parameters == count(converted)
    assert shape_of(converted.config.to_dict()).parameters == count(converted)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]])
def test_adapters_are_counted(pico_fox, recipe_of, targets):
    lora = LoraConfig(rank=3, targets=targets)
    model = pico_fox()
    recipe = recipe_of(lora=lora.model_dump())
    counts = adapter_parameters(shape_of(model.config.to_dict()), recipe.lora)
    adapted = add_adapters(model, lora, "model")
    assert sum(counts.values()) == sum(p.numel() for name, p in adapted.named_parameters() if "lora_" in name)


@pytest.mark.parametrize("objective", ["extend", "distill", "align"])
def test_operations_are_those_counted_on_the_model(pico_llama, recipe_of, objective):
    model = pico_llama()
    recipe = recipe_of(stage={"objective": objective, "rates": {"attention": 1e-4} if objective == "align" else {}})
    products = {n: m.in_features * m.out_features for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    attention = 2.0 * 2 * 4 * 8 * recipe.stages[0].sequence_length  # two layers of four heads of 8 channels
    forward = 2.0 * sum(products.values()) + attention
    wanted = {"extend": 3 * forward, "distill": 4 * forward}
    wanted["align"] = forward + 4.0 * sum(n for name, n in products.items() if "attn" in name) + 3 * attention
    found = flops_per_token(shape_of(model.config.to_dict()), recipe.lora, recipe.stages[0])
    assert found == pytest.approx(wanted[objective], rel=1e-3)


def test_a_window_costs_what_it_shows(recipe_of, pico_llama):
    config = pico_llama().config.to_dict() | {"model_type": "mistral"}
    recipe = recipe_of()
    whole, windowed = (
        flops_per_token(shape_of({**config, "sliding_window": window}), recipe.lora, recipe.stages[0])
        for window in (None, 2048)
    )
    attention = 3 * 2 * 2 * 32 * 8192  # three passes, two layers of 32 channels, 8192 tokens
    assert whole - windowed == attention * (1 - 2 * (2048 / 8192 - (2048 / 8192) ** 2 / 2))


def test_an_unknown_family_is_refused_with_what_to_do():
    with pytest.raises(ValueError, match=r"and this model is gpt2: `retrofox convert` says"):
        shape_of({"model_type": "gpt2"})
