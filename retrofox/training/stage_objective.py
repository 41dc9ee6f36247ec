"""The objective that a stage asks for."""

from __future__ import annotations

from typing import Any

import torch

from retrofox.config import Stage
from retrofox.training.objectives import OBJECTIVES, Extend
from retrofox.training.offline.objective import DistillTopK


def stage_objective(model: Any, stage: Stage, device: torch.device, teacher: Any = None) -> Any:
    """The objective of a stage for a model, on a device.

    Args:
        teacher: the original as a second model, where the stage needs one.

    Raises:
        ValueError: the model can't be its own teacher; a cross-entropy that can't run here.
    """
    if stage.objective in ("adapt", "extend"):
        return Extend(model, stage, device)
    if stage.teacher_logits is not None:
        return DistillTopK(model, stage, device)
    return OBJECTIVES[stage.objective](model, stage, device, teacher)
