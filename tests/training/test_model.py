"""The teacher of align and distill is the original, however the model that is trained came about."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import retrofox
from retrofox.training.measure import check_here
from retrofox.training.objectives import original_form
from retrofox.training.param_groups import set_trainable
from retrofox.training.teacher import changed_since_conversion, needs_teacher, teacher_for
from retrofox.training.train import train

GATES_ONLY = {"attention": 0, "rest": 0}


@pytest.fixture
def converted(pico_checkpoint, tmp_path):
    retrofox.convert(pico_checkpoint, tmp_path / "converted", fox=retrofox.FoxSpec(half_life=(2, 200)), verify=False)
    return tmp_path / "converted"


@pytest.fixture
def refitted(converted):
    """A checkpoint saved when conversions could refit queries: they are not the base's, and its report says so."""
    file = next(path for path in converted.glob("*.safetensors") if any("q_proj" in name for name in load_file(path)))
    tensors = load_file(file)
    names = [name for name in tensors if "q_proj" in name]
    save_file(
        {name: value * 1.5 if name in names else value for name, value in tensors.items()}, file, {"format": "pt"}
    )
    report = json.loads((converted / "retrofox.json").read_text())
    (converted / "retrofox.json").write_text(json.dumps({**report, "calibration": {"rewritten": names}}))
    return converted


@pytest.fixture
def recipe_of(make_recipe):
    """recipe_of(model, **stage) -> a recipe of one stage, which distils gates alone unless it says otherwise."""
    distill = {"objective": "distill", "tokens": 128, "rates": GATES_ONLY}
    return lambda model, **stage: make_recipe({**distill, **stage}, model=str(model))


def teacher_of(recipe, source):
    model = retrofox.load(source)
    set_trainable(model, recipe.stages[0])
    return teacher_for(recipe, recipe.stages[0], model, Path(source), PartialState(cpu=True))


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(2, 60)[None]).logits


def test_frozen_weights_of_a_conversion_teach_themselves(converted, recipe_of):
    assert teacher_of(recipe_of(converted), converted) is None
    copied = teacher_of(recipe_of(converted, teacher="copy"), converted)
    assert copied is not None


def test_after_a_refit_the_base_itself_teaches(refitted, pico_checkpoint, recipe_of):
    with pytest.raises(ValueError, match=r"teacher: shared .* calibration rewrote 2 query projections.* teacher: copy"):
        teacher_of(recipe_of(refitted, teacher="shared"), refitted)
    teacher = teacher_of(recipe_of(refitted), refitted)
    base = logits(AutoModelForCausalLM.from_pretrained(pico_checkpoint))
    with original_form(teacher):
        torch.testing.assert_close(logits(teacher), base, rtol=1e-4, atol=1e-4)
    student = retrofox.load(refitted)
    with original_form(student):
        assert (logits(student) - base).abs().max() > 1e-2
    shutil.rmtree(pico_checkpoint)
    with pytest.raises(ValueError, match=r"must teach it: .*pico-llama"):
        teacher_of(recipe_of(refitted), refitted)


def test_a_trained_model_does_not_pass_for_its_original(converted, recipe_of):
    recipe = recipe_of(converted, objective="extend", rates={}, learning_rate=1e-2)
    trained = train(recipe)["model"]
    assert "training moved" in str(changed_since_conversion(Path(trained)))
    again = recipe_of(trained, teacher="shared")
    with pytest.raises(ValueError, match="training moved the pretrained tensors"):
        teacher_of(again, trained)


def test_a_base_that_is_another_model_by_now_or_gone_teaches_nobody(
    converted, tmp_path, pico_checkpoint, pico_llama, recipe_of
):
    trained = train(recipe_of(converted, objective="extend", rates={}))["model"]
    again = recipe_of(trained).model_copy(update={"output": str(tmp_path / "again")})
    assert check_here(again) == []
    for change in ({"vocab_size": 320}, {"num_hidden_layers": 3}, {"num_key_value_heads": 4}):
        shutil.rmtree(pico_checkpoint)
        pico_llama(**change).save_pretrained(pico_checkpoint)
        with pytest.raises(ValueError, match=rf"is not the original of .*: its {next(iter(change))} is "):
            teacher_of(again, trained)
    shutil.rmtree(pico_checkpoint)
    (found,) = check_here(again)
    assert f"must teach it: {pico_checkpoint}" in found
    with pytest.raises(ValueError, match="must teach it"):
        train(again)


def test_trained_tensors_and_a_shared_teacher_exclude_each_other(converted, recipe_of):
    for rates in ({"attention": 1e-4, "rest": 0}, {"attention": 0, "rest": 1e-4}):
        with pytest.raises(ValueError, match=r"this stage trains .*: set rates.attention and rates.rest to 0"):
            teacher_of(recipe_of(converted, teacher="shared", rates=rates), converted)
    recipe = recipe_of(converted, rates={})
    model = retrofox.load(converted)
    set_trainable(model, recipe.stages[0])
    assert needs_teacher(recipe, recipe.stages[0], model, converted)
