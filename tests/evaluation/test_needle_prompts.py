"""What is hidden and asked: exact lengths, the needle in its place, prompts that differ, answers as tokens."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest

from retrofox.evaluation.needle_prompts import (
    MODES,
    EncodedTask,
    Haystack,
    Prompt,
    Task,
    make_prompts,
    make_task,
    read_haystack,
)

SENTENCES = "A fox crossed the field. Rain fell on the mill! Nobody came. Who would? "
LENGTH = 1200


@pytest.fixture(scope="module")
def hay(pico_tokenizer) -> Haystack:
    draw = random.Random(0)
    words = ("".join(draw.choice(x) for x in ("bdfgk", "aeiou", "lmnrst", "aeiou")) for _ in range(400))
    text = "".join(f"{SENTENCES}The {word} slept. " for word in words)
    return Haystack(pico_tokenizer, np.array(pico_tokenizer(text)["input_ids"], np.int32))


def test_a_text_shorter_than_a_prompt_is_repeated_and_said_to_be(pico_tokenizer, tmp_path, caplog):
    (tmp_path / "short.txt").write_text(SENTENCES)
    read_haystack(pico_tokenizer, [str(tmp_path / "short.txt")], 8, "text")
    assert not caplog.text
    assert len(read_haystack(pico_tokenizer, [str(tmp_path / "short.txt")], LENGTH, "text").token_ids) >= 2 * LENGTH
    assert f"prompts of {LENGTH} tokens repeat the texts" in caplog.text


def text_of(hay: Haystack, prompt: Prompt) -> str:
    return hay.tokenizer.decode(prompt.token_ids.tolist())


@pytest.mark.parametrize("mode", MODES)
def test_prompts_have_their_exact_length_their_needle_and_their_question_last(hay, mode):
    for prompt in make_prompts(hay, [mode], [LENGTH, LENGTH + 57], [0.0, 0.37, 1.0], 1, seed=3):
        assert len(prompt.token_ids) == prompt.length
        text = text_of(hay, prompt)
        assert text.endswith(prompt.task.question)
        assert text.count(prompt.task.needle.strip()) == 1
        assert hay.tokenizer.decode(prompt.answer) == prompt.task.answer


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("depth", [0.0, 0.37, 1.0])
def test_the_needle_stands_at_its_depth_after_a_sentence(hay, mode, depth):
    [prompt] = make_prompts(hay, [mode], [LENGTH], [depth], 1, seed=0)
    text, needle = text_of(hay, prompt), prompt.task.needle
    before = text.index(needle.strip())
    assert before / (len(text) - len(needle) - len(prompt.task.question)) == pytest.approx(depth, abs=0.1)
    if depth == 0.37:
        assert text[:before].rstrip().endswith((".", "!", "?"))


@pytest.mark.parametrize("mode", MODES)
def test_trials_differ_in_facts_questions_and_text(hay, mode):
    prompts = make_prompts(hay, [mode], [LENGTH], [0.5], 8, seed=0)
    assert len({prompt.task.answer for prompt in prompts}) == 8
    assert len({prompt.task.question for prompt in prompts}) == 8
    pieces = (prompt.task for prompt in prompts)
    texts = (text_of(hay, prompt) for prompt in prompts)
    stretches = {text.replace(t.needle, "").replace(t.question, "") for text, t in zip(texts, pieces, strict=True)}
    assert len(stretches) == 8


def test_the_seed_decides_facts_and_stretches(hay):
    one, same, other = (make_prompts(hay, MODES, [LENGTH], [0.5], 2, seed=seed) for seed in (1, 1, 2))
    assert [p.token_ids.tobytes() for p in one] == [p.token_ids.tobytes() for p in same]
    assert not {p.token_ids.tobytes() for p in one} & {p.token_ids.tobytes() for p in other}


def test_facts_are_the_same_at_every_length_and_differ_over_all_depths(hay):
    prompts = make_prompts(hay, ["easy"], [700, 900], [0.0, 0.5, 1.0], 30, seed=0)
    answers = [(p.task.city, p.task.answer) for p in prompts]
    assert answers[:90] == answers[90:]
    assert len(set(answers)) == 90


def test_easy_needles_hold_question_and_answer_and_standard_ones_only_the_statement():
    easy, standard = (make_task(mode, 0, "seed") for mode in MODES)
    assert easy.needle.startswith(easy.question)
    assert f"do in {standard.city}?" not in standard.needle
    assert f"do in {standard.city}?" in standard.question
    for task in (easy, standard):
        assert task.answer in task.needle
        assert task.answer not in task.question


@pytest.mark.parametrize("mode", MODES)
def test_the_shortest_length_that_is_named_is_the_shortest(hay, mode):
    with pytest.raises(ValueError, match=f"50 tokens can't hold needle and question of mode {mode}") as e:
        make_prompts(hay, [mode], [4000, 50], [0.5], 3, seed=0)
    least = int(re.search(r"at least (\d+)", str(e.value)).group(1))  # type: ignore[union-attr]
    assert [p.length for p in make_prompts(hay, [mode], [least], [0.5], 3, seed=0)] == [least] * 3
    with pytest.raises(ValueError, match=f"at least {least}"):
        make_prompts(hay, [mode], [least - 1], [0.5], 3, seed=0)


class Joining:
    """A tokenizer of characters that joins "is 7" and "9." to one token each, as some join what stands at a border."""

    all_special_ids: tuple[int, ...] = ()

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, Any]:
        return {"input_ids": [ord(c) for c in text.replace("is 7", "\u0101").replace("9.", "\u0102")]}


def test_a_token_that_holds_a_piece_of_the_answer_belongs_to_it():
    encoded = EncodedTask(Haystack(Joining(), np.zeros(0, np.int32)), Task("easy", "x", "", "it is", " 789"))
    assert "".join(map(chr, encoded.question)) == "it "
    assert "".join(map(chr, encoded.answer)) == "\u01018\u0102"
