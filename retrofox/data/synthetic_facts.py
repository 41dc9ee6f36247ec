"""Made-up facts in natural documents: each is told twice, and predicting the second time takes remembering the first.

Long documents alone teach retrieval slowly: few of their tokens need what stood thousands of tokens back. The facts
are made of the document's own words, and drawn by a hash of its text, so that they are the same each time it is read.
"""

from __future__ import annotations

import hashlib
import math
import random
import re

VERSION = 1
"""Part of a shard's identity: change it when the facts change."""
CHARACTERS_PER_FACT = 4000
CHARACTERS_PER_COPY = 16000
NEAREST, FARTHEST = 300, 60_000
"""Characters between the two tellings: log-uniform between these, as far as the document reaches."""
TELLINGS = (
    ("The {key} is kept under the name {value}.", "Under what name is the {key} kept?"),
    ("Remember that {key} stands for {value}.", "What does {key} stand for?"),
    ("{key}: {value}.", "And {key}?"),
    ("In the ledger, {key} is entered as {value}.", "How is {key} entered in the ledger?"),
    ("Note: the value of {key} equals {value}.", "What is the value of {key}?"),
    ("According to the list, {key} belongs with {value}.", "With what does {key} belong, according to the list?"),
    ("the key {key} opens {value};", "what does the key {key} open?"),
)
"""How a fact is told, and how it is asked for."""
JOINTS = (" ", "\n")
"""Between a question and the fact that answers it."""
FEWEST_WORDS = 16
"""Different words of 4 to 9 letters that a document must have: facts are made of them."""
_WORD = re.compile(r"\b[^\W\d_]{4,9}\b")


def with_facts(text: str, share: float = 1.0, questions: float = 0.0) -> str:
    """The text with facts and copied passages put in, or the text itself for all but this share of documents.

    One fact per 4000 characters, told twice at a log-uniform distance, and one passage per 16000 characters that comes
    again. Inserted at the ends of words, on lines of their own; nothing of the text is lost.

    Args:
        share: of all texts, chosen by a hash of the text.
        questions: share of the facts that are asked for where they are told again. The question names the key too, so
            the value is found only by looking past the nearest mention of its key.
    """
    draw = random.Random(hashlib.sha256(text.encode("utf-8", "replace")).digest())
    if draw.random() >= share or len(words := sorted(_words(text))) < FEWEST_WORDS:
        return text
    pieces: list[tuple[int, str]] = []
    for _ in range(max(1, len(text) // CHARACTERS_PER_FACT)):
        telling, question = _fact(draw, words)
        first = draw.randrange(len(text))
        second = min(len(text), first + _distance(draw, len(text)))
        asked = f"{question}{draw.choice(JOINTS)}" if questions and draw.random() < questions else ""
        pieces += [(first, f"\n{telling}\n"), (second, f"\n{asked}{telling}\n")]
    for _ in range(len(text) // CHARACTERS_PER_COPY):
        start, length = draw.randrange(len(text)), draw.randint(100, 500)
        again = start + length + _distance(draw, len(text))
        pieces.append((min(len(text), again), "\n" + text[start : start + length] + "\n"))
    return _inserted(text, pieces)


def _words(text: str) -> set[str]:
    return set(_WORD.findall(text[:200_000]))


def _fact(draw: random.Random, words: list[str]) -> tuple[str, str]:
    """(the fact, a question that it answers)."""
    key = " ".join(draw.choices(words, k=draw.randint(1, 2)))
    if draw.random() < 0.3:
        value = str(draw.randint(10**3, 10**9))
    else:
        value = " ".join(draw.choices(words, k=draw.randint(2, 8)))
    telling, question = draw.choice(TELLINGS)
    return telling.format(key=key, value=value), question.format(key=key)


def _distance(draw: random.Random, length: int) -> int:
    return round(math.exp(draw.uniform(math.log(NEAREST), math.log(max(NEAREST, min(FARTHEST, length))))))


def _inserted(text: str, pieces: list[tuple[int, str]]) -> str:
    parts, done = [], 0
    for at, piece in sorted(pieces, key=lambda item: item[0]):
        space = re.compile(r"\s|$").search(text, max(at, done))
        stop = space.start() if space else len(text)
        parts += [text[done:stop], piece]
        done = stop
    return "".join([*parts, text[done:]])
