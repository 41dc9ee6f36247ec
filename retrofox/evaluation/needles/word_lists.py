"""The lists of common-words mode: ten words that occur often among many that occur seldom."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from retrofox.evaluation.needles.haystack import Haystack
from retrofox.evaluation.needles.tasks import Task, answers_in_turn

COMMON = 10  # words that are asked for
COMMON_TIMES = 20  # how often each of them occurs
OTHER_TIMES = 3  # how often every other word occurs
FEWEST_OTHERS = 10
QUESTION = (
    f"\n\nQuestion: Which {COMMON} words occur most often in the list above, in the order of their first occurrence?\n"
    f"Answer: The {COMMON} words that occur most often are"
)


def shortest_list(hay: Haystack, number: int, seed: str) -> int:
    """Tokens of the shortest list that sets a task.

    Raises:
        ValueError: the haystack has too few different words.
    """
    if len(hay.words) < COMMON + FEWEST_OTHERS:
        raise ValueError(
            f"mode common-words needs a haystack of at least {COMMON + FEWEST_OTHERS} different words of 4 to 10 "
            f"letters, this one has {len(hay.words)}: give more text"
        )
    common, others = _drawn(hay, number, seed)
    return len(_encode(hay, _shuffled(common, others[:FEWEST_OTHERS], number, seed)))


def word_list(hay: Haystack, room: int, number: int, seed: str) -> tuple[list[int], Task]:
    """(a list of at most `room` tokens that all but fills it, the task it sets).

    Raises:
        ValueError: the haystack has too few different words for a list so long.
    """
    common, others = _drawn(hay, number, seed)
    left = room - len(_encode(hay, [])) - COMMON_TIMES * sum(hay.size(word) for word in common)
    chosen: list[str] = []
    for word in _with_pairs(others):
        left -= OTHER_TIMES * hay.size(word)
        if left < 0 and len(chosen) >= FEWEST_OTHERS:
            break
        chosen.append(word)
    else:
        raise ValueError(
            f"the haystack's {len(hay.words)} different words of 4 to 10 letters are too few for a list of {room} "
            "tokens in mode common-words: give more text"
        )
    while True:
        words = _shuffled(common, chosen, number, seed)
        token_ids = _encode(hay, words)
        excess = len(token_ids) - room
        if excess <= 0 or len(chosen) == FEWEST_OTHERS:
            break
        per_word = OTHER_TIMES * sum(map(hay.size, chosen)) / len(chosen)
        chosen = chosen[: max(FEWEST_OTHERS, len(chosen) - max(1, int(excess / per_word)))]
    wanted = set(common)
    in_order = [word for word in dict.fromkeys(words) if word in wanted]
    return token_ids, Task("common-words", "words", (), QUESTION, answers_in_turn(in_order))


def _drawn(hay: Haystack, number: int, seed: str) -> tuple[list[str], list[str]]:
    words = random.Random(f"{seed} {number}").sample(hay.words, len(hay.words))
    return words[:COMMON], words[COMMON:]


def _with_pairs(words: Sequence[str]) -> Iterator[str]:
    """The words, then pairs of them with a hyphen, in which every word comes equally often."""
    yield from words
    for shift in range(1, len(words)):
        for n, word in enumerate(words):
            yield f"{word}-{words[(n + shift) % len(words)]}"


def _shuffled(common: Sequence[str], others: Sequence[str], number: int, seed: str) -> list[str]:
    words = [*common] * COMMON_TIMES + [*others] * OTHER_TIMES
    random.Random(f"{seed} {number} order").shuffle(words)
    return words


def _encode(hay: Haystack, words: Sequence[str]) -> list[int]:
    return hay.encode("\n\nList of words: " + " ".join(words))
