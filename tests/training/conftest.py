"""A recipe of a few steps on a pico model, and recipes run in processes of their own, which may be killed at a step."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from retrofox.config import Recipe, validate
from retrofox.training.train import train
from retrofox.training.trainer import FoxTrainer

RUNNER = """
import os, signal, sys
from retrofox.cli.app import main
from retrofox.training import checkpoint
from retrofox.training.trainer import FoxTrainer

recipe, event, when, rank, mode = sys.argv[1:]
if event.startswith("SIG") and rank in ("all", os.environ.get("RANK")):
    plain, sent = FoxTrainer.training_step, []
    def training_step(self, *args, **kwargs):
        if self.state.global_step == int(when) and not sent:
            sent.append(event)
            os.kill(os.getpid(), getattr(signal, event))
        return plain(self, *args, **kwargs)
    FoxTrainer.training_step = training_step
if event == "kill-save":
    whole = checkpoint.commit
    def commit(directory, note):
        if note["step"] == int(when):
            os.kill(os.getpid(), signal.SIGKILL)
        whole(directory, note)
    checkpoint.commit = commit
if mode == "fsdp":  # accelerate runs DDP on CPUs when asked for FSDP2: make it mean it
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
    ordinary = FoxTrainer.create_accelerator_and_postprocess
    def create(self):
        ordinary(self)
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        if self.args.bf16:
            plugin.set_mixed_precision("bf16")
        self.accelerator.state.fsdp_plugin = plugin
        self.accelerator.state.distributed_type = DistributedType.FSDP
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.is_fsdp_enabled = True
    FoxTrainer.create_accelerator_and_postprocess = create
    from retrofox.model.modeling_fox import ForgetGate
    forward = ForgetGate.forward
    def checked(self, x):
        assert self.weight.dtype == self.bias.dtype and str(self.weight.dtype) == "torch.float32"
        return forward(self, x)
    ForgetGate.forward = checked
sys.argv = ["retrofox", "train", recipe]
main()
"""
FSDP = {
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}


@pytest.fixture
def run_recipe(launch) -> Callable[..., subprocess.CompletedProcess[str]]:
    """run_recipe(recipe, event, when, processes=1, rank="all", mode="ddp", **environment) -> as `launch` gives it.

    `event` happens before step `when` in process `rank`: a signal by name, or "kill-save", a kill amid a checkpoint.
    """

    def run(recipe: Path, event="none", when=0, processes=1, rank: int | str = "all", mode="ddp", **environment: str):
        variables = {**(FSDP if mode == "fsdp" else {}), **environment}
        return launch(RUNNER, recipe, event, when, rank, mode, processes=processes, **variables)

    return run


def packed_batch(rows: int = 1) -> dict[str, torch.Tensor]:
    """Rows of two documents of 20 tokens, each of which is a target."""
    ids = torch.randint(0, 280, (rows, 40), generator=torch.Generator().manual_seed(1))
    return {
        "input_ids": ids,
        "position_ids": (torch.arange(40) % 20).expand(rows, -1),
        "cu_seqlens": torch.arange(0, rows * 40 + 1, 20, dtype=torch.int32),
        "targets": ids,
    }


STAGE = {"objective": "extend", "tokens": 512, "sequence_length": 64, "batch_tokens": 128, "learning_rate": 3e-3}


@pytest.fixture
def recipe_values(tmp_path, pico_checkpoint, pico_fox_checkpoint) -> Callable[..., dict]:
    """recipe_values(*stages, converted=True, data={}, output="run", **keys) -> a recipe of 4 steps in float32.

    Each of `stages` changes that stage, `data` adds to its data (text.txt), `output` lies in tmp_path. A model that is
    not `converted` is converted first.
    """
    text = tmp_path / "text.txt"
    text.write_text("".join(f"the fox forgets gate {i * i % 17} and so on, " for i in range(400)))

    def values(*stages: dict, converted: bool = True, data: dict | None = None, output: str = "run", **keys) -> dict:
        fox = {} if converted else {"fox": {"half_life": [2, 200]}}
        return {
            "model": str(pico_fox_checkpoint if converted else pico_checkpoint),
            **fox,
            "output": str(tmp_path / output),
            "data": {"train": [str(text)], "cache": str(tmp_path / "cache"), **(data or {})},
            "stages": [{**STAGE, **stage} for stage in stages or ({},)],
            "precision": "fp32",
            "log": {"every": 1},
            "dataloader_workers": 0,
            **keys,
        }

    return values


@pytest.fixture
def make_recipe(recipe_values) -> Callable[..., Recipe]:
    """make_recipe(*stages, **keys) -> the recipe of `recipe_values`."""
    return lambda *stages, **keys: validate(recipe_values(*stages, **keys))


@pytest.fixture
def write_recipe(recipe_values) -> Callable[..., Path]:
    """write_recipe(*stages, **keys) -> the file of such a recipe, beside its output and named like it."""

    def write(*stages: dict, **keys) -> Path:
        values = recipe_values(*stages, **keys)
        file = Path(values["output"] + ".yaml")
        file.write_text(yaml.safe_dump(values))
        return file

    return write


@pytest.fixture
def curve() -> Callable[..., list[tuple]]:
    """curve(output, *keys) -> (step, loss, gradient norm, keys) of every log line: JSON keeps every bit of a float."""

    def read(output: str | Path, *keys: str) -> list[tuple]:
        lines = [json.loads(line) for line in (Path(output) / "log.jsonl").read_text().splitlines()]
        return [tuple(line.get(key) for key in ("step", "loss", "grad_norm", *keys)) for line in lines]

    return read


@pytest.fixture
def weights() -> Callable[[str | Path], bytes]:
    """weights(output) -> the bytes of the file with the weights, or the adapter, that a run left."""

    def read(output: str | Path) -> bytes:
        (file,) = (Path(output) / "model").glob("*.safetensors")
        return file.read_bytes()

    return read


@pytest.fixture
def stop_at(monkeypatch) -> Callable[[Recipe, int], None]:
    """stop_at(recipe, step): trains until SIGTERM comes at the beginning of the step after `step`, which is saved."""

    def stop(recipe: Recipe, step: int) -> None:
        plain = FoxTrainer.training_step

        def interrupted(self, *args, **kwargs):
            if self.state.global_step == step:
                os.kill(os.getpid(), signal.SIGTERM)
            return plain(self, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(FoxTrainer, "training_step", interrupted)
            with pytest.raises(SystemExit) as stopped:
                train(recipe)
        assert stopped.value.code == 128 + signal.SIGTERM

    return stop
