"""Whether teacher logits on disk are those that a stage needs; the refusals name both sides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from retrofox.config import Recipe, Stage
from retrofox.data.packed import PackedDataset
from retrofox.data.shards import Manifest
from retrofox.training.groups import stage_rows
from retrofox.training.offline.record import read_record
from retrofox.training.offline.shards import TeacherLogits


def refuse_unfit_logits(stage: Stage, vocabulary: int | None) -> None:
    """Raises ValueError where a stage's `teacher_logits` are not there, or of another length, temperature or model.

    Args:
        vocabulary: of the model that the stage trains; None where it is not known.
    """
    folder = Path(str(stage.teacher_logits))
    record = read_record(folder)
    for key, wanted in (("sequence_length", stage.sequence_length), ("temperature", stage.temperature)):
        if getattr(record, key) != wanted:
            raise ValueError(
                f"teacher_logits {folder} were written for {key} {getattr(record, key)}, and the stage's is {wanted}: "
                "change the stage, or write others (`retrofox teacher`) into another directory"
            )
    if vocabulary is not None and record.vocabulary > vocabulary:
        raise ValueError(
            f"teacher_logits {folder} are of {record.model} with {record.vocabulary} tokens, and the model has "
            f"{vocabulary}: take a teacher with the same tokenizer"
        )


def refuse_other_logits(recipe: Recipe, manifest: Manifest, batch_tokens: Sequence[int], done: int) -> None:
    """Raises ValueError where logits are of other tokens than a recipe trains on, or not of all of them.

    Args:
        batch_tokens: tokens per optimizer step, of each stage.
        done: stages that are complete, whose logits may be gone.
    """
    for number, stage in enumerate(recipe.stages):
        if stage.teacher_logits is None or number < done:
            continue
        logits = TeacherLogits(stage.teacher_logits)
        dataset = PackedDataset(manifest, stage.sequence_length, seed=recipe.seed)
        where, record = f"stages.{number}: teacher_logits {logits.folder}", logits.record
        for name, theirs, ours in (
            ("tokenizer", record.tokenizer, manifest.tokenizer),
            ("data", record.data, dataset.fingerprint),
        ):
            if theirs != ours:
                raise ValueError(
                    f"{where} were written for another {name}: its fingerprint was {theirs:.16}, now it is {ours:.16}. "
                    "Restore the texts, their weights and the tokenizer, or write others (`retrofox teacher`) into "
                    "another directory"
                )
        windows = np.unique(dataset.order.take(np.array(stage_rows(recipe, batch_tokens, number))))
        missing = logits.missing(windows)
        if missing:
            raise ValueError(
                f"{where} lack {missing:,} of the {len(windows):,} windows that the stage reads (seed {recipe.seed}; "
                f"they were written for seed {record.seed}): run `retrofox teacher` with this very recipe, which adds "
                "what is missing where the seed is the same"
            )
