"""Prompts of an exact length: a needle in a stretch of the haystack, the question last, and the answer's tokens.

"The best thing to do in Lisbon is to ..." is hidden (Lin et al., ICLR 2025, section 4.4). Mode standard asks for it in
other words. Mode easy hides question and answer together, in the very words of the final question, so that a base model
that can look back finds it without understanding an instruction.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from retrofox.data.windows import documents
from retrofox.evaluation.token_scores import Scored

logger = logging.getLogger(__name__)
LEAST_TOKENS = 1 << 21
"""Reading stops here, or at eight times the longest prompt: more than enough for different stretches."""
MODES: tuple[str, ...] = ("easy", "standard")

CITIES = (
    *("San Francisco", "Lisbon", "Nairobi", "Kyoto", "Montreal", "Naples", "Auckland", "Bogota", "Bergen", "Cairo"),
    *("Tallinn", "Hanoi", "Valparaiso", "Dakar", "Ghent", "Adelaide"),
)
ACTS = (
    "eat a sandwich and sit in Dolores Park on a sunny day",
    "count the red boats in the harbour before breakfast",
    "borrow a bicycle and follow the canal to the old mill",
    "listen to the brass band under the iron bridge",
    "buy seven lemons and learn to juggle behind the market",
    "climb the bell tower and wave at the evening train",
    "write a postcard in the garden of the glass library",
    "share a bowl of plum soup with the chess players",
    "ride the yellow tram twice around the botanical gardens",
    "draw the stone lions in front of the customs house",
    "drink cold tea on the roof of the swimming hall",
    "watch the glass blowers at work beside the fish market",
    "row across the lake and pick pears on the island",
    "hear the church organ being tuned on a Tuesday",
    "fly a paper kite from the wall of the old fortress",
    "take the night ferry and wait for the lighthouse to turn",
)


class Haystack:
    """Token ids (N,) int32 without special tokens, N at least twice the longest prompt, and their tokenizer."""

    def __init__(self, tokenizer: Any, token_ids: np.ndarray):
        self.tokenizer = tokenizer
        self.token_ids = token_ids

    @cached_property
    def start(self) -> list[int]:
        """Tokens that the tokenizer puts before every text, such as <s>."""
        return list(self.tokenizer("")["input_ids"])

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def stretch(self, length: int, place: float) -> np.ndarray:
        """`length` tokens from `place` in [0, 1): of the positions where such a stretch can start."""
        at = int(place * (len(self.token_ids) - length + 1))
        return self.token_ids[at : at + length]

    def sentence_end(self, text: np.ndarray, at: int, reach: int = 64) -> int:
        """The last position within `reach` tokens before `at` that follows a full stop, else `at` itself."""
        if at in (0, len(text)):
            return at
        for position in range(at, max(0, at - reach), -1):
            if self.tokenizer.decode([int(text[position - 1])]).rstrip().endswith((".", "!", "?")):
                return position
        return at


def read_haystack(tokenizer: Any, data: Sequence[str], longest: int, text_field: str) -> Haystack:
    """The files' text from their start, repeated where it is shorter than twice the longest prompt."""
    special = np.array(sorted(set(tokenizer.all_special_ids)), np.int32)
    enough, tokens, pieces = max(LEAST_TOKENS, 8 * longest), 0, []
    for _, ids in documents(data, tokenizer, text_field=text_field):
        kept = ids[~np.isin(ids, special)]
        tokens += len(kept)
        pieces.append(kept)
        if tokens >= enough:
            break
    if not tokens:
        raise ValueError(f"no text in {', '.join(data)}")
    hay = np.concatenate(pieces)
    if len(hay) < longest:
        logger.warning("prompts of %s tokens repeat the texts, which have %s: give longer ones", longest, len(hay))
    return Haystack(tokenizer, np.tile(hay, -(-2 * longest // len(hay))) if len(hay) < 2 * longest else hay)


@dataclass(frozen=True)
class Task:
    """One prompt's fact: `needle` is hidden, `question` ends the prompt, `answer` follows it."""

    mode: str
    city: str
    needle: str
    question: str
    answer: str


def make_task(mode: str, number: int, seed: str) -> Task:
    """The task of prompt `number`: neighbours share neither city nor act, and numbers below 256 differ in the pair."""
    order = random.Random(seed)
    cities, acts = (order.sample(x, len(x)) for x in (CITIES, ACTS))
    city, act = cities[number % len(cities)], acts[(number + number // len(cities)) % len(acts)]
    start = f"The best thing to do in {city} is to"
    if mode == "easy":
        question = f"\nWhat is the best thing to do in {city}? Answer: {start}"
        return Task(mode, city, f"{question} {act}.\n", question, f" {act}")
    question = (
        "\n\nSomewhere in the text above stands an important piece of information. Use it to answer this question.\n"
        f"Question: What is the best thing to do in {city}?\nAnswer: {start}"
    )
    return Task(mode, city, f"\n{start} {act}.\n", question, f" {act}")


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
