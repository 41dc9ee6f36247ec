"""Prompts of an exact length: a needle in a stretch of the haystack, the question last, and the answer's tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from retrofox.evaluation.needles.haystack import Haystack
from retrofox.evaluation.needles.tasks import Task, make_task
from retrofox.evaluation.token_scores import Scored


@dataclass(frozen=True)
class Prompt:
    """A question to a model.

    Attributes:
        length: tokens of the prompt.
        depth: where the needle is, 0 = the haystack's start, 1 = its end.
        token_ids: (length,) int32, up to where the answer begins.
        answer: the answer's tokens.
    """

    task: Task
    length: int
    depth: float
    token_ids: np.ndarray
    answer: list[int]

    @property
    def scored(self) -> Scored:
        """Prompt and answer as one text, in which the answer's tokens are scored."""
        whole = np.concatenate([self.token_ids, np.asarray(self.answer, np.int32)])
        return Scored(whole, np.arange(self.length, len(whole)), f"a prompt of {self.length} tokens")


def make_prompts(
    hay: Haystack, modes: Sequence[str], lengths: Sequence[int], depths: Sequence[float], trials: int, seed: int
) -> list[Prompt]:
    """`trials` prompts of each mode, length and depth.

    The prompts of a mode and length differ in fact and stretch of the haystack. Those of another length ask for the
    same facts, so that lengths are compared on like tasks.

    Raises:
        ValueError: a length that can't hold needle and question; the smallest that can is named.
    """
    rows = [depth for depth in depths for _ in range(trials)]
    prompts = []
    for mode in modes:
        name = f"{seed} {mode}"
        tasks = [EncodedTask(hay, make_task(mode, number, name)) for number in range(len(rows))]
        shortest = len(hay.start) + max(len(task.needle) + len(task.question) for task in tasks)
        if shortest > min(lengths):
            raise ValueError(
                f"a prompt of {min(lengths)} tokens can't hold needle and question of mode {mode}: the lengths must be "
                f"at least {shortest}"
            )
        prompts += [
            _prompt(hay, task, length, depth, (number, len(rows)), f"{name} {length} {number}")
            for length in lengths
            for number, (task, depth) in enumerate(zip(tasks, rows, strict=True))
        ]
    return prompts


class EncodedTask:
    """A task as tokens: needle, question and answer.

    Question and answer are tokenised as one text, so that the answer's tokens are those it has in that place. Where the
    tokenizer joins the question's end to the answer's start, the joined token belongs to the answer.
    """

    def __init__(self, hay: Haystack, task: Task):
        self.task = task
        self.needle = hay.encode(task.needle)
        whole = hay.encode(f"{task.question}{task.answer}.")
        first, _ = _shared(hay.encode(task.question), whole)
        last, complete = _shared(hay.encode(task.question + task.answer), whole)
        self.question = whole[:first]
        self.answer = whole[first : last if complete else last + 1]


def _shared(start: list[int], whole: list[int]) -> tuple[int, bool]:
    """(tokens at the beginning that both have in common, whether these are all tokens of `start`)."""
    count = next((n for n, pair in enumerate(zip(start, whole, strict=False)) if pair[0] != pair[1]), len(start))
    count = min(count, len(whole))
    return count, count == len(start)


def _prompt(hay: Haystack, task: EncodedTask, length: int, depth: float, place: tuple[int, int], seed: str) -> Prompt:
    """Prompt `place[0]` of `place[1]`: the needle after a sentence near `depth` of its own stretch of the haystack."""
    room = length - len(hay.start) - len(task.needle) - len(task.question)
    text = hay.stretch(room, (place[0] + random.Random(seed).random()) / place[1])
    cut = hay.sentence_end(text, round(depth * room))
    pieces = [hay.start, text[:cut], task.needle, text[cut:], task.question]
    token_ids = np.concatenate([np.asarray(piece, np.int32) for piece in pieces])
    return Prompt(task.task, len(token_ids), depth, token_ids, task.answer)
