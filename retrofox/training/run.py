"""A run under way, and where its stages begin, read and write."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrofox.config import Recipe
from retrofox.planning.steps import count_steps, stage_rows
from retrofox.support.interruptions import Interruptions
from retrofox.training.run_directory import stage_folder


@dataclass
class Run:
    """A run under way, with the parts that its stages share.

    Attributes:
        batch_tokens: tokens per optimizer step on all devices together, of each stage.
        interruptions: where signals are noted during a stage's loop, which stops for them after a save.
        source: the checkpoint that training starts from.
    """

    recipe: Recipe
    out: Path
    batch_tokens: list[int]
    interruptions: Interruptions
    source: Path = Path()
    tokens: Any = None
    tokenizer: Any = None
    state: Any = None

    def steps(self, number: int) -> int:
        """Optimizer steps of a stage."""
        return count_steps(self.recipe.stages[number], self.batch_tokens[number])

    def rows(self, number: int) -> range:
        """Global rows that a stage reads, behind those that earlier stages of its length have read."""
        return stage_rows(self.recipe, self.batch_tokens, number)

    def folder(self, number: int) -> Path:
        """Where a stage keeps its checkpoints."""
        return stage_folder(self.out, self.recipe, number)

    def original(self, number: int) -> Path:
        """Where a stage finds the original: what the last adapt stage before it made, else the source."""
        adapted = [n for n, stage in enumerate(self.recipe.stages[:number]) if stage.objective == "adapt"]
        return self.folder(adapted[-1]) / "model" if adapted else self.source

    def before(self, number: int) -> Path:
        """The model a stage starts from."""
        return self.folder(number - 1) / "model" if number else self.source
