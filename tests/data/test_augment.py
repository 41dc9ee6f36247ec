"""Hard line breaks and another case, drawn for a share of the documents: the same ones each time."""

from __future__ import annotations

import itertools
import json

import pytest

from retrofox.config import Source
from retrofox.data.augment import recased, reflowed
from retrofox.data.packed import open_tokens
from retrofox.data.shards import prepare_sources

PROSE = "\n\n".join(" ".join(f"Word{n * 7 % 13}" for n in range(length)) + "." for length in (90, 3, 40))
CODE = "    total = " + " + ".join(f"value_{n}" for n in range(40))


def test_long_lines_are_broken_at_60_to_80_columns():
    lines = reflowed(PROSE, 1.0).split("\n")
    widest = max(map(len, lines))
    assert 60 - len("Word12") <= widest <= 80
    assert all(len(line) + 1 + len(following.split(" ")[0]) > widest for line, following in _neighbours(lines))


def _neighbours(lines: list[str]) -> list[tuple[str, str]]:
    return [(one, other) for one, other in itertools.pairwise(lines) if one and other]


def test_line_breaks_take_the_place_of_spaces_and_nothing_else_changes():
    assert reflowed(PROSE, 1.0).split() == PROSE.split()
    assert reflowed(PROSE, 1.0).count("\n\n") == PROSE.count("\n\n")


@pytest.mark.parametrize("text", [CODE, "short\nlines\n", reflowed(PROSE, 1.0), "x" * 500, ""])
def test_code_short_lines_and_words_without_spaces_stay_as_they_are(text):
    assert reflowed(text, 1.0) == text


def test_widths_differ_between_documents():
    assert len({max(map(len, reflowed(f"{n} {PROSE}", 1.0).split("\n"))) for n in range(50)}) > 5


@pytest.mark.parametrize("change", [reflowed, recased])
def test_the_share_of_documents_is_kept_and_the_same_each_time(change):
    texts = [f"{n} {PROSE}" for n in range(2000)]
    changed = [change(text, 0.25) for text in texts]
    assert sum(one != other for one, other in zip(texts, changed, strict=True)) / len(texts) == pytest.approx(
        0.25, abs=0.04
    )
    assert changed == [change(text, 0.25) for text in texts]
    assert change(PROSE, 0.0) == PROSE


def test_a_document_is_in_lower_or_in_upper_case_as_often():
    made = [recased(f"{n} {PROSE}", 1.0) for n in range(400)]
    assert sum(text.isupper() for text in made) == pytest.approx(200, abs=50)
    assert all(text.isupper() or text.islower() for text in made)


@pytest.mark.parametrize("options", [{"reflow": 1.0}, {"recase": 1.0}, {"fact_share": 1.0, "reflow": 1.0}])
def test_a_source_with_changes_has_other_tokens_and_another_shard(options, tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": PROSE}) + "\n")
    plain, changed = (
        prepare_sources([Source(path=str(tmp_path / "a.jsonl"), **given)], tokenizer, tmp_path / "out", progress=False)
        for given in ({}, options)
    )
    assert plain.sources[0].shards[0].key != changed.sources[0].shards[0].key
    one, other = (tokenizer.decode(open_tokens(each)[0].document(0)[:-1]) for each in (plain, changed))
    assert one == PROSE
    assert other != PROSE
    assert ("\n" in other.split("\n\n")[0]) == ("reflow" in options)
