"""Real kills of real processes: what runs again equals, bit for bit, what would have run."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from retrofox.config import load_recipe
from retrofox.training import checkpoint
from retrofox.training.train import train


@pytest.fixture
def recipe_for(tmp_path, pico_fox, saved, write_recipe):
    """recipe_for(output) -> path of a recipe of 8 steps, a checkpoint every 2."""
    # 6 heads: of their gates the last of 4 processes holds nothing
    config = {"num_attention_heads": 6, "hidden_size": 48, "tie_word_embeddings": True}
    model = saved(pico_fox(config=config), tmp_path / "model")
    common = {"model": str(model), "checkpoint": {"every_steps": 2}}

    def build(output: str, **values) -> Path:
        return write_recipe({"tokens": 1024, "schedule": "linear"}, output=output, **{**common, **values})

    return build


def out(file: Path) -> Path:
    return Path(load_recipe(file).output)


def test_kills_and_signals_change_no_bit(recipe_for, run_recipe, curve, weights):
    whole = recipe_for("whole")
    train(load_recipe(whole))
    file = recipe_for("killed")
    stage = out(file) / "stage-0-extend"

    killed = run_recipe(file, "kill-save", 4)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert checkpoint.problem(stage / "checkpoint-4") is not None
    good, _ = checkpoint.newest_good(stage)
    assert good is not None
    assert good.name == "checkpoint-2"

    terminated = run_recipe(file, "SIGTERM", 4)
    assert terminated.returncode == 128 + signal.SIGTERM, terminated.stderr
    assert "passed over checkpoint-4: it has no COMPLETE marker" in terminated.stderr
    assert "resumed stage 0 at step 2 of 8" in terminated.stderr
    good, _ = checkpoint.newest_good(stage)
    assert good is not None
    assert good.name == "checkpoint-5"

    assert run_recipe(file, "SIGKILL", 6).returncode == -signal.SIGKILL
    result = train(load_recipe(file))
    assert result["stages"][0]["resumed_at"] == 6
    assert curve(out(file)) == curve(out(whole))
    assert weights(out(whole)) == weights(out(file))


def test_two_processes_equal_one_through_a_kill_and_a_change_of_their_number(recipe_for, run_recipe, curve):
    whole = recipe_for("whole")
    train(load_recipe(whole))
    file = recipe_for("two")
    killed = run_recipe(file, "SIGKILL", 3, processes=2, rank=1)
    assert killed.returncode != 0
    resumed = run_recipe(file, "SIGTERM", 5, processes=2)
    assert resumed.returncode == 128 + signal.SIGTERM
    assert "resumed stage 0 at step 2 of 8" in resumed.stderr
    assert "signal 15: saved at step 6" in resumed.stderr
    result = train(load_recipe(file))  # one process goes on where two stopped
    assert result["stages"][0]["resumed_at"] == 6
    # Two summands commute, so even one process and two agree to the last bit here.
    assert curve(out(file)) == curve(out(whole))


def test_fsdp2_keeps_gates_float32_and_equals_one_process(recipe_for, run_recipe, curve):
    common = {"sequence_length": 64, "batch_tokens": 128, "learning_rate": 3e-3}
    stages = [
        {"objective": "align", "tokens": 256, **common, "rates": {"attention": 1e-3}},  # beside a second model
        {"objective": "extend", "tokens": 768, **common, "schedule": "linear"},
    ]
    whole = recipe_for("whole", stages=stages)
    train(load_recipe(whole))
    file = recipe_for("sharded", stages=stages)
    sharded = run_recipe(file, processes=2, mode="fsdp")
    assert sharded.returncode == 0, sharded.stderr
    for ours, theirs in zip(curve(out(file)), curve(out(whole)), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    left, right = (load_file(place / "model" / "model.safetensors") for place in (out(whole), out(file)))
    assert left.keys() == right.keys()  # tied embeddings are written once
    (out(file) / "model" / checkpoint.MARKER).unlink()
    with pytest.raises(ValueError, match=r"was saved with FSDP \(SHARDED_STATE_DICT\), this run has no sharding"):
        train(load_recipe(file))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_adapters_in_two_processes_equal_those_in_one(recipe_for, run_recipe, curve):
    """Both begin with the same random numbers; sharded gates are gathered for the file and for the look into it."""
    stage = {"objective": "extend", "tokens": 256, "sequence_length": 64, "batch_tokens": 128, "learning_rate": 3e-3}
    values = {"stages": [stage], "lora": {"rank": 2}, "checkpoint": {"every_steps": 1}}
    whole = recipe_for("whole", **values)
    train(load_recipe(whole))
    left = load_file(out(whole) / "model" / "adapter_model.safetensors")
    for mode in ("ddp", "fsdp"):
        file = recipe_for(mode, **values)
        found = run_recipe(file, processes=2, mode=mode)
        assert found.returncode == 0, found.stderr
        for ours, theirs in zip(curve(out(file)), curve(out(whole)), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)
        right = load_file(out(file) / "model" / "adapter_model.safetensors")
        assert left.keys() == right.keys()
        assert sum("forget_gate" in name for name in right) == 4
        for name, value in right.items():
            torch.testing.assert_close(value, left[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_fsdp2_survives_a_kill_and_runs_every_objective_in_bfloat16(recipe_for, run_recipe, curve):
    common = {"tokens": 256, "sequence_length": 64, "batch_tokens": 128}
    stages = [
        {"objective": "align", **common},
        {"objective": "distill", **common},
        {"objective": "extend", **common, "tokens": 512, "gradient_checkpointing": "full"},
    ]
    whole = recipe_for("whole", stages=stages, precision="bf16", checkpoint={"every_steps": 1})
    assert run_recipe(whole, processes=2, mode="fsdp").returncode == 0
    file = recipe_for("killed", stages=stages, precision="bf16", checkpoint={"every_steps": 1})
    assert run_recipe(file, "kill-save", 3, processes=2, mode="fsdp").returncode != 0
    resumed = run_recipe(file, processes=2, mode="fsdp")
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed stage 2 at step 2 of 4" in resumed.stderr
    assert curve(out(file)) == curve(out(whole))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.parametrize("mixed_precision", ["'no'", "bf16"])
def test_zero3_keeps_gates_float32_or_refuses(recipe_for, tmp_path, mixed_precision):
    file = recipe_for("zero3", precision="bf16")
    shipped = (Path(__file__).parents[2] / "recipes" / "accelerate" / "zero3.yaml").read_text()
    settings = re.sub("mixed_precision: .*", f"mixed_precision: {mixed_precision}\nuse_cpu: true", shipped)
    (tmp_path / "accelerate.yaml").write_text(settings)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(tmp_path / "accelerate.yaml")]
    found = subprocess.run(
        [*command, "-m", "retrofox", "train", str(file)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        timeout=250,
    )
    if mixed_precision == "bf16":
        assert found.returncode != 0
        assert "16-bit engines round the forget gates" in found.stderr + found.stdout
        return
    assert found.returncode == 0, found.stderr
    model = out(file) / "model" / "model.safetensors"
    gates = {name: value for name, value in load_file(model).items() if "forget_gate" in name}
    assert len(gates) == 4
    for value in gates.values():
        assert value.dtype == torch.float32
        assert not torch.equal(value, value.bfloat16().float())
