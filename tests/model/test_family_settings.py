"""Settings of families: unusual ones convert, those that a conversion would not honour are refused."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import retrofox
from retrofox import FoxSpec
from retrofox.anatomy import attention_mode
from retrofox.config_values import trained_length
from retrofox.families import check_supported
from retrofox.model.configuration_fox import SUPPORTED
from retrofox.planning.known import KNOWN
from tests.model.conftest import close, logits
from tests.model.test_families import LENGTH, LLAMA3, MIXED, PICO, ROWS, UNUSUAL, make_base
from tests.model.test_families import tokens as tokens


@pytest.mark.parametrize("settings", UNUSUAL)
def test_unusual_settings(settings, stir, tokens, path):
    base = make_base(settings)
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.2)
    expected = logits(base, tokens)
    close(logits(retrofox.convert(base, fox=FoxSpec(rope="keep", init="open")), tokens), expected)
    fox = stir(retrofox.convert(base, fox=FoxSpec(half_life=(2.0, 100.0), max_wavelength=40.0))).eval()
    with attention_mode(fox, "original"):
        close(logits(fox, tokens), expected)
    mask = torch.ones_like(tokens)
    mask[1, :7] = 0
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    padded = fox.generate(tokens, attention_mask=mask, **options)
    assert torch.equal(padded[1, LENGTH:], fox.generate(tokens[1:, 7:], **options)[0, LENGTH - 7 :])
    beams = fox.generate(tokens, num_beams=3, **options)
    assert torch.equal(beams, fox.generate(tokens, num_beams=3, use_cache=False, **options))


def test_sink_tokens_are_refused_where_every_layer_has_a_window(tokens):
    base = make_base("mistral")
    with pytest.raises(
        ValueError, match="sink_tokens 4 has no effect in this mistral: each of its layers has a sliding"
    ):
        retrofox.convert(base, fox=FoxSpec(sink_tokens=4))
    by_default, none = (retrofox.convert(base, fox=spec) for spec in (FoxSpec(), FoxSpec(sink_tokens=0)))
    assert by_default.config.fox == none.config.fox
    assert torch.equal(logits(by_default, tokens), logits(none, tokens))


def test_trained_length_is_the_length_before_scaling():
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    for scaling, length in ((yarn, 32), (LLAMA3, 131072)):
        config = AutoConfig.for_model("llama", max_position_embeddings=131072, rope_parameters={**scaling})
        assert trained_length(config) == length
    assert trained_length(AutoConfig.for_model("llama", max_position_embeddings=4096)) == 4096
    assert trained_length(AutoConfig.for_model("gemma3_text", max_position_embeddings=512)) == 512
    long = {"short_factor": [1.0] * 48, "long_factor": [4.0] * 48, "original_max_position_embeddings": 4096}
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, **long}
    config = AutoConfig.for_model("phi3", max_position_embeddings=131072, rope_parameters=longrope)
    assert trained_length(config) == 4096
    # of config.json as it is
    assert trained_length(KNOWN["meta-llama/Llama-3.2-1B"]) == 131072
    assert trained_length({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 4096}}) == 4096


@pytest.mark.parametrize("model_type", ["gpt2", "gemma3", "mamba", "mistral4"])
def test_other_families_are_refused_with_the_list(model_type):
    with pytest.raises(ValueError, match="not supported") as error:
        check_supported(AutoConfig.for_model(model_type))
    assert all(family in str(error.value) for family in SUPPORTED)


@pytest.mark.parametrize("part", ["qk-norm", "k-shift", "v-shift"])
def test_parts_of_single_keys_are_refused_for_a_latent_and_nothing_is_written(part, tmp_path):
    make_base("youtu").save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match=f"^{part}: heads of a youtu have no key and value projections of their own"):
        retrofox.convert(tmp_path / "base", tmp_path / "out", fox=FoxSpec(pro=(part,)))
    assert not (tmp_path / "out").exists()


def test_a_router_stays_float32_in_a_bfloat16_model(tmp_path):
    base = make_base("deepseek_v3")
    retrofox.convert(base, fox=FoxSpec()).save_pretrained(tmp_path)
    loaded = retrofox.load(tmp_path, dtype=torch.bfloat16)
    kinds = {name: value.dtype for name, value in loaded.state_dict().items() if "e_score" in name}
    assert set(kinds.values()) == {torch.float32}
    assert loaded.model.layers[0].self_attn.o_proj.weight.dtype == torch.bfloat16


def test_windows_that_the_attention_is_not_told_of_are_refused():
    settings = {"use_sliding_window": True, "sliding_window": 7, "layer_types": MIXED}
    config = AutoConfig.for_model("qwen2_moe", **{**PICO, **ROWS["qwen2_moe"], **settings})
    with pytest.raises(ValueError, match="set use_sliding_window to false"):
        retrofox.convert(AutoModelForCausalLM.from_config(config))
