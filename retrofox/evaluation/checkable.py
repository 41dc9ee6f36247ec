"""Instructions whose answers a program can check, as in IFEval (arXiv 2311.07911), each on a dozen topics."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

Check = Callable[[str], bool]


def _json_object(answer: str) -> bool:
    found = re.search(r"\{.*\}", answer, re.S)
    try:
        return found is not None and {"name", "use"} <= set(json.loads(found[0]))
    except ValueError:
        return False


def _words(answer: str) -> int:
    return len(re.findall(r"[\w'-]+", answer))


def _cased(letters: Callable[[str], bool]) -> Check:
    return lambda answer: any(c.isalpha() for c in answer) and letters(answer)


INSTRUCTIONS: tuple[tuple[str, Check], ...] = (
    ("Write one sentence about {}. Use capital letters only.", _cased(str.isupper)),
    ("Write one sentence about {}. Use lowercase letters only.", _cased(str.islower)),
    (
        "Name exactly three facts about {}, each on a line of its own that begins with '- '.",
        lambda answer: len(re.findall(r"^\s*- \S", answer, re.M)) == 3,
    ),
    (
        "List five words that belong to {}, numbered 1. to 5.",
        lambda answer: re.findall(r"^\s*(\d+)[.)] ", answer, re.M) == list("12345"),
    ),
    ("Describe {} in at most ten words.", lambda answer: 0 < _words(answer) <= 10),
    ("Write at least forty words about {}.", lambda answer: _words(answer) >= 40),
    ("Write two sentences about {} without a comma.", lambda answer: _words(answer) > 3 and "," not in answer),
    (
        "Write a sentence about {} that begins with the words 'Long ago'.",
        lambda answer: re.match(r"\W*Long ago\b", answer) is not None,
    ),
    (
        "Write a sentence about {} that ends with a question mark.",
        lambda answer: answer.rstrip(" \n\"'").endswith("?"),
    ),
    ("Write a JSON object about {} with the keys name and use, and nothing else.", _json_object),
    (
        "Give a title to a story about {}. Put the title in double angular brackets, such as <<title>>.",
        lambda answer: re.search(r"<<[^<>\n]+>>", answer) is not None,
    ),
    (
        "Write a sentence about {} that contains the words 'river' and 'winter'.",
        lambda answer: all(re.search(rf"\b{word}\b", answer, re.I) for word in ("river", "winter")),
    ),
)
TOPICS = (
    *("horses", "bridges", "tea", "the Moon", "trains", "cheese", "music", "rain", "libraries", "clocks", "forests"),
    "football",
)


def checkable_prompts() -> list[tuple[str, Check]]:
    """(prompt, check of its answer): every instruction on every topic, neighbours of different instructions."""
    return [(text.format(topic), check) for topic in TOPICS for text, check in INSTRUCTIONS]
