"""Checks of a recipe on this machine, as `plan --check` and `train` make them, and real steps for `plan --measure`."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from retrofox.config import load_recipe
from retrofox.training.measure import check_here, measure_here
from retrofox.training.model import load_any
from retrofox.training.run_directory import claim_output
from retrofox.training.train import train

RECIPES = Path(__file__).parents[2] / "recipes"
NO_WAIT = {"wait_for_everyone": lambda: None}
PLAIN = {"converted": False, "fox": None}


def test_refusals_are_collected(make_recipe):
    found = check_here(make_recipe({"batch_tokens": 192, "micro_batch": 2}, optim="adamw_nope"))
    assert ["adamw_nope" in text for text in found] == [True, False]
    assert "multiple of sequence_length x micro_batch" in found[1]


def test_what_a_machine_lacks_is_refused(make_recipe, tmp_path):
    (found,) = check_here(make_recipe(data={"train": [f"hf:{tmp_path / 'nowhere'}"]}))
    assert "can't be loaded" in found
    absent = {**PLAIN, "attention": "flash_attention_3"}
    (found,) = check_here(make_recipe(**absent))
    assert "stages.0: attention: flash_attention_3 can't run here" in found
    with pytest.raises(ValueError, match="attention: flash_attention_3 can't run here"):
        load_any(make_recipe(**absent), Path(make_recipe(**PLAIN).model), torch.float32)


def test_what_training_would_find_missing_is_refused(make_recipe, tmp_path):
    def refusals(**values):
        return check_here(make_recipe(**values))

    data = {"train": [str(tmp_path / "nowhere.txt")], "eval": [str(tmp_path / "*.none")], "tokenizer": str(tmp_path)}
    found = refusals(data=data)
    assert [text.split(":")[0] for text in found[:2]] == [
        f"no data at {tmp_path / 'nowhere.txt'}",
        f"no data at {tmp_path / '*.none'}",
    ]
    assert len(found) == 3
    assert "tokenizer" in found[2]
    with pytest.raises(ValueError, match="can't write to"):
        train(make_recipe(output=str(tmp_path / "text.txt" / "run")))
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "empty.jsonl").touch()
    for empty in ("empty.txt", "folder"):
        (found,) = refusals(data={"train": [str(tmp_path / "text.txt"), str(tmp_path / empty)]})
        assert found == f"{tmp_path / empty}: no text in it, it is empty: give texts"
    claim_output(tmp_path / "run", make_recipe(), SimpleNamespace(num_processes=1, is_main_process=True, **NO_WAIT))
    assert refusals(seed=1) == []
    (tmp_path / "run" / "stage-0-extend" / "checkpoint-1").mkdir(parents=True)
    assert refusals() == []
    (found,) = refusals(seed=1)
    assert "holds another run: seed differ" in found


@pytest.mark.parametrize("name", sorted(file.stem for file in RECIPES.glob("*.yaml")))
def test_shipped_recipes_are_not_refused(pico_checkpoint, tmp_path, monkeypatch, name):
    """With a model of four heads in place of the Hub's: sets of the Hub aren't looked for."""
    monkeypatch.chdir(tmp_path)
    values = [f"model={pico_checkpoint}"]
    if "open_heads" in (RECIPES / f"{name}.yaml").read_text():
        values.append("fox.open_heads=1")
    assert check_here(load_recipe(RECIPES / f"{name}.yaml", values)) == []


def test_measured_steps_are_real(write_recipe, run):
    code, shown, _ = run("plan", write_recipe(), "--measure", "--json")
    assert code == 0
    stage = json.loads(shown)["stages"][0]
    assert stage["measured"]["tokens_per_second"] > 0
    assert stage["hours"][0] == pytest.approx(512 / stage["measured"]["tokens_per_second"] / 3600)


def test_the_command_shows_what_is_checked_here(write_recipe, run):
    recipe = write_recipe()
    assert run("plan", recipe, "data.train=[nowhere/]")[0] == 0
    code, shown, _ = run("plan", recipe, "data.train=[nowhere/]", "--check")
    assert code == 2
    assert "nowhere" in shown


def test_several_devices_are_measured_by_several_processes(make_recipe, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE=2 in one process: measuring takes as many"):
        measure_here(make_recipe(), {})
