"""A converted checkpoint in a class without gates: refused with what to do, by every transformers class but ours."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel

import retrofox

TOKENS = torch.arange(2, 18)[None]
WHAT_TO_DO = "forget gates, which a plain class drops: load it with retrofox.load, or with AutoModelForCausalLM"


OPTIONS = [{}, {"attn_implementation": "sdpa"}, {"dtype": torch.bfloat16}, {"ignore_mismatched_sizes": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("plain", [LlamaForCausalLM, LlamaModel])
def test_a_plain_class_refuses_a_converted_checkpoint(plain, options, pico_fox_checkpoint):
    with pytest.raises(ValueError, match=WHAT_TO_DO):
        plain.from_pretrained(pico_fox_checkpoint, **options)


def test_a_converted_directory_is_refused_too_and_its_own_classes_load_it(converted, tmp_path, remote_code):
    with pytest.raises(ValueError, match=WHAT_TO_DO):
        LlamaForCausalLM.from_pretrained(converted)
    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoModelForCausalLM.from_pretrained(converted, trust_remote_code=False)
    model = retrofox.load(converted)
    far = AutoModelForCausalLM.from_pretrained(converted, trust_remote_code=True)
    assert torch.equal(far.eval()(TOKENS).logits, model(TOKENS).logits)
    far.save_pretrained(tmp_path / "again")
    with pytest.raises(ValueError, match=WHAT_TO_DO):
        LlamaForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(retrofox.load(tmp_path / "again")(TOKENS).logits, model(TOKENS).logits)


def test_the_path_given_again_as_the_config_is_refused_too(pico_fox_checkpoint):
    with pytest.raises(ValueError, match=WHAT_TO_DO):
        LlamaForCausalLM.from_pretrained(pico_fox_checkpoint, config=str(pico_fox_checkpoint))


def test_the_config_in_memory_knows_nothing_of_it(pico_fox_checkpoint):
    config = retrofox.load(pico_fox_checkpoint).config
    assert "transformers_weights" not in config.to_dict()
    LlamaForCausalLM(LlamaConfig(**config.to_dict()))
