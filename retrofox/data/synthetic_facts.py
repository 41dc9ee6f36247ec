"""Made-up facts in natural documents: each is told twice, and predicting the second time takes remembering the first.

Long documents alone teach retrieval slowly: few of their tokens need what stood thousands of tokens back. The facts
are made of the document's own words, and drawn by a hash of its text, so that they are the same each time it is read.
"""

from __future__ import annotations

import hashlib
import math
import random
import re
import uuid

VERSION = 3
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
)
"""How a fact is told, and how it is asked for; told again in the same words."""
THINGS = ("number", "code", "name", "address", "password", "date", "price", "word", "title", "identifier")
STATEMENTS = (
    "The {thing} of {key} is {value}.",
    "The {thing} for {key} is: {value}.",
    "{key} has the {thing} {value}.",
    "For {key} the {thing} {value} was chosen.",
    "One {thing} of {key}: {value}.",
    '"{key}": "{value}",',
)
QUESTIONS = (
    "What is the {thing} of {key}?",
    "Which {thing} does {key} have?",
    "Do you remember the {thing} for {key}?",
    "Tell me the {thing} of {key}, as it stands in the text.",
)
ANSWERS = (
    "The {thing} of {key} is {value}.",
    "The {thing} for {key} in the text is {value}.",
    "As told above, the {thing} of {key} is: {value}.",
    "It is {value}.",
    "{value}",
)
"""A fact about a thing that somebody or something has: told, asked for, and answered in words of their own, so that
finding it takes more than finding the words that stood before it."""
JOINTS = (" ", "\n")
"""Between a question and the fact that answers it."""
FEWEST_WORDS = 16
"""Different words of 4 to 9 letters that a document must have: facts are made of them."""
WORD = re.compile(r"\b[^\W\d_]{4,9}\b")


def with_facts(text: str, share: float = 1.0, questions: float = 0.0) -> str:
    """The text with facts and copied passages put in, or the text itself for all but this share of documents.

    One fact per 4000 characters, told twice at a log-uniform distance, and one passage per 16000 characters that comes
    again. Inserted at the ends of words, on lines of their own; nothing of the text is lost.

    Args:
        share: of all texts, chosen by a hash of the text.
        questions: share of the facts that are asked for where they are told again. The question names the key too, so
            the value is found only by looking past the nearest mention of its key; half of the answers are in words
            of their own.
    """
    draw = random.Random(hashlib.sha256(text.encode("utf-8", "replace")).digest())
    if draw.random() >= share or len(words := sorted(_words(text))) < FEWEST_WORDS:
        return text
    pieces: list[tuple[int, str]] = []
    for _ in range(max(1, len(text) // CHARACTERS_PER_FACT)):
        telling, question, answer = _fact(draw, words)
        first = draw.randrange(len(text))
        second = min(len(text), first + _distance(draw, len(text)))
        again = telling
        if questions and draw.random() < questions:
            again = f"{question}{draw.choice(JOINTS)}{answer}"
        pieces += [(first, f"\n{telling}\n"), (second, f"\n{again}\n")]
    for _ in range(len(text) // CHARACTERS_PER_COPY):
        start, length = draw.randrange(len(text)), draw.randint(100, 500)
        again = start + length + _distance(draw, len(text))
        pieces.append((min(len(text), again), "\n" + text[start : start + length] + "\n"))
    return _inserted(text, pieces)


def lacks_words(text: str) -> bool:
    """Whether a text has too few different words of 4 to 9 letters to make facts of."""
    return len(_words(text)) < FEWEST_WORDS


def _words(text: str) -> set[str]:
    return set(WORD.findall(text[:200_000]))


def code(draw: random.Random) -> str:
    """A made-up identifier, a UUID or groups of hexadecimal digits: 4 to 40 characters.

    It has no words to lean on, so copying it takes keeping one's place in it.
    """
    if draw.random() < 0.3:
        return str(uuid.UUID(int=draw.getrandbits(128)))
    groups = [f"{draw.getrandbits(4 * size):0{size}x}" for size in draw.choices((4, 6, 8, 12), k=draw.randint(1, 5))]
    text = draw.choice(("-", "-", "", "_")).join(groups)[:40]
    return text.upper() if draw.random() < 0.2 else text


def _fact(draw: random.Random, words: list[str]) -> tuple[str, str, str]:
    """(the fact, a question, its answer): of words mostly, with a number or a code in place of some."""
    key = " ".join(draw.choices(words, k=draw.randint(1, 2))) if draw.random() < 0.9 else code(draw)
    kind = draw.random()
    if kind < 0.3:
        value = str(draw.randint(10**3, 10**9))
    elif kind < 0.5:
        value = code(draw)
    else:
        value = " ".join(draw.choices(words, k=draw.randint(2, 8)))
    if draw.random() < 0.5:
        telling, question = draw.choice(TELLINGS)
        forms = telling, question, telling
    else:
        forms = draw.choice(STATEMENTS), draw.choice(QUESTIONS), draw.choice(ANSWERS)
    said = {"key": key, "value": value, "thing": draw.choice(THINGS)}
    telling, question, answer = (form.format(**said) for form in forms)
    return telling, question, answer


def _distance(draw: random.Random, length: int) -> int:
    return round(math.exp(draw.uniform(math.log(NEAREST), math.log(max(NEAREST, min(FARTHEST, length))))))


def _inserted(text: str, pieces: list[tuple[int, str]]) -> str:
    parts, done = [], 0
    for at, piece in sorted(pieces, key=lambda item: item[0]):
        space = re.compile(r"\s|(?<=[\u3001\u3002\uff01\uff0c\uff1b\uff1f])|$").search(text, max(at, done))
        stop = space.start() if space else len(text)
        parts += [text[done:stop], piece]
        done = stop
    return "".join([*parts, text[done:]])
