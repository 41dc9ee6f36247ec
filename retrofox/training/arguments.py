"""transformers' TrainingArguments for a stage."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from transformers import TrainingArguments

from retrofox.config import Recipe, Stage
from retrofox.planning.steps import save_steps
from retrofox.support.processes import shards_weights


def own_autocast(precision: str) -> bool:
    """Whether our forward asks for bfloat16 itself: DeepSpeed's bfloat16 engine would round the forget gates, too."""
    return precision == "bf16" and shards_weights("DEEPSPEED")


def arguments(recipe: Recipe, stage: Stage, root: Path, steps: int, accumulated: int) -> TrainingArguments:
    """The Trainer's settings for one stage."""
    if recipe.precision == "fp32":  # an accelerate config's mixed_precision may say otherwise
        os.environ["ACCELERATE_MIXED_PRECISION"] = "no"
    return TrainingArguments(
        output_dir=str(root),
        max_steps=steps,
        per_device_train_batch_size=stage.micro_batch,
        gradient_accumulation_steps=accumulated,
        learning_rate=stage.learning_rate,
        weight_decay=stage.weight_decay,
        adam_beta1=stage.betas[0],
        adam_beta2=stage.betas[1],
        max_grad_norm=stage.clip,
        optim=recipe.optim,
        bf16=recipe.precision == "bf16" and not own_autocast(recipe.precision),
        use_cpu=not torch.cuda.is_available(),
        seed=recipe.seed,
        logging_steps=recipe.log.every,
        logging_first_step=True,
        logging_nan_inf_filter=False,  # it asks the GPU for the loss at every micro-batch, and hides what Guard wants
        save_strategy="steps",
        save_steps=save_steps(recipe.checkpoint, stage, steps),
        save_total_limit=None,  # checkpoint.rotate knows which ones are complete
        report_to=list(recipe.log.report_to),
        run_name=Path(recipe.output).name,
        disable_tqdm=not sys.stderr.isatty(),
        ignore_data_skip=True,
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
        log_level="error",
        log_level_replica="error",
    )
