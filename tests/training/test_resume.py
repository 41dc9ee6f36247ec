"""What a run that stopped at an awkward place does when it is started again: goes on bit for bit, or says why not."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load, load_file
from transformers import AutoConfig, AutoModelForCausalLM

import retrofox
import retrofox.training.train
from retrofox.config import Recipe, load_recipe
from retrofox.training import checkpoint
from retrofox.training.train import train
from retrofox.training.trainer import FoxTrainer
from tests import conftest


@pytest.fixture
def recipe(tmp_path, pico_fox, saved, write_recipe) -> Path:
    """Two stages of 4 steps with a checkpoint each."""
    model = saved(pico_fox(), tmp_path / "model")
    return write_recipe({}, {}, model=str(model), checkpoint={"every_steps": 1, "keep": 9})


REPORTED = ("loss_first", "loss_last", "eval_before", "eval_after")


def run(recipe: Path, *changes: str) -> dict:
    return train(load_recipe(recipe, list(changes)))


@pytest.mark.parametrize(
    "change", ["budget={share: 0.1, length: 1Ki, weight: 1.0}", "max_position=4096", "objective=distill"]
)
def test_an_interrupted_stage_ends_with_the_bits_of_an_uninterrupted_one(
    recipe, tmp_path, change, stop_at, curve, weights
):
    """Parts of training with a state, or random numbers, of their own; kills and other stages are tested elsewhere."""
    changes = [f"stages.1.{change}", "stages.1.rates={attention: 0, rest: 0}"]
    whole = run(recipe, *changes, f"output={tmp_path / 'whole'}")["stages"][1]
    loaded = load_recipe(recipe, changes)
    stop_at(loaded, 2)  # of the first stage
    stop_at(loaded, 2)  # of the second
    resumed = train(loaded)["stages"][1]
    assert resumed["resumed_at"] == 3
    assert (resumed["loss_first"], resumed["loss_last"]) == (whole["loss_first"], whole["loss_last"])
    assert curve(tmp_path / "run", "kl") == curve(tmp_path / "whole", "kl")
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


def test_what_saves_memory_may_change_at_a_resume_and_tiles_differ_by_rounding(
    tmp_path, make_recipe, stop_at, curve, weights
):
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text(f"the fox forgets gate {number} and so on, " * 5)

    def recipe_for(output: str, **stage) -> Recipe:
        stage = {"tokens": 256, "sequence_length": 32, "batch_tokens": 64, **stage}
        data = {"train": [str(tmp_path / "[0-9].txt")]}
        return make_recipe(stage, output=output, data=data, checkpoint={"every_steps": 2})

    offload = {"gradient_checkpointing": "full", "offload_activations": True}
    plain, saving = recipe_for("plain"), recipe_for("saving", **offload)
    train(plain)
    stop_at(saving, 2)
    report = train(recipe_for("saving", tiled_mlp=32))  # a row is one tile
    assert report["stages"][0]["resumed_at"] == 3
    assert curve(plain.output) == curve(saving.output)
    assert weights(plain.output) == weights(saving.output)
    tiled = recipe_for("tiled", tiled_mlp=5, **offload)
    train(tiled)
    for one, other in zip(curve(plain.output), curve(tiled.output), strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    found = load(weights(tiled.output))
    for name, tensor in load(weights(plain.output)).items():
        assert torch.allclose(found[name], tensor, atol=2e-4), name


@pytest.mark.parametrize("row", ["mixtral", "deepseek_v3"])
def test_fused_experts_come_back_as_they_were_saved(row, tmp_path, saved, write_recipe, stop_at, curve, weights):
    """Files of these models have each expert's matrices apart, the live model has them in one tensor."""
    extra = {"mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2}, "deepseek_v3": conftest.DEEPSEEK}[row]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(row, **{**conftest.PICO, **extra}))
    converted = saved(retrofox.convert(model, fox=retrofox.FoxSpec()), tmp_path / "model")
    recipe = write_recipe({}, model=str(converted), checkpoint={"every_steps": 1, "keep": 9})
    run(recipe, f"output={tmp_path / 'whole'}")
    stop_at(load_recipe(recipe), 2)
    assert run(recipe)["stages"][0]["resumed_at"] == 3
    assert curve(tmp_path / "run") == curve(tmp_path / "whole")
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
    taken = next((tmp_path / "run").rglob("checkpoint-2/model.safetensors"))
    tensors = {name: tensor for name, tensor in load_file(taken).items() if "experts" not in name}
    other = SimpleNamespace(model=model)
    result = model.load_state_dict(tensors, strict=False)
    with pytest.raises(ValueError, match="other tensors than the model"):
        FoxTrainer._issue_warnings_after_load(other, result)  # type: ignore[arg-type]


def test_a_stage_restored_at_its_end_gives_the_next_what_it_would_have_had(recipe, tmp_path, monkeypatch, weights):
    run(recipe, f"output={tmp_path / 'whole'}")

    def full(*arguments, **options):
        raise ValueError("no space left")

    export = retrofox.training.train.export
    monkeypatch.setattr(retrofox.training.train, "export", full)
    with pytest.raises(ValueError, match="no space left"):
        run(recipe)
    monkeypatch.setattr(retrofox.training.train, "export", export)
    assert run(recipe)["stages"][0]["resumed_at"] == 4
    for inner in ("stage-0-extend", "."):
        assert weights(tmp_path / "whole" / inner) == weights(tmp_path / "run" / inner)


def test_the_recipe_that_a_run_keeps_is_a_recipe(recipe, tmp_path):
    result = run(recipe)
    kept = tmp_path / "run" / "recipe.yaml"
    assert load_recipe(kept) == load_recipe(recipe)
    assert run(kept) == result


@pytest.mark.parametrize("left", ["checkpoint-2", "checkpoint-4"])
def test_a_resumed_stage_reports_its_losses_from_the_start(recipe, tmp_path, capsys, left):
    held_out = f"data.eval=[{tmp_path / 'text.txt'}]"
    whole = run(recipe, held_out)["stages"][1]
    assert f"stage 1: held-out loss {whole['eval_before']:.4f} -> {whole['eval_after']:.4f}" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "run" / "model")
    for path in (tmp_path / "run" / "stage-1-extend").glob("checkpoint-*"):
        if path.name > left:
            shutil.rmtree(path)
    resumed = run(recipe, held_out)["stages"][1]
    assert resumed["resumed_at"] == int(left[-1])
    assert [resumed[key] for key in REPORTED] == [whole[key] for key in REPORTED]


def test_a_damaged_checkpoint_is_written_again_when_its_step_comes(recipe, tmp_path, weights):
    run(recipe)
    before, root = weights(tmp_path / "run"), tmp_path / "run" / "stage-1-extend"
    shutil.rmtree(tmp_path / "run" / "model")
    for step in (3, 4):
        file = root / f"checkpoint-{step}" / "optimizer.pt"
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert run(recipe)["stages"][1]["resumed_at"] == 2
    assert [checkpoint.problem(path) for path in checkpoint.checkpoints(root)] == [None] * 4
    assert weights(tmp_path / "run") == before


def test_a_signal_to_the_whole_group_saves_too(recipe):
    """As Slurm and systemd send it: the loader's processes must not die of it before the checkpoint is written."""
    slow = (
        "import sys, time\n"
        "from retrofox.training.trainer import FoxTrainer\n"
        "plain = FoxTrainer.training_step\n"
        "def step(self, *a, **k):\n"
        "    print(self.state.global_step, flush=True)\n"
        "    time.sleep(0.5)\n"
        "    return plain(self, *a, **k)\n"
        "FoxTrainer.training_step = step\n"
        "from retrofox.cli.app import main\n"
        f"sys.argv = ['retrofox', 'train', {str(recipe)!r}, 'dataloader_workers=2']\n"
        "main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", slow],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == "1":
            break
    time.sleep(0.1)
    os.killpg(process.pid, signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, said
    assert "signal 15: saved at step 2" in said


def test_a_run_that_never_began_leaves_its_output_to_a_corrected_recipe(
    recipe, tmp_path, pico_llama, saved, monkeypatch
):
    for name, theta in (("base", 1e4), ("other", 1e5)):
        saved(pico_llama(rope_theta=theta), tmp_path / name)
    fox = "fox={half_life: [2, 200]}"
    monkeypatch.setattr("retrofox.training.train.claim_data", lambda *_: next(iter(())))  # stops behind the conversion
    made = set()
    for seed in (0, 1):
        with pytest.raises(StopIteration):
            run(recipe, f"model={tmp_path / 'base'}", fox, f"seed={seed}")
        made.add((tmp_path / "run" / "converted" / "config.json").stat().st_ino)
    assert len(made) == 1
    monkeypatch.undo()
    run(recipe, f"model={tmp_path / 'other'}", fox, "stages.1.tokens=128")
    converted = json.loads((tmp_path / "run" / "converted" / "config.json").read_text())
    assert converted["fox"]["base"] == str(tmp_path / "other")
    with pytest.raises(ValueError, match=r"holds another run: seed, data\.text_field differ from"):
        run(recipe, f"model={tmp_path / 'other'}", fox, "stages.1.tokens=128", "seed=1", "data.text_field=body")
