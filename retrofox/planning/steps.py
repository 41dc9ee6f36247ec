"""Tokens, rows and optimizer steps of a recipe's stages, and rows at a time, in whole numbers. No torch is imported."""

from __future__ import annotations

from collections.abc import Sequence

from retrofox.config import CheckpointConfig, ParallelConfig, Stage

STATE_BYTES = {
    "adamw_torch": 8,
    "adamw_torch_fused": 8,
    "adamw_bnb_8bit": 2,
    "paged_adamw_8bit": 2,
    "lion_32bit": 4,
    "lion_8bit": 1,
    "adafactor": 0,
    "sgd": 0,
    "rmsprop": 4,
    "adagrad": 4,
}
"""Optimizer state per trained parameter, by optim; 8 (two float32 moments) where it is not listed."""


def readers_of(parallel: ParallelConfig, processes: int) -> int:
    """How many different rows the processes read at a time: one for each context group."""
    return max(1, processes // parallel.context)


def tokens_per_step(stage: Stage, devices: int) -> int:
    """Tokens of an optimizer step on all devices together: the stage's batch_tokens, else one micro-batch on each."""
    return stage.batch_tokens or stage.sequence_length * stage.micro_batch * devices


def count_steps(stage: Stage, batch_tokens: int) -> int:
    """Optimizer steps of a stage: tokens / batch_tokens, rounded up."""
    return -(-stage.tokens // batch_tokens)


def stage_rows(stages: Sequence[Stage], batch_tokens: Sequence[int], number: int) -> range:
    """Global rows, in the data's order, that a stage reads: it goes on behind earlier stages of its length."""
    length = stages[number].sequence_length
    first = rows = 0
    for stage, tokens in zip(stages[: number + 1], batch_tokens, strict=False):
        if stage.sequence_length == length:
            first, rows = first + rows, count_steps(stage, tokens) * tokens // length
    return range(first, first + rows)


def save_steps(checkpoint: CheckpointConfig, stage: Stage, steps: int) -> int:
    """Optimizer steps between checkpoints of a stage; ten of them where the recipe says nothing."""
    every = checkpoint.every_steps
    if checkpoint.every_tokens is not None:
        every = max(1, checkpoint.every_tokens * steps // stage.tokens)
    return every or max(1, steps // 10)


def accumulation(stage: Stage, batch_tokens: int, world_size: int) -> int:
    """Micro-batches per optimizer step and device; ValueError names the nearest batch_tokens that give whole ones."""
    unit = stage.sequence_length * stage.micro_batch * world_size
    if batch_tokens % unit:
        below = max(1, batch_tokens // unit) * unit
        raise ValueError(
            f"batch_tokens = {batch_tokens} must be a multiple of sequence_length x micro_batch x devices = "
            f"{stage.sequence_length} x {stage.micro_batch} x {world_size} = {unit}; nearest: {below} or {below + unit}"
        )
    return batch_tokens // unit


def chunk_rows(vocabulary: int, cuda: bool, distills: bool = False) -> int:
    """Rows of logits at a time: 2^28 logits on a GPU (1.6 GB with their float32 copy), 2^24 on a CPU.

    Args:
        distills: a quarter of them, since both models' are there.
    """
    rows = 1 << (max(1, (2**28 if cuda else 2**24) // vocabulary).bit_length() - 1)
    return max(64, rows // 4 if distills else rows)


def recomputed_layers(which: str | int, layers: int) -> range:
    """Layers whose activations are recomputed in the backward: "none", "full", or every n-th."""
    every = {"none": layers, "full": 1}[which] if isinstance(which, str) else which
    return range(0, 0 if which == "none" else layers, every)


def auto_tile(width: int) -> int:
    """Tokens of a tile with `tiled_mlp: auto`, 1024 or more: 2^27 elements of its widest tensor, which fill a GPU."""
    return max(1024, 1 << (max(1, 2**27 // width).bit_length() - 1))
