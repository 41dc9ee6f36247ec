"""Recipes written for a model and a machine fit it, and the shipped ones are what is written today."""

from __future__ import annotations

import json
import re

import pytest

from retrofox.config import load_recipe
from retrofox.config.shipped import HOME
from retrofox.fox_spec import FoxSpec
from retrofox.planning.hardware import hardware
from retrofox.planning.known import LLAMA_1B
from retrofox.planning.new_recipe import new_recipe
from retrofox.planning.plan import plan

SHIPPED = {"llama-3.2-1b": "meta-llama/Llama-3.2-1B", "llama-3.1-8b": "meta-llama/Llama-3.1-8B"}
SHIPPED["qwen3-8b"] = "Qwen/Qwen3-8B"
CARDS = {"24gb": "4090", "80gb": "a100-80"}


@pytest.mark.parametrize("model", SHIPPED.values())
@pytest.mark.parametrize(("gpu", "gpus"), [("4090", 1), ("h100", 1), ("h100", 8)])
def test_what_is_written_fits_with_room_to_spare(tmp_path, model, gpu, gpus):
    file = tmp_path / "recipe.yaml"
    file.write_text(new_recipe(model, 16384, hardware(gpu), gpus))
    report = plan(load_recipe(file), hardware(gpu), gpus)
    assert report["refusals"] == []
    assert sum(report["stages"][0]["memory_gb"].values()) < 0.92 * report["device_memory_gb"]


@pytest.mark.parametrize(
    ("machine", "gpus", "said", "lora"),
    [
        (hardware("h100"), 8, "whole weights fit", None),
        (hardware("a100-40"), 1, "adapters on a bfloat16 base fit, whole weights don't", "lora: {rank: 16}"),
        (hardware(memory="12G"), 1, "adapters on a 4-bit base fit", "lora: {rank: 16, quantize: nf4}"),
    ],
)
def test_the_choice_is_explained(machine, gpus, said, lora):
    text = new_recipe("meta-llama/Llama-3.1-8B", 4096, machine, gpus)
    assert said in text
    assert "lora:" not in text if lora is None else lora in text


def test_what_fits_in_no_way_is_refused_with_a_length_that_does():
    with pytest.raises(ValueError, match=r"in no way, .* give --length \d+ or less"):
        new_recipe("meta-llama/Llama-3.1-8B", 1 << 20, hardware("4090"))
    with pytest.raises(ValueError, match=r"in no way, .*: take a larger GPU"):
        new_recipe("meta-llama/Llama-3.1-8B", 4096, hardware(memory="2G"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "fox_llama", "fox": FoxSpec().to_dict()}, "is already converted"),
        ({"quantization_config": {"quant_method": "awq"}}, "is quantised (awq)"),
    ],
)
def test_a_model_that_can_not_be_converted_gets_no_recipe(tmp_path, changes, said):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA_1B, **changes}))
    with pytest.raises(ValueError, match=re.escape(said)):
        new_recipe(str(tmp_path), 4096, hardware("h100"))


def test_a_rope_that_takes_its_frequencies_from_the_length_skips_no_positions(tmp_path):
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    config = {**LLAMA_1B, "max_position_embeddings": 8192, "rope_parameters": dynamic}
    (tmp_path / "config.json").write_text(json.dumps(config))
    recipe = new_recipe(str(tmp_path), 16384, hardware("h100"))
    assert "max_position" not in recipe
    assert "rope_factor: 2" in recipe


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("card", CARDS)
def test_shipped_recipes_of_adapters_are_what_is_written_today(name, card):
    text = new_recipe(SHIPPED[name], 32768, hardware(CARDS[card]), adapters=True)
    own = text.replace(f"output: runs/{name}", f"output: runs/{name}-lora-{card}")
    assert (HOME / f"{name}-lora-{card}.yaml").read_text() == own


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipes_of_whole_weights_state_the_memory_planned_today(name):
    report = plan(load_recipe(HOME / f"{name}.yaml"), hardware("h100"), 8)
    needed = sum(report["stages"][0]["memory_gb"].values())
    text = (HOME / f"{name}.yaml").read_text()
    assert f"{report['parameters']:,} parameters" in text
    assert f"{needed:.1f} GB of 80 on each GPU" in text


def test_the_command_writes_once(run, tmp_path):
    file = tmp_path / "new" / "folder" / "my.yaml"
    given = ["recipes", "new", "--model", "Qwen/Qwen3-8B", "--gpu", "4090", "--out", file]
    code, shown, _ = run(*given)
    assert (code, shown.strip()) == (0, str(file))
    code, _, said = run(*given)
    assert code == 2
    assert "exists: remove it" in said
