"""Prompts of an exact length: a task's needles in a stretch of the haystack, its question last, its answer's tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from retrofox.evaluation.needles.haystack import Haystack
from retrofox.evaluation.needles.tasks import PLACED, Task, make_task
from retrofox.evaluation.needles.word_lists import QUESTION, shortest_list, word_list


@dataclass(frozen=True)
class Value:
    """One value of the answer as tokens: those given before it, and its own."""

    given: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Prompt:
    """A question to a model.

    Attributes:
        length: tokens of the prompt.
        depth: where the needle is, 0 = the haystack's start, 1 = its end; None in modes without one place.
        token_ids: (length,) int32, up to where the answer begins.
        values: what should follow, one after the other.
    """

    task: Task
    length: int
    depth: float | None
    token_ids: np.ndarray
    values: tuple[Value, ...]

    @property
    def tokens(self) -> int:
        """Tokens that teacher forcing reads: the prompt and its whole answer."""
        return self.length + sum(len(value.given) + len(value.answer) for value in self.values)


def make_prompts(
    hay: Haystack, modes: Sequence[str], lengths: Sequence[int], depths: Sequence[float], trials: int, seed: int
) -> list[Prompt]:
    """`trials` prompts of each mode, length and depth; in modes without a place, as many of each length.

    The prompts of a mode and length differ in facts, question and stretch of the haystack. Those of another length ask
    for the same facts, so that lengths are compared on like tasks.

    Raises:
        ValueError: a length that can't hold needles and question of some modes; the smallest that can is named.
    """
    rows = [depth for depth in depths for _ in range(trials)]
    names = {mode: f"{seed} {mode}" for mode in modes}
    tasks = {
        mode: [encode_task(hay, make_task(mode, n, name)) for n in range(len(rows))]
        for mode, name in names.items()
        if mode != "common-words"
    }
    shortest = {mode: max(task.tokens for task in own) for mode, own in tasks.items()}
    if "common-words" in names:
        lists = [shortest_list(hay, n, names["common-words"]) for n in range(len(rows))]
        shortest["common-words"] = len(hay.encode(QUESTION)) + max(lists)
    _require_room({mode: len(hay.start) + shortest[mode] for mode in modes}, min(lengths))
    prompts = []
    for mode, name in names.items():
        if mode == "common-words":
            prompts += [_list_prompt(hay, length, n, len(rows), name) for length in lengths for n in range(len(rows))]
            continue
        prompts += [
            _needle_prompt(hay, task, length, depth if mode in PLACED else None, n, len(rows), f"{name} {length} {n}")
            for length in lengths
            for n, (task, depth) in enumerate(zip(tasks[mode], rows, strict=True))
        ]
    return prompts


@dataclass(frozen=True)
class EncodedTask:
    """A task as tokens."""

    task: Task
    needles: list[list[int]]
    question: list[int]
    values: tuple[Value, ...]

    @property
    def tokens(self) -> int:
        """Tokens of needles and question."""
        return sum(map(len, self.needles)) + len(self.question)


def encode_task(hay: Haystack, task: Task) -> EncodedTask:
    """Tokenises question and answer as one text, so that a value's tokens are those it has in that place.

    A token with a piece of a value in it belongs to the value: where the tokenizer joins the question's end to the
    answer's start, the prompt ends before the joined token.
    """
    text, bounds = task.question, []
    for part in task.parts:
        start = len(text) + len(part.given)
        text += part.given + part.answer
        bounds.append((start, len(text)))
    text += "."
    whole = hay.encode(text)

    def shared(end: int) -> tuple[int, bool]:
        """(tokens that the text up to `end` has in common with the whole, whether these are all of its tokens)."""
        own = hay.encode(text[:end])
        count = next((n for n, pair in enumerate(zip(own, whole, strict=False)) if pair[0] != pair[1]), None)
        count = min(len(own), len(whole)) if count is None else count
        return count, count == len(own)

    values, before, first = [], 0, 0
    for number, (start, end) in enumerate(bounds):
        at = max(before, shared(start)[0])
        count, complete = shared(end)
        stop = count if complete else count + 1
        if number == 0:
            first = before = at
        values.append(Value(whole[before:at], whole[at:stop]))
        before = stop
    return EncodedTask(task, [hay.encode(needle) for needle in task.needles], whole[:first], tuple(values))


def _needle_prompt(
    hay: Haystack, encoded: EncodedTask, length: int, depth: float | None, number: int, count: int, seed: str
) -> Prompt:
    """Puts the needles after sentences: the first at `depth`, the others anywhere; for None all, in their order."""
    draw = random.Random(seed)
    room = length - len(hay.start) - encoded.tokens
    text = hay.stretch(room, (number + draw.random()) / count)
    if depth is None:
        places = sorted(draw.random() for _ in encoded.needles)
    else:
        places = [depth, *(draw.random() for _ in encoded.needles[1:])]
    cuts = [hay.sentence_end(text, round(place * room)) for place in places]
    pieces: list[Sequence[int] | np.ndarray] = [hay.start]
    before = 0
    for cut, needle in sorted(zip(cuts, encoded.needles, strict=True), key=lambda pair: pair[0]):  # stable: same cut
        pieces += [text[before:cut], needle]
        before = cut
    return _prompt(encoded, depth, [*pieces, text[before:], encoded.question])


def _list_prompt(hay: Haystack, length: int, number: int, count: int, seed: str) -> Prompt:
    """A list of words that fills the prompt; what its last word would overfill is text of the haystack before it."""
    room = length - len(hay.start) - len(hay.encode(QUESTION))
    words, task = word_list(hay, room, number, seed)
    encoded = encode_task(hay, task)
    filler = hay.stretch(length - len(hay.start) - len(words) - len(encoded.question), number / count)
    return _prompt(encoded, None, [hay.start, filler, words, encoded.question])


def _prompt(encoded: EncodedTask, depth: float | None, pieces: Sequence[Sequence[int] | np.ndarray]) -> Prompt:
    token_ids = np.concatenate([np.asarray(piece, np.int32) for piece in pieces])
    return Prompt(encoded.task, len(token_ids), depth, token_ids, encoded.values)


def _require_room(shortest: dict[str, int], length: int) -> None:
    """Raises ValueError where the shortest prompts of some mode, by their tokens, are longer than `length`."""
    short = {mode: tokens for mode, tokens in shortest.items() if tokens > length}
    if short:
        each = f" ({', '.join(f'{mode} {tokens}' for mode, tokens in short.items())})" if len(short) > 1 else ""
        raise ValueError(
            f"a prompt of {length} tokens can't hold needle and question of mode {', '.join(short)}: "
            f"the lengths must be at least {max(short.values())}{each}"
        )
