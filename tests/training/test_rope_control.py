"""Controls with another RoPE: the trained model's config and logits follow, in plain transformers too."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from retrofox.loading.base import load_base
from retrofox.loading.rope_scaling import set_rope, set_rope_config
from retrofox.training.measure import check_here
from retrofox.training.train import train

YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.fixture
def control(make_recipe):
    return functools.partial(make_recipe, {"tokens": 256}, converted=False, fox=None)


@pytest.mark.parametrize(
    ("keys", "config"),
    [
        ({"rope_scaling": YARN}, {"rope_parameters": {**YARN, "original_max_position_embeddings": 128}}),
        (
            {"rope_scaling": LLAMA3},
            {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 128}, "max_position_embeddings": 512},
        ),
        ({"rope_theta": 500_000}, {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}}),
    ],
)
def test_a_trained_control_loads_with_its_rope_in_plain_transformers(control, pico_llama, keys, config):
    result = train(control({"tokens": 256}, **keys))
    written = json.loads((Path(result["model"]) / "config.json").read_text())["rope_parameters"]
    assert written == {"rope_theta": 10_000.0, **config["rope_parameters"]}
    model = AutoModelForCausalLM.from_pretrained(result["model"]).eval()
    assert not set_rope_config(model.config, keys.get("rope_scaling"), keys.get("rope_theta"))  # it has that already
    by_hand = pico_llama(**config).eval()
    by_hand.load_state_dict(model.state_dict())
    plain = pico_llama().eval()
    plain.load_state_dict(model.state_dict())
    ids = torch.randint(2, 288, (1, 100), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(ids).logits
        assert torch.equal(logits, by_hand(ids).logits)
        assert (logits - plain(ids).logits).abs().max() > 0.1


def test_it_learns_from_the_model_with_its_own_rope(make_recipe):
    stage = {"objective": "distill", "tokens": 256}
    scaled = make_recipe(stage, converted=False, fox=None, rope_scaling=YARN)
    assert train(scaled)["stages"][0]["loss_first"] > 1e-4
    with pytest.raises(ValueError, match=r"the model would learn from itself: give `fox:`, rope_scaling or rope_theta"):
        train(make_recipe(stage, converted=False, fox=None, output=f"{scaled.output}-as-it-was"))


def test_the_first_loss_is_that_of_the_base_with_the_new_rope(control, pico_checkpoint):
    scaled, _ = load_base(pico_checkpoint)
    set_rope(scaled, YARN)
    recipe = control(rope_scaling=YARN)
    first = train(recipe)["stages"][0]["loss_first"]
    plain = train(control(output=recipe.output + "-plain"))["stages"][0]["loss_first"]
    assert abs(first - plain) > 1e-3
    before = scaled.model.rotary_emb.inv_freq.clone()
    set_rope(scaled, YARN)  # a later stage starts from a model that is scaled already
    assert torch.equal(scaled.model.rotary_emb.inv_freq, before)


def test_a_rope_that_would_be_lost_or_ignored_is_refused(control):
    for keys, told in (
        ({"fox": {}, "rope_scaling": YARN}, "rope_scaling is for unconverted models: remove it, or remove `fox:`"),
        ({"lora": {}, "rope_theta": 5e5}, "rope_theta is for unconverted models: remove it, or remove `lora:`"),
        ({"rope_scaling": {"rope_type": "yarm", "factor": 4.0}}, "did you mean 'yarn'"),
        ({"rope_scaling": {**YARN, "factor": 1}}, "greater than 1"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3 takes low_freq_factor, high_freq_factor"),
    ):
        with pytest.raises(ValueError, match=told):
            control(**keys)


def test_a_rope_of_a_model_that_has_its_own_is_refused(control, pico_fox_checkpoint, pico_llama, saved, tmp_path):
    model = pico_llama(rope_scaling={"rope_type": "linear", "factor": 2.0})
    scaled = saved(model, tmp_path / "scaled")
    for model, told in (
        (pico_fox_checkpoint, f"rope_scaling is for unconverted models, and {pico_fox_checkpoint} is converted"),
        (scaled, "this model's RoPE is scaled already (rope_type linear)"),
    ):
        recipe = control(model=str(model), rope_scaling=YARN)
        assert told in check_here(recipe)[0]
        with pytest.raises(ValueError, match=re.escape(told)):
            train(recipe)
        assert not Path(recipe.output).exists()
