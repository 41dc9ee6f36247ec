"""The loss of held-out windows, before and after a stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule

from retrofox.config import Stage
from retrofox.training.objectives import Extend

if TYPE_CHECKING:
    from retrofox.training.trainer import FoxTrainer


def held_out_loss(trainer: FoxTrainer) -> float | None:
    """Cross-entropy in nats per token over the held-out rows; None without them, or before FSDP has sharded.

    The model's own forward is the trainer's objective, so the objective is another one meanwhile.
    """
    sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    later = sharded and trainer.model_wrapped is trainer.model and not isinstance(trainer.model, FSDPModule)
    if trainer.data.held_out is None or later:
        return None
    device = trainer.args.device
    model: Any = trainer.model_wrapped
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    objective = trainer.objective
    trainer.objective = Extend(trainer.model, Stage.model_construct(cross_entropy="chunked"), device)
    model.eval()
    try:
        for batch in trainer.data.eval_batches():
            with torch.no_grad(), trainer.accelerator.autocast():
                loss, _ = model(**trainer._prepare_inputs(batch))
            sums += torch.stack((loss.double(), torch.full_like(loss, batch["num_targets"]).double()))
    finally:
        trainer.objective = objective
        model.train()
    total: Any = trainer.accelerator.reduce(sums, "sum")
    return float(total[0] / total[1])
