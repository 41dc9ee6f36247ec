"""Made-up facts put into documents: told twice, repeatable, and nothing of the text is lost."""

from __future__ import annotations

import hashlib
import itertools
import random
import re
from collections import Counter
from pathlib import Path

import numpy as np

from retrofox.config import Source
from retrofox.data.packed import open_tokens
from retrofox.data.shards import prepare_sources
from retrofox.data.synthetic_facts import ANSWERS, QUESTIONS, STATEMENTS, TELLINGS, VERSION, with_facts
from retrofox.data.windows import documents
from tests.data.conftest import held

PHRASE = """grey fox walked over seven frozen rivers towards northern light house while winter winds were calling under
silent stars beyond distant hills and harbour lamps"""
WORDS = PHRASE.split()
LINES = (" ".join(WORDS[(7 * n + k) % len(WORDS)] for k in range(12)) + f" {n}" for n in range(400))
TEXT = "\n".join(LINES)


def told(text: str) -> Counter[str]:
    """Lines that the plain text lacks, with how often they stand in the other."""
    plain = set(TEXT.split("\n"))
    return Counter(line for line in text.split("\n") if line and line not in plain and not line.startswith(" "))


def test_every_fact_is_told_twice_and_no_word_is_lost():
    changed = with_facts(TEXT)
    facts = {line: count for line, count in told(changed).items() if line.endswith((".", ";")) and count == 2}
    assert len(facts) >= len(TEXT) // 4000 - 1
    assert len(changed) > len(TEXT)
    kept, words = iter(changed.split()), TEXT.split()
    assert all(word in kept for word in words)  # in order


def test_facts_are_the_same_each_time_and_the_share_is_kept():
    assert with_facts(TEXT) == with_facts(TEXT)
    texts = [f"{n} {TEXT}" for n in range(200)]
    changed = sum(with_facts(text, 0.3) != text for text in texts)
    assert 40 <= changed <= 80
    assert with_facts(TEXT, 0.0) == TEXT


def test_short_and_wordless_texts_stay_as_they_are():
    assert with_facts("") == ""
    assert with_facts("1 2 3 4 5") == "1 2 3 4 5"


def test_facts_stand_apart_in_a_text_without_spaces():
    draw = random.Random(0)
    text = "".join(chr(draw.randint(0x4E00, 0x9FFF)) + "\uff0c" * (n % 6 == 5) for n in range(40_000))
    lines = with_facts(text).split("\n")
    assert "".join(lines[::2]) == text
    assert len(lines[0]) < len(text) / 2


def test_a_source_with_facts_gives_other_tokens_and_another_shard(tmp_path: Path, pico_tokenizer):
    (tmp_path / "a.txt").write_text(TEXT)
    shares = ((0.0, 0.0), (1.0, 0.0), (1.0, 0.5), (1.0, 1.0))
    sources = [Source(path=str(tmp_path / "a.txt"), fact_share=facts, questions=asked) for facts, asked in shares]
    found = [next(iter(documents([source], pico_tokenizer)))[1] for source in sources]
    assert len(found[1]) > len(found[0])
    assert not np.array_equal(found[0], found[1][: len(found[0])])
    made = [prepare_sources([source], pico_tokenizer, tmp_path / "cache", progress=False) for source in sources]
    assert len({manifest.sources[0].shards[0].key for manifest in made}) == 4
    for manifest, tokens in zip(made, found, strict=True):
        assert np.array_equal(held(open_tokens(manifest)[0])[0], tokens)


def test_a_question_names_the_key_and_comes_right_before_the_second_telling():
    plain, asked = with_facts(TEXT), with_facts(TEXT, questions=1.0)
    forms = [(fact, question, fact) for fact, question in TELLINGS if question.split("{key}")[0] != "And "]
    forms += itertools.product(STATEMENTS, QUESTIONS, ANSWERS)
    values = set()
    for question in {form[1] for form in forms}:
        assert not re.search(_pattern(question), plain)
        for found in re.finditer(_pattern(question), asked):
            said = found.groupdict()
            before, after = asked[: found.start()], asked[found.end() :].lstrip(" \n")
            answers = [(fact, re.match(_pattern(answer, said), after)) for fact, of, answer in forms if of == question]
            told = [match["value"] for fact, match in answers if match and _told(before, fact, said, match["value"])]
            assert told
            values.add(told[0])
    assert len(values) >= 4


def _pattern(form: str, said: dict[str, str] | None = None) -> str:
    """A regular expression of a form; what `said` has of key and thing is as it says."""
    parts = {"key": r"(?P<key>[\w-]+(?: [\w-]+)?)", "thing": r"(?P<thing>\w+)", "value": r"(?P<value>[\w-]+(?: \w+)*)"}
    parts |= {name: re.escape(text) for name, text in (said or {}).items()}
    return re.escape(form).replace(r"\{", "{").replace(r"\}", "}").format(**parts)


def _told(before: str, fact: str, said: dict[str, str], value: str) -> bool:
    return fact.format(**said, value=value) in before


def test_facts_change_only_with_their_version():
    """Shards are kept by it: other facts under the same number would never be made."""
    digest = hashlib.sha256(with_facts(TEXT, questions=0.5).encode()).hexdigest()
    assert (VERSION, digest[:16]) == (3, "acd805993ff3218c")


def test_a_share_of_the_facts_is_asked_for():
    texts = [f"{n} {TEXT}" for n in range(40)]
    total = sum(with_facts(text).count("belongs with") for text in texts) // 2
    asked = sum(with_facts(text, questions=0.5).count("With what does") for text in texts)
    assert 0.25 * total < asked < 0.75 * total
