"""Runs whose processes share rows: killed, resumed by another number of them, beside DDP and FSDP2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from retrofox.config import load_recipe
from retrofox.training.train import train
from retrofox.training.validate import preflight


@pytest.fixture
def recipe_for(tmp_path, pico_fox, saved, write_recipe):
    """recipe_for(output, **keys) -> path of a recipe of 6 steps over packed documents, a checkpoint every 2."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(40):
        text = "".join(f"the fox forgets gate {number * i % 17} and so on, " for i in range(1 + number % 7))
        (folder / f"{number}.txt").write_text(text)
    # tied as SmolLM2's; 6 heads: of their gates the last of 4 processes holds nothing
    config = {"tie_word_embeddings": True, "num_attention_heads": 6, "hidden_size": 48}
    saved(pico_fox(pro="all", config=config), tmp_path / "model")
    common = {"model": str(tmp_path / "model"), "log": {"every": 1, "eval_tokens": 512}}
    common |= {"checkpoint": {"every_steps": 2}, "data": {"train": [str(folder)], "eval": [str(folder)]}}

    def build(output: str, **values) -> Path:
        stage = {"tokens": 1536, "batch_tokens": 256, "schedule": "linear"}
        return write_recipe(stage, output=output, **{**common, **values})

    return build


@pytest.fixture
def log(curve):
    """log(recipe file) -> (step, loss, gradient norm) of every step."""
    return lambda file: curve(load_recipe(file).output)


def evaluated(file: Path) -> list[float]:
    """Held-out losses before and after the stage."""
    report = json.loads((Path(load_recipe(file).output) / "result.json").read_text())["stages"][0]
    return [report["eval_before"], report["eval_after"]]


@pytest.fixture
def same(log):
    """same(one, other, rel=1e-4): asserts that two recipes' runs had the same steps."""

    def check(ours: Path, theirs: Path, rel: float = 1e-4) -> None:
        for left, right in zip(log(ours), log(theirs), strict=True):
            assert left == pytest.approx(right, rel=rel)
        for left, right in zip(evaluated(ours), evaluated(theirs), strict=True):
            assert left is None or left == pytest.approx(right, rel=rel)  # sharded models have none before the stage

    return check


def test_a_lost_process_ends_the_others_and_one_alone_resumes(recipe_for, run_recipe, same):
    whole, file = recipe_for("whole"), recipe_for("shared", parallel={"context": 2})
    train(load_recipe(whole))
    killed = run_recipe(file, "SIGKILL", 3, 2, 1)
    assert killed.returncode != 0
    assert "rows shared by 2: heads x 2, zigzag of 1" in killed.stderr
    train(load_recipe(file, ["parallel.context=1"]))
    same(file, whole)


@pytest.mark.slow
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(
    recipe_for, run_recipe, same, log, weights, pico_fox, saved, tmp_path
):
    # one kv head: keys are gathered; heads that trade are covered above
    model = saved(pico_fox(config={"num_key_value_heads": 1, "tie_word_embeddings": True}), tmp_path / "one-kv-head")
    common = {"model": str(model), "parallel": {"context": 2}}
    whole, file = (recipe_for(name, **common) for name in ("whole", "stopped"))
    done = run_recipe(whole, processes=2)
    assert done.returncode == 0, done.stderr
    assert "zigzag of 2" in done.stderr
    stopped = run_recipe(file, "SIGTERM", 3, 2, 1)
    assert "signal 15: saved at step 4" in stopped.stderr, stopped.stderr
    resumed = run_recipe(file, processes=2)
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed stage 0 at step 4 of 6" in resumed.stderr
    assert "missing keys" not in resumed.stderr  # of tied weights nothing is
    assert log(file) == log(whole)
    assert weights(load_recipe(whole).output) == weights(load_recipe(file).output)
    alone = recipe_for("alone", model=str(model))
    train(load_recipe(alone))
    same(whole, alone)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_shared_rows_beside_data_parallelism_and_sharded_weights(recipe_for, run_recipe, same, mode):
    whole, file = recipe_for("whole"), recipe_for("shared", parallel={"context": 2})
    train(load_recipe(whole))
    stopped = run_recipe(file, "SIGTERM", 3, 4, 1, mode)
    assert "signal 15: saved at step 4" in stopped.stderr, stopped.stderr
    again = run_recipe(file, processes=2, mode=mode)  # fewer groups
    assert again.returncode == 0, again.stderr
    assert "resumed stage 0 at step 4 of 6" in again.stderr
    same(file, whole)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_the_original_teaches_over_shared_rows(recipe_for, run_recipe, same, mode):
    stage = {"tokens": 512, "sequence_length": 64, "batch_tokens": 256, "learning_rate": 3e-3}
    stages = [{**stage, "objective": objective} for objective in ("align", "distill")]
    whole, file = recipe_for("whole", stages=stages), recipe_for("shared", stages=stages, parallel={"context": 2})
    train(load_recipe(whole))
    done = run_recipe(file, processes=4, mode=mode)
    assert done.returncode == 0, done.stderr
    same(file, whole, rel=1e-3)


@pytest.mark.parametrize(("mode", "context"), [("ddp", 1), ("ddp", 2), ("fsdp", 1), ("fsdp", 2)])
def test_tiles_and_offloads_beside_data_parallelism_and_sharded_weights(recipe_for, run_recipe, same, mode, context):
    whole = recipe_for("whole")
    train(load_recipe(whole))
    (stage,) = yaml.safe_load(whole.read_text())["stages"]
    stage |= {"gradient_checkpointing": "full", "tiled_mlp": 10, "offload_activations": True}
    file = recipe_for("saving", stages=[stage], parallel={"context": context})
    done = run_recipe(file, processes=2, mode=mode)
    assert done.returncode == 0, done.stderr
    same(file, whole)


@pytest.mark.parametrize(
    ("values", "processes", "reason"),
    [
        ({"parallel": {"context": 2}}, 1, "parallel.context: 2 processes share a row, and there are 1"),
        ({"parallel": {"context": 2}}, 3, "launch a multiple of 2"),
        ({"parallel": {"context": 3}}, 3, "rows of 64 tokens don't divide among 3 processes in a zigzag"),
    ],
)
def test_what_can_not_be_shared_is_refused_beforehand(recipe_for, values, processes, reason):
    recipe = load_recipe(recipe_for("refused", **values))
    refusals = [str(error) for error in preflight(recipe, processes, torch.device("cpu"))]
    assert any(reason in text for text in refusals), refusals
    assert not Path(recipe.output).exists()


DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
WINDOWED = {"model_type": "mistral", "sliding_window": 7}


@pytest.mark.parametrize(("changes", "refused"), [(DYNAMIC, True), (WINDOWED, False)])
def test_models_that_can_not_share_rows_are_refused(recipe_for, tmp_path, changes, refused):
    file = recipe_for("refused", parallel={"context": 2}, fox={"half_life": [2, 200], "rope": "keep"})
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    for key in ("fox", "auto_map", "architectures"):
        config.pop(key)
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "model_type": "llama", **changes}))
    refusals = [str(error) for error in preflight(load_recipe(file), 2, torch.device("cpu"))]
    assert ["dynamic or longrope" in text for text in refusals] == [True] * refused


def test_an_unconverted_model_does_not_share_rows(recipe_for, pico_checkpoint):
    recipe = load_recipe(recipe_for("control", model=str(pico_checkpoint), parallel={"context": 2}))
    refusals = [str(error) for error in preflight(recipe, 2, torch.device("cpu"))]
    assert any("give `fox:` to the recipe" in text for text in refusals), refusals
