"""The facts that `retrofox needle` hides, and its questions (Lin et al., ICLR 2025, section 4.4).

"The best thing to do in Lisbon is to ..." is hidden. Mode standard asks for it in other words. Mode easy hides question
and answer together, in the very words of the final question, so that a base model that can look back finds it without
understanding an instruction.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

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
