"""adapt: the original itself is trained first, and is the original of every later stage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import retrofox
from retrofox.anatomy import attention_mode, is_new_tensor
from retrofox.config import validate
from retrofox.training import teacher as teachers
from retrofox.training import train as training
from retrofox.training.train import train

STAGE = {"tokens": 512, "sequence_length": 64, "batch_tokens": 128, "learning_rate": 3e-3}
ADAPT = {**STAGE, "objective": "adapt", "schedule": "linear"}
LATER = [{**STAGE, "objective": "align", "rates": {"attention": 1e-3}}, {**STAGE, "objective": "distill"}]


@pytest.fixture
def values(recipe_values) -> dict:
    fox = {"rope": "drop", "half_life": [2, 200], "pro": ["output-gate", "k-shift"]}
    return recipe_values(converted=False, fox=fox, stages=[ADAPT, *LATER])


def logits(folder: Path, mode: str | None = None) -> torch.Tensor:
    ids = torch.arange(48)[None] % 40
    if mode is None:
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        with torch.no_grad():
            return model(ids).logits
    model = retrofox.load(folder).eval()
    with torch.no_grad(), attention_mode(model, mode):
        return model(ids).logits


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_it_trains_what_the_control_trains(values, tmp_path, checkpointing):
    stage = {**ADAPT, "gradient_checkpointing": checkpointing}
    result = train(validate({**values, "stages": [stage, LATER[0]]}))
    plain = {**stage, "objective": "extend"}
    control = train(validate({**values, "fox": None, "stages": [plain], "output": str(tmp_path / "control")}))
    adapted = tmp_path / "run" / "stage-0-adapt" / "model"
    assert result["stages"][0]["loss_first"] == pytest.approx(control["stages"][0]["loss_first"], abs=1e-5)
    assert result["stages"][0]["loss_last"] == pytest.approx(control["stages"][0]["loss_last"], abs=1e-4)
    found, wanted, before = logits(adapted, "original"), logits(Path(control["model"])), logits(Path(values["model"]))
    assert (wanted - before).abs().max() > 0.1
    torch.testing.assert_close(found, wanted, atol=2e-3, rtol=0)
    torch.testing.assert_close(logits(adapted.parent / "original"), found, atol=1e-5, rtol=0)
    start = retrofox.load(tmp_path / "run" / "converted").state_dict()
    for name, value in retrofox.load(adapted).state_dict().items():
        if is_new_tensor(name):
            assert torch.equal(value, start[name]), name


def test_later_stages_learn_from_what_it_made(values, tmp_path, monkeypatch):
    found, plain = [], training.teacher_for

    def teacher_for(recipe, stage, *rest):
        teacher = plain(recipe, stage, *rest)
        found.append((stage.objective, teacher))
        return teacher

    monkeypatch.setattr(training, "teacher_for", teacher_for)
    recipe = validate(values)
    train(recipe)
    adapted = retrofox.load(tmp_path / "run" / "stage-0-adapt" / "model").state_dict()
    assert [objective for objective, _ in found] == ["adapt", "align", "distill"]
    assert found[0][1] is None
    for _, teacher in found[1:]:
        for name, value in teacher.state_dict().items():
            assert torch.equal(value, adapted[name]), name
    # Started again after the second stage, the third one finds the same original.
    for path in sorted((tmp_path / "run" / "model").iterdir()):
        path.unlink()
    whole = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    for place in (tmp_path / "run" / "stage-2-distill").rglob("COMPLETE"):
        place.unlink()
    train(recipe)
    assert [objective for objective, _ in found[3:]] == ["distill"]
    assert torch.equal(found[3][1].state_dict()["model.norm.weight"], adapted["model.norm.weight"])
    again = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    assert json.loads(again[-1])["loss"] == json.loads(whole[-1])["loss"]


def test_the_original_is_left_as_an_unconverted_checkpoint(values, tmp_path):
    recipe = validate({**values, "precision": "bf16"})
    left = tmp_path / "run" / "stage-0-adapt" / "original"
    train(recipe)
    assert {path.name for path in left.parent.iterdir() if not path.name.startswith("checkpoint")} == {
        "model",
        left.name,
    }
    config = json.loads((left / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert not {"fox", "auto_map", "transformers_weights"} & set(config)
    for folder in (left, left.parent / "model", tmp_path / "run" / "model"):
        assert json.loads((folder / "config.json").read_text())["use_cache"], folder
    assert AutoTokenizer.from_pretrained(left)("the fox").input_ids
    _, info = AutoModelForCausalLM.from_pretrained(left, output_loading_info=True)  # type: ignore[misc]
    assert not any(info.values())


def test_frozen_originals_stay_their_own_teachers(values, tmp_path):
    train(validate({**values, "stages": [ADAPT, {**STAGE, "objective": "align"}]}))
    model = tmp_path / "run" / "model"
    assert teachers.changed_since_conversion(model) is None
    torch.testing.assert_close(
        logits(model, "original"), logits(tmp_path / "run" / "stage-0-adapt" / "model", "original"), atol=0, rtol=0
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"stages": [LATER[0], ADAPT]},
            "adapt changes the original that the stages before it learn from: put it first",
        ),
        (
            {"stages": [{**ADAPT, "rates": {"gate_bias": 1e-3}}, LATER[1]]},
            "rates.gate_bias must be 0 or left out: adapt",
        ),
        ({"stages": [{**ADAPT, "ce_weight": 0.5}, LATER[1]]}, "ce_weight: unknown key"),
        ({"lora": {"rank": 2}, "stages": [ADAPT, LATER[1]]}, "freezes what adapt trains"),
    ],
)
def test_what_it_can_not_be_combined_with(values, changes, said):
    with pytest.raises(ValueError, match=said.replace(".", r"\.")):
        validate({**values, **changes})


def test_it_needs_an_untouched_original(values, tmp_path):
    extend = {**STAGE, "objective": "extend"}
    with pytest.raises(ValueError, match="adapt is about a retrofit and its original: give `fox:`"):
        train(validate({**values, "fox": None, "stages": [ADAPT, extend]}))
    trained = train(validate({**values, "stages": [extend]}))["model"]
    with pytest.raises(ValueError, match="adapt trains the original, and training moved the pretrained tensors"):
        train(
            validate(
                {**values, "fox": None, "model": trained, "stages": [ADAPT, extend], "output": str(tmp_path / "b")}
            )
        )
