"""What the trainer of one stage is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from retrofox.config import Recipe, Stage
from retrofox.parallel.mesh import Mesh
from retrofox.support.interruptions import Interruptions
from retrofox.training.callbacks import Clock


@dataclass
class StageRun:
    """One stage of a run: what it trains with, on what, and where it logs.

    Attributes:
        number: of the stage in the recipe, from 0.
        objective: called as objective(model, batch) inside the model's own forward, so that DDP and FSDP see one
            forward; returns (loss summed over targets, metrics summed over targets).
        batches: batches(consumed rows) -> endless iterable of batches with `targets` and `num_targets`.
        data_state: data_state(consumed rows) -> what identifies the data's order, kept in every checkpoint.
        first_row: rows consumed by earlier stages.
        batch_tokens: tokens of an optimizer step on all devices together.
        evaluator: the objective that `evaluate_loss` reports, with eval_batches() -> this process's share of batches.
        interruptions: where signals are noted during the loop, which stops for them after a save.
        mesh: where several processes share rows, this one's place among them.
    """

    recipe: Recipe
    stage: Stage
    number: int
    objective: Callable[[Any, dict[str, Any]], tuple[torch.Tensor, torch.Tensor]]
    batches: Callable[[int], Iterable[dict[str, Any]]]
    data_state: Callable[[int], dict[str, Any]]
    first_row: int
    batch_tokens: int
    clock: Clock
    log_file: Path
    evaluator: Any = None
    eval_batches: Callable[[], Iterable[dict[str, Any]]] | None = None
    interruptions: Interruptions = field(default_factory=lambda: Interruptions("nothing is saved"))
    mesh: Mesh | None = None
