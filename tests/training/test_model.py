"""The teacher of align and distill is the original, however the model that is trained came about."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from accelerate import PartialState
from torch.nn.functional import logsigmoid
from transformers import AutoConfig, AutoModelForCausalLM

import retrofox
from retrofox.anatomy import attentions
from retrofox.half_lives import half_life_tokens
from retrofox.surgery import make_plan
from retrofox.training.measure import check_here
from retrofox.training.model import built
from retrofox.training.objectives import original_form
from retrofox.training.teacher import changed_since_conversion, needs_teacher, teacher_for
from retrofox.training.train import train

GATES_ONLY = {"attention": 0, "rest": 0}


@pytest.fixture
def converted(pico_checkpoint, tmp_path):
    retrofox.convert(pico_checkpoint, tmp_path / "converted", fox=retrofox.FoxSpec(half_life=(2, 200)), verify=False)
    return tmp_path / "converted"


@pytest.fixture
def recipe_of(make_recipe):
    """recipe_of(model, **stage) -> a recipe of one stage, which distils gates alone unless it says otherwise."""
    distill = {"objective": "distill", "tokens": 128, "rates": GATES_ONLY}
    return lambda model, **stage: make_recipe({**distill, **stage}, model=str(model))


def teacher_of(recipe, source):
    return teacher_for(recipe, recipe.stages[0], Path(source), PartialState(cpu=True))


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(2, 60)[None]).logits


def test_steps_are_measured_with_the_gates_that_training_starts_with(pico_checkpoint):
    """Gates of one token would hide nearly every key behind a horizon: steps would look faster than they are."""
    fox = {"init": "measured", "half_life": [16, 384], "open_heads": 2, "horizon": 8}
    model = built(make_plan(AutoConfig.from_pretrained(pico_checkpoint), retrofox.FoxSpec.from_dict(fox)).config)
    lives = [half_life_tokens(logsigmoid(gate.forget_gate.bias)).detach() for _, gate in attentions(model)]
    longest = torch.stack(lives).unflatten(-1, (2, -1))  # layers, kv heads, query heads of each
    assert (longest[:, 0] > 1000).all()  # open: one kv head in each of the two layers
    torch.testing.assert_close(longest[:, 1].max(), torch.tensor(384.0), rtol=1e-3, atol=0)


def test_frozen_weights_of_a_conversion_teach_themselves(converted, recipe_of):
    assert teacher_of(recipe_of(converted), converted) is None


def test_an_original_that_learnt_the_texts_first_teaches(make_recipe, pico_checkpoint, tmp_path):
    """Two runs: the original by itself, then its retrofit from what that left."""
    first = make_recipe({"learning_rate": 1e-2}, converted=False, fox=None, output="first")
    learnt = train(first)["model"]
    recipe = make_recipe({"objective": "align"}, {"objective": "distill"}, model=learnt, fox={"half_life": [2, 200]})
    assert [stage["objective"] for stage in train(recipe)["stages"]] == ["align", "distill"]
    teacher = teacher_for(recipe, recipe.stages[1], tmp_path / "run" / "converted", PartialState(cpu=True))
    original = AutoModelForCausalLM.from_pretrained(learnt)
    with original_form(teacher):
        torch.testing.assert_close(logits(teacher), logits(original), rtol=1e-4, atol=1e-4)
    assert (logits(original) - logits(AutoModelForCausalLM.from_pretrained(pico_checkpoint))).abs().max() > 1e-2


@pytest.mark.parametrize("rates", [{"attention": 1e-4, "rest": 0}, {"attention": 0, "rest": 1e-4}])
def test_weights_that_move_are_taught_by_a_copy(converted, recipe_of, rates):
    assert teacher_of(recipe_of(converted, rates=rates), converted) is not None


def test_an_earlier_stage_that_moves_weights_makes_a_copy_needed(converted, make_recipe):
    recipe = make_recipe({}, {"objective": "distill", "rates": GATES_ONLY}, model=str(converted))
    assert needs_teacher(recipe, recipe.stages[1], converted)


def test_a_trained_model_is_taught_by_its_base(converted, tmp_path, pico_checkpoint, recipe_of):
    trained = train(recipe_of(converted, objective="extend", rates={}, learning_rate=1e-2))["model"]
    assert "training moved" in str(changed_since_conversion(Path(trained)))
    config = Path(trained) / "config.json"
    assert '"init": "slopes"' in config.read_text()
    config.write_text(config.read_text().replace('"init": "slopes"', '"init": "measured"'))  # without texts now
    again = recipe_of(trained).model_copy(update={"output": str(tmp_path / "again")})
    teacher = teacher_of(again, trained)
    base = logits(AutoModelForCausalLM.from_pretrained(pico_checkpoint))
    with original_form(teacher):
        torch.testing.assert_close(logits(teacher), base, rtol=1e-4, atol=1e-4)
    student = retrofox.load(trained)
    with original_form(student):
        assert (logits(student) - base).abs().max() > 1e-2
    assert check_here(again) == []
    shutil.rmtree(pico_checkpoint)
    (found,) = check_here(again)
    assert str(pico_checkpoint) in found
    with pytest.raises(FileNotFoundError, match="pico-llama"):
        train(again)
