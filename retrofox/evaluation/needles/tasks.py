"""What each mode of `retrofox needle` hides, asks and expects.

easy, standard: one fact (Lin et al., ICLR 2025, section 4.4). "The best thing to do in Lisbon is to ..." is hidden.
    standard asks for it in other words; easy hides question and answer together, in the very words of the final
    question, so that a base model that can look back finds it without understanding an instruction.

The other modes follow RULER (Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?",
arXiv 2404.06654, section 3). Throughout, ours differ thus: the question stands only at the end, not also before the
text; there is no worked example; the answer has one order, and each of its values is judged after the true earlier
ones, where RULER looks for the values anywhere in a generated text; the haystack is the user's.

multi-key: four numbers of four things are hidden in like sentences, one is asked for (NIAH, multi-keys).
multi-value: one thing has four numbers, all are asked for, in the order of the text (NIAH, multi-values).
multi-query: four numbers of four things are hidden, all are asked for; the answer names the things (NIAH,
    multi-queries).
variable-tracking: VAR A = 12345, VAR B = VAR A, ... over four hops; the five variables that hold the number are asked
    for. A second chain with another number is hidden too; RULER's default is one.
common-words: a list of words, ten of them 20 times each, the others 3 times; the ten are asked for, in the order of
    their first occurrence (CWE, whose common words occur 30 times). The words are the haystack's own, unnumbered.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

MODES: tuple[str, ...] = (
    *("easy", "standard", "multi-key", "multi-value", "multi-query", "variable-tracking", "common-words"),
)
PLACED: tuple[str, ...] = ("easy", "standard", "multi-key")
"""Modes with one needle that is asked for, which goes to a cell's depth; in the others depth means nothing."""
VALUES = 4  # numbers hidden in the multi- modes, RULER's default
HOPS = 4  # assignments after the first in a chain of variables, RULER's default

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
ADJECTIVES = (
    *("amber", "brittle", "crooked", "dusty", "eager", "faded", "gentle", "hollow", "ivory", "jagged"),
    *("lonely", "muddy", "narrow", "ornate", "pale", "quiet", "rusty", "silver", "tangled", "velvet"),
)
NOUNS = (
    *("anchor", "basket", "candle", "drum", "engine", "feather", "garden", "hammer", "island", "jacket"),
    *("kettle", "ladder", "mirror", "needle", "orchard", "pillow", "quilt", "ribbon", "saddle", "trumpet"),
)
CONSONANTS = "BCDFGHJKLMNPQRSTVWXZ"


@dataclass(frozen=True)
class Part:
    """A value that the answer holds, and the text given before it: a comma, or what names the value."""

    given: str
    answer: str


@dataclass(frozen=True)
class Task:
    """One prompt's facts, drawn by seed: so neither the model's memory nor one lucky wording decides.

    Attributes:
        subject: what is asked about: a city, a thing, a number.
        needles: texts hidden in the haystack, in their order there; the first is the one asked for in PLACED modes.
        question: ends the prompt.
        parts: what follows it.
    """

    mode: str
    subject: str
    needles: tuple[str, ...]
    question: str
    parts: tuple[Part, ...]

    @property
    def answer(self) -> str:
        """The values alone."""
        return ", ".join(part.answer.strip() for part in self.parts)


def make_task(mode: str, number: int, seed: str) -> Task:
    """The task of prompt `number` of a mode; numbers below 256 have different facts each.

    Raises:
        KeyError: common-words, whose task depends on its list (`word_lists.word_list`).
    """
    return _MAKERS[mode](number, seed)


def answers_in_turn(answers: Sequence[str]) -> tuple[Part, ...]:
    """A list with commas: each answer after the earlier ones."""
    return tuple(Part("," if n else "", f" {answer}") for n, answer in enumerate(answers))


def _fact(number: int, seed: str) -> tuple[str, str]:
    """(city, act): neighbours share neither, and no pair comes twice before all have come."""
    order = random.Random(seed)
    cities, acts = (order.sample(x, len(x)) for x in (CITIES, ACTS))
    return cities[number % len(cities)], acts[(number + number // len(cities)) % len(acts)]


def _easy(number: int, seed: str) -> Task:
    city, act = _fact(number, seed)
    asked = f"\nWhat is the best thing to do in {city}? Answer: The best thing to do in {city} is to"
    return Task("easy", city, (f"{asked} {act}.\n",), asked, (Part("", f" {act}"),))


def _standard(number: int, seed: str) -> Task:
    city, act = _fact(number, seed)
    start = f"The best thing to do in {city} is to"
    question = (
        "\n\nSomewhere in the text above stands an important piece of information. Use it to answer this question.\n"
        f"Question: What is the best thing to do in {city}?\nAnswer: {start}"
    )
    return Task("standard", city, (f"\n{start} {act}.\n",), question, (Part("", f" {act}"),))


def _numbers(number: int, seed: str, count: int) -> tuple[list[str], list[str], random.Random]:
    """(things, different 7-digit numbers, the draw that goes on); the first thing differs from number to number."""
    order = random.Random(seed)
    adjectives, nouns = (order.sample(x, len(x)) for x in (ADJECTIVES, NOUNS))
    draw = random.Random(f"{seed} {number}")
    shift = number // len(adjectives)
    things = [
        f"{adjectives[(number + n) % len(adjectives)]} {nouns[(number + shift + 3 * n) % len(nouns)]}"
        for n in range(count)
    ]
    return things, [str(value) for value in draw.sample(range(1_000_000, 10_000_000), count)], draw


def _statement(thing: str, value: str) -> str:
    return f"\nThe secret number of the {thing} is {value}.\n"


def _multi_key(number: int, seed: str) -> Task:
    things, values, _ = _numbers(number, seed, VALUES)
    needles = tuple(_statement(thing, value) for thing, value in zip(things, values, strict=True))
    question = (
        "\n\nSome secret numbers are hidden in the text above.\n"
        f"Question: What is the secret number of the {things[0]}?\nAnswer: The secret number of the {things[0]} is"
    )
    return Task("multi-key", things[0], needles, question, (Part("", f" {values[0]}"),))


def _multi_value(number: int, seed: str) -> Task:
    things, values, _ = _numbers(number, seed, VALUES)
    needles = tuple(f"\nOne secret number of the {things[0]} is {value}.\n" for value in values)
    question = (
        "\n\nSome secret numbers are hidden in the text above.\n"
        f"Question: What are the {VALUES} secret numbers of the {things[0]}, in the order of the text?\n"
        f"Answer: The {VALUES} secret numbers of the {things[0]} are"
    )
    return Task("multi-value", things[0], needles, question, answers_in_turn(values))


def _multi_query(number: int, seed: str) -> Task:
    things, values, draw = _numbers(number, seed, VALUES)
    needles = [_statement(thing, value) for thing, value in zip(things, values, strict=True)]
    draw.shuffle(needles)
    named = ", ".join(f"the {thing}" for thing in things[:-1]) + f" and the {things[-1]}"
    question = (
        "\n\nSome secret numbers are hidden in the text above.\n"
        f"Question: What are the secret numbers of {named}?\nAnswer: The secret number of the {things[0]} is"
    )
    given = ["", *(f". The secret number of the {thing} is" for thing in things[1:])]
    parts = tuple(Part(text, f" {value}") for text, value in zip(given, values, strict=True))
    return Task("multi-query", ", ".join(things), tuple(needles), question, parts)


def _variable_tracking(number: int, seed: str) -> Task:
    draw = random.Random(f"{seed} {number}")
    values = draw.sample(range(10_000, 100_000), 2)
    names: list[str] = []
    while len(names) < 2 * (HOPS + 1):
        name = "".join(draw.choices(CONSONANTS, k=5))
        names += [] if name in names else [name]
    chains = [names[: HOPS + 1], names[HOPS + 1 :]]
    lines = [[f"\nVAR {chain[0]} = {value}\n"] for chain, value in zip(chains, values, strict=True)]
    for chain, own in zip(chains, lines, strict=True):
        own += [f"\nVAR {later} = VAR {earlier}\n" for earlier, later in pairwise(chain)]
    turns = [0] * len(lines[0]) + [1] * len(lines[1])
    draw.shuffle(turns)  # the chains interleave, each in its own order
    needles = tuple(lines[turn].pop(0) for turn in turns)
    question = (
        f"\n\nQuestion: Which {HOPS + 1} variables hold the value {values[0]}, by the assignments in the text above, "
        f"in the order of the text?\nAnswer: The {HOPS + 1} variables that hold the value {values[0]} are"
    )
    return Task("variable-tracking", str(values[0]), needles, question, answers_in_turn(chains[0]))


_MAKERS: dict[str, Callable[[int, str], Task]] = {
    "easy": _easy,
    "standard": _standard,
    "multi-key": _multi_key,
    "multi-value": _multi_value,
    "multi-query": _multi_query,
    "variable-tracking": _variable_tracking,
}
