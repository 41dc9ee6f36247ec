"""How many processes share a row, which tokens of it each holds, and what can't be shared. No process group needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from retrofox.anatomy import causal_lm, is_converted
from retrofox.config import ParallelConfig
from retrofox.config_values import depends_on_length, kv_heads_of


@dataclass(frozen=True)
class Degrees:
    """How a context group of `context` processes is split: ulysses x zigzag.

    Process n of the group has place n % ulysses among those that trade heads, and n // ulysses in the zigzag.
    """

    ulysses: int = 1
    zigzag: int = 1

    def __str__(self) -> str:
        return f"heads x {self.ulysses}, zigzag of {self.zigzag}"

    @property
    def context(self) -> int:
        """Processes that share a row."""
        return self.ulysses * self.zigzag

    @property
    def unit(self) -> int:
        """Tokens of which a row's length must be a multiple."""
        return self.context if self.zigzag == 1 else 2 * self.context

    @property
    def chunks(self) -> int:
        """Pieces into which the zigzag cuts a row."""
        return 1 if self.zigzag == 1 else 2 * self.zigzag

    def chunks_of(self, place: int) -> list[int]:
        """Pieces that place r of R in the zigzag holds: r and 2 R - 1 - r, so that all have as many keys to see."""
        return [0] if self.zigzag == 1 else [place, 2 * self.zigzag - 1 - place]

    def segments(self, process: int, length: int) -> list[tuple[int, int]]:
        """[start, stop) of the stretches of a row of `length` tokens that a process of the group holds, in order."""
        chunk, part, found = length // self.chunks, length // self.context, []
        begin = (process % self.ulysses) * part  # counted in the chunks of its place in the zigzag, one after the other
        for place, number in enumerate(self.chunks_of(process // self.ulysses)):
            first, last = max(begin, place * chunk), min(begin + part, (place + 1) * chunk)
            if first < last:
                ahead = (number - place) * chunk
                found.append((first + ahead, last + ahead))
        return found


def degrees(context: int, kv_heads: int) -> Degrees:
    """The split of a context group: as many processes trade heads as divide both it and the key/value heads."""
    best = max(u for u in range(1, context + 1) if context % u == 0 and kv_heads % u == 0)
    return Degrees(best, context // best)


def split_of(parallel: ParallelConfig, config: Any) -> Degrees:
    """How a context group is split for a model's key/value heads."""
    return degrees(parallel.context, kv_heads_of(config))


def refuse_sharing(model: Any, split: Degrees) -> None:
    """Raises ValueError for a model, on any device, whose rows a context group can't share."""
    if split.context == 1:
        return
    if not is_converted(model):
        raise ValueError(
            "parallel.context shares rows for Forgetting Attention only: convert the model, or give `fox:` to the "
            "recipe; an unconverted model trains with DDP or FSDP2"
        )
    if depends_on_length(causal_lm(model).config):
        raise ValueError(
            "parallel.context: this model's RoPE (dynamic or longrope) takes its frequencies from the length that "
            "one process sees: take another rope_type, or parallel.context 1"
        )
