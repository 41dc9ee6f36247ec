"""`plan --check` and `plan --measure` on this machine: refusals, and speed and memory of real steps."""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from retrofox.anatomy import causal_lm
from retrofox.config import Recipe, Stage
from retrofox.loading.device import PRECISIONS, resolve_device
from retrofox.planning.steps import accumulation, tokens_per_step
from retrofox.support.interruptions import Interruptions
from retrofox.support.memory import peak_bytes, reset_peak
from retrofox.support.processes import processes
from retrofox.training.arguments import arguments
from retrofox.training.data import collate_with_targets
from retrofox.training.model import built, lower_frozen, trained_config
from retrofox.training.model_tweaks import lower_precision, repeatable, save_memory
from retrofox.training.objectives import stage_objective
from retrofox.training.param_groups import set_trainable
from retrofox.training.run_directory import Run
from retrofox.training.teacher import needs_teacher
from retrofox.training.trainer import FoxTrainer
from retrofox.training.validate import preflight


def check_here(recipe: Recipe) -> list[str]:
    """Refusals of `train` on this machine, one line each."""
    return [str(error) for error in preflight(recipe, processes(), resolve_device(None))]


def measure_here(recipe: Recipe, report: dict[str, Any], price: float | None = None) -> None:
    """Adds the speed, peak memory, hours and price of two real steps of every stage here to a plan's report."""
    if processes() > 1 and "RANK" not in os.environ:
        raise ValueError(
            f"WORLD_SIZE={processes()} in one process: measuring takes as many processes, accelerate launch -m "
            "retrofox plan RECIPE --measure; or plan without --measure"
        )
    if recipe.parallel.context > 1 or report["devices"] != processes():
        raise ValueError(
            f"--measure runs whole rows, on as many devices as processes, here {processes()}: leave out --gpus, set "
            "parallel.context=1, or plan without --measure"
        )
    device, config = resolve_device(None), trained_config(recipe)
    for stage, entry in zip(recipe.stages, report["stages"], strict=True):
        entry["measured"] = _measured(recipe, stage, config, device)
        hours = entry["tokens"] / entry["measured"]["tokens_per_second"] / 3600
        entry["hours"], entry["hours_from"] = [hours, hours], "two steps measured here"
    report["hours"] = [sum(entry["hours"][end] for entry in report["stages"]) for end in (0, 1)]
    report["dollars"] = None if price is None else [hours * processes() * price for hours in report["hours"]]


def _measured(recipe: Recipe, stage: Stage, config: Any, device: torch.device) -> dict[str, float | None]:
    """Speed and peak memory of real steps of a stage, on random weights and tokens; see `measure_steps`."""
    torch.manual_seed(recipe.seed)
    before = reset_peak(device)
    with device:
        model, teacher = built(config, recipe.lora, recipe.model), None
        set_trainable(model, stage, adapters=recipe.lora is not None)
        if recipe.lora is not None:
            lower_frozen(model, PRECISIONS[recipe.precision])
        if needs_teacher(recipe, stage, Path(recipe.model)):
            teacher = built(config)
    return measure_steps(recipe, stage, model, device, teacher, before=before)


def measure_steps(
    recipe: Recipe,
    stage: Stage,
    model: Any,
    device: torch.device,
    teacher: Any = None,
    *,
    steps: int = 3,
    documents: int = 2,
    data: Any = None,
    before: float = 0.0,
) -> dict[str, Any]:
    """Trains `model` for a few steps of a stage through the Trainer itself; the first warms up, unless it is the only.

    The optimizer makes its state at the end of the first step: the peak of one step alone may lack it.

    Args:
        model: with requires_grad set as the stage trains it.
        teacher: the original, where the stage needs it as a second model.
        documents: in every row; 1 lets unconverted models run without a mask.
        data: a `StageData`; None: random tokens.
        before: bytes that `reset_peak` found in use before the model was made: no part of a CPU run's peak.

    Returns:
        tokens_per_second (median, of all processes), seconds_per_step, peak_memory_gb, mfu (None where the device's
        peak is unknown).
    """
    log = recipe.log.model_copy(update={"every": 1, "report_to": []})
    stages = [stage.model_copy(update={"spike_factor": 0.0})]
    recipe = recipe.model_copy(update={"log": log, "stages": stages})
    causal_lm(model).config.use_cache = False
    lower_precision(model, PRECISIONS[recipe.precision])
    save_memory(model, stage)
    if teacher is not None:
        teacher = teacher.to(device, PRECISIONS[recipe.precision]).requires_grad_(False).eval()
    world = processes()
    batch_tokens = tokens_per_step(stage, world)
    micro_batches = accumulation(stage, batch_tokens, world)
    with tempfile.TemporaryDirectory() as folder:
        settings = arguments(recipe, stage, Path(folder), steps, micro_batches)
        settings.save_strategy = type(settings.save_strategy)("no")
        run = Run(recipe, Path(folder), [batch_tokens], Interruptions("nothing is saved"))
        objective = stage_objective(model, stage, device, teacher)
        data = data or RandomData(stage, causal_lm(model).config.vocab_size, documents)
        trainer = FoxTrainer(model, settings, run, 0, objective, data)
        with repeatable(recipe.deterministic):
            trainer.train()
    speed = statistics.median_high(entry["tokens_per_second"] for entry in trainer.history[1:] or trainer.history)
    found = {
        "tokens_per_second": speed,
        "seconds_per_step": batch_tokens / speed,
        "peak_memory_gb": (peak_bytes(device) - (before if device.type == "cpu" else 0.0)) / 1e9,
        "mfu": trainer.clock.mfu(speed, world),
    }
    trainer.release()
    trainer.accelerator.free_memory()
    model.zero_grad(set_to_none=True)
    del trainer
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return found


class RandomData:
    """A stage's data in place of `StageData`: micro-batches of random tokens, without end, and none held out.

    Args:
        documents: of equal length in each row.
    """

    held_out = mesh = None

    def __init__(self, stage: Stage, vocabulary: int, documents: int):
        self.stage, self.vocabulary, self.documents = stage, vocabulary, documents

    def batches(self, first_row: int) -> Iterator[dict[str, Any]]:
        """Micro-batches, endless."""
        rows, length = self.stage.micro_batch, self.stage.sequence_length
        sizes = [len(document) for document in torch.arange(length).split(max(1, length // self.documents))]
        row = {"position_ids": torch.cat([torch.arange(size) for size in sizes]), "doc_lengths": torch.tensor(sizes)}
        while True:
            made = torch.randint(0, self.vocabulary, (rows, length))
            yield collate_with_targets([{**row, "input_ids": ids, "labels": ids} for ids in made])
