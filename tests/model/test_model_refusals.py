"""Every way to run a converted model that would drop or break its gates is refused with a clear error."""

from typing import Any

import pytest
import torch
from accelerate.big_modeling import _attach_context_parallel_hooks
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer

import retrofox
from retrofox.anatomy import attentions
from retrofox.model.modeling_fox import CACHE, fox_attention

TOKENS = torch.arange(2, 14)[None]


@pytest.fixture
def fox(pico_fox):
    return pico_fox()


@pytest.fixture(scope="module")
def directory(pico_fox, tmp_path_factory):
    path = tmp_path_factory.mktemp("fox")
    pico_fox().save_pretrained(path)
    return path


OTHERS = ["sdpa", "eager", "flash_attention_2", "flex_attention", "paged|eager"]


@pytest.mark.parametrize("implementation", OTHERS)
def test_loading_with_another_attention(directory, implementation):
    with pytest.raises(ValueError, match="ignore the forget gates"):
        type(retrofox.load(directory)).from_pretrained(directory, attn_implementation=implementation)


def test_loading_with_another_attention_through_the_auto_class(directory, remote_code):
    with pytest.raises(ValueError, match="ignore the forget gates"):
        AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True, attn_implementation="sdpa")


@pytest.mark.parametrize("implementation", OTHERS)
def test_changing_the_attention_later(fox, implementation):
    with pytest.raises(ValueError, match="ignore the forget gates"):
        fox.set_attn_implementation(implementation)
    with pytest.raises(ValueError, match="ignore the forget gates"):
        fox.set_attn_implementation({"": implementation})
    assert fox(TOKENS).logits.isfinite().all()


def test_editing_the_config_later(fox):
    fox.config._attn_implementation = "sdpa"
    with pytest.raises(ValueError, match="ignore the forget gates"):
        fox(TOKENS)


def test_continuous_batching(fox):
    with pytest.raises(ValueError, match="continuous batching"):
        fox.generate_batch([[1, 2, 3]])


def test_accelerate_context_parallelism(fox):
    _attach_context_parallel_hooks(fox)
    with pytest.raises(ValueError, match="context parallelism"):
        fox(TOKENS)


@pytest.mark.parametrize("asked", [{"tp_plan": "auto"}, {"tp_size": 2}, {"distributed_config": {"tp_plan": "auto"}}])
def test_tensor_parallelism(directory, asked):
    with pytest.raises(ValueError, match="splits the heads of attention without their forget gates"):
        type(retrofox.load(directory)).from_pretrained(directory, **asked)


def test_a_replaced_attention_function(fox, monkeypatch):
    """DeepSpeed's sequence parallelism registers a wrapper under the attention's name."""

    def sequence_parallel(module, query, key, value, attention_mask, *args, **kwargs):
        return fox_attention(module, query, key, value, attention_mask, *args, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, "fox", sequence_parallel)
    with pytest.raises(ValueError, match="sequence parallelism"):
        fox(TOKENS)
    monkeypatch.undo()
    assert fox(TOKENS).logits.isfinite().all()


def test_a_plain_model_with_the_fox_attention(pico_llama):
    model = pico_llama()
    model.set_attn_implementation("fox")
    with pytest.raises(ValueError, match="needs a converted model"):
        model(TOKENS)


def test_attention_dropout_in_training(pico_fox):
    model = pico_fox()
    attention: Any
    for _, attention in attentions(model):
        attention.attention_dropout = 0.1
    assert model(TOKENS).logits.isfinite().all()
    with pytest.raises(ValueError, match="attention_dropout to 0"):
        model.train()(TOKENS)


def test_a_quantised_cache(fox):
    class QuantizedLayer(DynamicLayer):
        pass

    cache: Any = DynamicCache(config=fox.config)
    cache.layers = [QuantizedLayer() for _ in cache.layers]
    with pytest.raises(ValueError, match="QuantizedLayer can't hold the forget gates"):
        fox(TOKENS, **{CACHE: cache})


def test_attention_weights(fox):
    with pytest.raises(ValueError, match="output_attentions"):
        fox(TOKENS, output_attentions=True)


def test_serving_engines_may_not_swap_the_attention(fox):
    """vLLM and SGLang read this flag before they replace a transformers model's attention by their own."""
    assert not fox._supports_attention_backend
    assert not fox.model._supports_attention_backend
    assert not type(fox).is_backend_compatible()  # what vLLM's and SGLang's transformers backends ask before loading
    assert not type(fox.model).is_backend_compatible()
    assert not fox._supports_flash_attn
    assert not fox._supports_flex_attn
