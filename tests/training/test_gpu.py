"""Training on a GPU: every speed-up and precision learns, repeatable runs repeat, resumed runs take no more memory."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from retrofox.config import Recipe
from retrofox.conversion.merge import merge
from retrofox.training.train import train

pytestmark = [
    pytest.mark.gpu,
    # peft 0.21 asks transformers 5.23 by a name that it deprecates
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
    # torch.compile and bitsandbytes warn about what is not ours
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
]
KILLER = """
import os, signal, sys, yaml, torch
from retrofox.config import load_recipe
from retrofox.training.trainer import FoxTrainer
when = int(sys.argv[2])
plain = FoxTrainer.training_step
def training_step(self, *args, **kwargs):
    if self.state.global_step == when:
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(self, *args, **kwargs)
if when >= 0:
    FoxTrainer.training_step = training_step
from retrofox.training.train import train
train(load_recipe(sys.argv[1]))
print("PEAK", torch.cuda.max_memory_allocated())
"""


@pytest.fixture
def make_recipe(tmp_path, pico_fox, saved, make_recipe):
    """A recipe of 12 steps on a model whose heads are wide enough for the kernels."""
    model = pico_fox(config={"head_dim": 64, "hidden_size": 128, "intermediate_size": 256, "initializer_range": 0.02})
    saved(model, tmp_path / "model")
    text = tmp_path / "long.txt"
    text.write_text("".join(f"the fox forgets gate {i * i % 17} and so on, " for i in range(2000)))
    common = {"model": str(tmp_path / "model"), "data": {"train": [str(text)], "eval": [str(text)]}}
    common |= {"precision": "bf16", "checkpoint": {"every_steps": 4}}

    def build(output: str = "out", stage: dict | None = None, **values) -> Recipe:
        own = {"tokens": 12 * 1024, "sequence_length": 256, "batch_tokens": 1024, "micro_batch": 2}
        own |= {"learning_rate": 5e-3, "schedule": "constant", **(stage or {})}
        return make_recipe(own, output=output, **{**common, **values})

    return build


LEARNS = {
    "plain": {},
    "fp32": {"precision": "fp32"},
    "recomputed": {"stage": {"gradient_checkpointing": "full"}},
    "every second layer recomputed": {"stage": {"gradient_checkpointing": 2}},
    "lora": {"lora": {"rank": 4}, "stage": {"learning_rate": 2e-2}},
    "dora": {"lora": {"rank": 4, "dora": True}, "stage": {"learning_rate": 2e-2}},
    "lora recomputed": {"lora": {"rank": 4}, "stage": {"learning_rate": 2e-2, "gradient_checkpointing": "full"}},
    "distill": {"stage": {"objective": "distill"}},
    "align": {"stage": {"objective": "align", "gradient_checkpointing": "none"}},
    "liger": {"stage": {"cross_entropy": "liger"}},
    "eight-bit optimizer": {"optim": "adamw_bnb_8bit"},
    "qlora": {"lora": {"rank": 4, "quantize": "nf4"}, "stage": {"learning_rate": 2e-2}},
}
PACKAGES = {"liger": "liger_kernel", "eight-bit optimizer": "bitsandbytes", "qlora": "bitsandbytes"}


@pytest.mark.parametrize("name", list(LEARNS))
def test_it_learns(make_recipe, curve, name, tmp_path):
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name])
    recipe = make_recipe(**LEARNS[name])
    result = train(recipe)["stages"][0]
    found = curve(recipe.output)
    assert all(math.isfinite(loss) for _, loss, _ in found)
    assert found[-1][1] < found[0][1]
    if recipe.stages[0].objective == "extend":
        assert result["eval_after"] < result["eval_before"] - 0.05
    if recipe.lora is not None:
        adapter = Path(recipe.output) / "model"
        gates = {n: t for n, t in load_file(adapter / "adapter_model.safetensors").items() if "forget_gate" in n}
        assert len(gates) == 4
        assert all(tensor.dtype == torch.float32 for tensor in gates.values())
        report = merge(adapter, tmp_path / "merged")
        assert report["relative_difference"] <= report["limit"]


def test_liger_and_ours_agree(make_recipe, curve):
    pytest.importorskip("liger_kernel")
    first = []
    for kind in ("chunked", "liger"):
        recipe = make_recipe(kind, stage={"cross_entropy": kind})
        train(recipe)
        first.append(curve(recipe.output)[0])
    assert first[0][1] == pytest.approx(first[1][1], rel=1e-3)
    assert first[0][2] == pytest.approx(first[1][2], rel=2e-2)


def launch(file: Path, when: int) -> subprocess.CompletedProcess:
    script = file.parent / "killer.py"
    script.write_text(KILLER)
    return subprocess.run(
        [sys.executable, str(script), str(file), str(when)], capture_output=True, text=True, check=False, timeout=200
    )


def test_a_killed_run_goes_on_bit_for_bit_and_with_no_more_memory(make_recipe, curve, tmp_path):
    files = {}
    for name in ("whole", "killed"):
        recipe = make_recipe(name, deterministic=True)
        files[name] = tmp_path / f"{name}.yaml"
        files[name].write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    whole = launch(files["whole"], -1)
    assert whole.returncode == 0, whole.stderr
    assert launch(files["killed"], 6).returncode == -signal.SIGKILL
    resumed = launch(files["killed"], -1)
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed stage 0 at step 4" in resumed.stderr
    assert curve(tmp_path / "killed") == curve(tmp_path / "whole")
    peaks = [int(run.stdout.split("PEAK")[1]) for run in (whole, resumed)]
    assert peaks[1] <= peaks[0]
    if report := os.environ.get("OUT"):
        Path(report, "resume.json").write_text(json.dumps({"fresh": peaks[0], "resumed": peaks[1]}))
