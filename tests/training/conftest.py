"""Recipes run in processes of their own, which may be killed at a step."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

RUNNER = """
import os, signal, sys
from retrofox.cli.app import main
from retrofox.training import checkpoint
from retrofox.training.loop import FoxTrainer

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
