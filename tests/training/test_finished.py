"""A finished run whose model was damaged since writes it anew; one that is whole does nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from retrofox.config import load_recipe
from retrofox.training import checkpoint
from retrofox.training.train import train


@pytest.fixture
def recipe(make_recipe):
    return make_recipe({"tokens": 256}, {"tokens": 256})


def test_a_model_that_was_deleted_or_damaged_is_written_anew(recipe, capsys):
    train(recipe)
    weights = Path(recipe.output) / "model" / "model.safetensors"
    whole = weights.read_bytes()
    first = Path(recipe.output) / "stage-0-extend" / "model" / "model.safetensors"
    first.write_bytes(b"damaged, too")
    assert train(recipe)["stages"]  # nothing reads it while the last model is whole
    assert first.read_bytes() == b"damaged, too"
    assert "nothing left to do" in capsys.readouterr().err
    for damage in (weights.unlink, lambda: weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))):
        damage()
        result = train(recipe)
        said = capsys.readouterr().err
        assert "model.safetensors" in said
        assert "it is written anew" in said
        assert result["stages"][1]["resumed_at"] == 2
        assert weights.read_bytes() == whole
        assert checkpoint.problem(first.parent) is None  # the stage behind it starts from it
    (Path(recipe.output) / "model" / "config.json").write_text("{}")
    train(recipe)
    assert checkpoint.problem(weights.parent) is None
    capsys.readouterr()
    train(recipe)
    assert "nothing left to do" in capsys.readouterr().err


def test_a_stage_starts_from_a_model_that_is_whole(recipe, capsys):
    whole = train(recipe)
    out = Path(recipe.output)
    weights = (out / "model" / "model.safetensors").read_bytes()
    (out / "model" / checkpoint.MARKER).unlink()
    checkpoint.discard(out / "stage-1-extend" / "checkpoint-1")
    checkpoint.discard(out / "stage-1-extend" / "checkpoint-2")
    (out / "stage-0-extend" / "model" / "model.safetensors").write_bytes(b"damaged")
    again = train(recipe)
    assert "it is written anew" in capsys.readouterr().err
    assert again["stages"][1]["loss_last"] == whole["stages"][1]["loss_last"]
    assert (out / "model" / "model.safetensors").read_bytes() == weights


def test_the_recipe_that_a_run_keeps_is_a_recipe(recipe, run, tmp_path):
    train(recipe)
    kept = Path(recipe.output) / "recipe.yaml"
    assert load_recipe(kept) == recipe
    code, _, error = run("train", kept)
    assert code == 0
    assert "nothing left to do" in error
    assert load_recipe(kept, [f"output={tmp_path / 'other'}", "seed=5"]).seed == 5
