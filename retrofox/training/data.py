"""A stage's batches: prepared tokens, packed windows in a stateless order, targets made in the loader's processes."""

from __future__ import annotations

import functools
import signal
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from retrofox.config import ExtendStage, Recipe, Stage
from retrofox.data.packed import IGNORE, PackedDataset, collate, next_token_targets
from retrofox.data.prepare import PreparedTokens
from retrofox.data.sampler import StepSampler
from retrofox.parallel.layout import Degrees
from retrofox.parallel.mesh import Mesh
from retrofox.parallel.shards import cut


class StageData:
    """Batches of one stage for this process: whole rows, or its part of them where a mesh shares rows."""

    def __init__(self, tokens: PreparedTokens, recipe: Recipe, stage: Stage, state: Any, mesh: Mesh | None = None):
        self.recipe, self.stage, self.mesh = recipe, stage, mesh
        # Processes that share rows read the same ones.
        self.reader, self.readers = (mesh.reader, mesh.readers) if mesh else (state.process_index, state.num_processes)
        self.collate: Any = collate_with_targets
        if mesh is not None:
            self.collate = functools.partial(collate_part, split=mesh.degrees, process=mesh.rank)
        skips_to = stage.max_position if isinstance(stage, ExtendStage) else None
        self.dataset = PackedDataset(tokens.train, stage.sequence_length, seed=recipe.seed, max_position=skips_to)
        self.held_out = None if tokens.eval is None else PackedDataset(tokens.eval, stage.sequence_length)

    def batches(self, first_row: int) -> Iterable[dict[str, Any]]:
        """Batches from global row `first_row` on, endless; loader processes read ahead."""
        sampler = StepSampler(
            self.dataset.order, self.stage.micro_batch, consumed=first_row, rank=self.reader, world=self.readers
        )
        workers = self.recipe.dataloader_workers
        return DataLoader(
            self.dataset,
            batch_sampler=sampler,
            collate_fn=self.collate,
            num_workers=workers,
            prefetch_factor=4 if workers else None,
            worker_init_fn=_leave_signals,
            pin_memory=torch.cuda.is_available(),
            # Its own generator: else starting the processes would draw from the run's random numbers.
            generator=torch.Generator().manual_seed(self.recipe.seed),
        )

    def eval_windows(self) -> tuple[list[int], int]:
        """This process's share of the held-out windows, evenly spaced, up to log.eval_tokens, and the largest share."""
        if self.held_out is None:
            return [], 0
        world, rank = self.readers, self.reader
        wanted = min(len(self.held_out), max(1, self.recipe.log.eval_tokens // self.stage.sequence_length))
        windows = np.linspace(0, len(self.held_out) - 1, wanted).round().astype(int)
        return windows[rank::world].tolist(), -(-wanted // world)

    def eval_batches(self) -> Iterator[dict[str, Any]]:
        """Batches of `eval_windows`, as many on each process.

        Where they don't divide among the processes, those with one less take any window without its targets: all score
        the same windows together, whatever their number, and sharded models run as many passes on each.
        """
        if self.held_out is None:
            return
        mine, each = self.eval_windows()
        for start in range(0, each, self.stage.micro_batch):
            rows = [self.held_out[i] for i in mine[start : start + self.stage.micro_batch]]
            if len(mine) < each <= start + self.stage.micro_batch:
                spare = self.held_out[0]
                rows.append({**spare, "labels": torch.full_like(spare["labels"], IGNORE)})
            yield self.collate(rows)


def _leave_signals(worker: int) -> None:
    """A signal to the whole group is the trainer's to answer: a loader process that died of it would break the save."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def collate_with_targets(rows: Sequence[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """A batch with `targets` (B, T), the next token of the same document, and their number `num_targets`."""
    batch: dict[str, Any] = collate(rows)
    batch["targets"] = next_token_targets(batch.pop("labels"), batch["position_ids"])
    batch["num_targets"] = int((batch["targets"] >= 0).sum())
    return batch


def collate_part(rows: Sequence[dict[str, torch.Tensor]], split: Degrees, process: int) -> dict[str, Any]:
    """A process's part of the batch that `collate_with_targets` makes; see `parallel.shards.cut`."""
    return cut(collate_with_targets(rows), split, process)
