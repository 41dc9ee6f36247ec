"""What a stage takes over from the one before it, and what of its settings reaches the optimizer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import retrofox
from retrofox.anatomy import is_new_tensor
from retrofox.data.packed import PackedDataset
from retrofox.data.prepare import prepare_data
from retrofox.training.data import StageData
from retrofox.training.train import train

STAGE = {"objective": "extend", "tokens": 256, "sequence_length": 64, "batch_tokens": 128, "learning_rate": 1e-3}
ONE_RATE = dict.fromkeys(("gate_bias", "gate_weight", "pro", "attention", "rest"), 0.001)


@pytest.fixture
def make_recipe(make_recipe):
    """Of an unconverted model; a stage has two steps."""
    return lambda **keys: make_recipe(**{"converted": False, "stages": [STAGE], **keys})


def test_later_stages_read_rows_that_no_earlier_one_of_their_length_has_read(make_recipe, monkeypatch, pico_tokenizer):
    asked, plain = [], StageData.batches

    def batches(self, first_row):
        for batch in plain(self, first_row):
            asked.append((self.stage.sequence_length, [tuple(row) for row in batch["input_ids"].tolist()]))
            yield batch

    monkeypatch.setattr(StageData, "batches", batches)
    short = {**STAGE, "sequence_length": 32}
    recipe = make_recipe(stages=[STAGE, short, STAGE, short])
    train(recipe)
    manifest = prepare_data(recipe.data, pico_tokenizer, progress=False).train
    for length, rows_of_a_stage in ((64, 4), (32, 8)):
        data = PackedDataset(manifest, length, seed=0)
        order = data.order.take(np.arange(2 * rows_of_a_stage)).tolist()
        wanted = [tuple(data[item]["input_ids"].tolist()) for item in order]
        assert [row for found, rows in asked if found == length for row in rows] == wanted


def test_clip_bounds_the_step_and_betas_make_its_moments(make_recipe, tmp_path):
    stage = {**STAGE, "tokens": 128, "weight_decay": 0.0, "rates": ONE_RATE, "schedule": "constant"}

    def trained(name: str, **values):
        settings = {key: values.pop(key) for key in ("clip", "betas") if key in values}
        recipe = make_recipe(stages=[{**stage, **settings}], output=str(tmp_path / name), **values)
        result = train(recipe)
        before, after = retrofox.load(tmp_path / name / "converted"), retrofox.load(result["model"])
        pairs = zip(after.parameters(), before.parameters(), strict=True)
        moved = sum(float((a - b).detach().double().square().sum()) for a, b in pairs)
        (line,) = (tmp_path / name / "log.jsonl").read_text().splitlines()
        return moved**0.5, json.loads(line)["grad_norm"], tmp_path / name / "stage-0-extend" / "checkpoint-1"

    free, norm, _ = trained("free", clip=0, optim="sgd")
    assert norm > 0.5
    assert free == pytest.approx(1e-3 * norm, rel=1e-3)
    clipped, _, _ = trained("clipped", clip=0.25, optim="sgd")
    assert clipped == pytest.approx(1e-3 * 0.25, rel=1e-3)
    _, _, folder = trained("betas", clip=0, betas=[0.5, 0.75])
    states = torch.load(folder / "optimizer.pt", weights_only=True)["state"].values()
    assert states
    for state in states:  # after one step: (1 - b1) g and (1 - b2) g^2
        torch.testing.assert_close(state["exp_avg"].square(), state["exp_avg_sq"], rtol=1e-4, atol=1e-12)


def test_models_between_stages_are_float32_and_the_logged_rate_is_the_pretrained_weights(make_recipe, tmp_path):
    stage = {**STAGE, "tokens": 128, "schedule": "constant"}
    result = train(make_recipe(stages=[stage, stage], precision="bf16"))
    between = load_file(tmp_path / "run" / "stage-0-extend" / "model" / "model.safetensors")
    assert {value.dtype for value in between.values()} == {torch.float32}
    last = load_file(Path(result["model"]) / "model.safetensors")
    assert {value.dtype for name, value in last.items() if is_new_tensor(name)} == {torch.float32}
    assert {value.dtype for name, value in last.items() if not is_new_tensor(name)} == {torch.bfloat16}
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert [line["learning_rate"] for line in log] == [1e-3, 1e-3]  # gates learn at five times that


def test_a_recipe_measures_gates_on_the_texts_it_trains_on(make_recipe, pico_llama, saved, tmp_path):
    base = saved(pico_llama(max_position_embeddings=256), tmp_path / "base")  # room for a planted fact
    recipe = make_recipe(model=str(base), fox={"init": "measured", "open_heads": 1, "half_life": [4, 64]})
    model = retrofox.load(train(recipe)["model"])
    wanted = retrofox.convert(recipe.model, fox=recipe.fox, texts=[recipe.data.train[0].path])
    assert model.config.fox["open_heads"] == wanted.config.fox["open_heads"]
    assert len(model.config.fox["open_heads"]) == 1
