"""What is hidden and asked in each mode: exact lengths, the needles in their places, prompts that differ."""

from __future__ import annotations

import random
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest

from retrofox.evaluation.needles import word_lists
from retrofox.evaluation.needles.haystack import Haystack
from retrofox.evaluation.needles.prompts import Prompt, encode_task, make_prompts
from retrofox.evaluation.needles.tasks import MODES, PLACED, Part, Task, make_task

SENTENCES = "A fox crossed the field. Rain fell on the mill! Nobody came. Who would? "
LENGTH = 2600


def made_up_words(count: int) -> list[str]:
    """Different words of four letters."""
    draw = random.Random(0)
    words = [
        "".join(draw.choice(letters) for letters in ("bdfgk", "aeiou", "lmnrst", "aeiou")) for _ in range(9 * count)
    ]
    return list(dict.fromkeys(words))[:count]


@pytest.fixture(scope="module")
def hay(pico_tokenizer) -> Haystack:
    text = "".join(f"{SENTENCES}The {word} slept. " for word in made_up_words(200))
    return Haystack(pico_tokenizer, np.array(pico_tokenizer(text)["input_ids"], np.int32))


def text_of(hay: Haystack, prompt: Prompt) -> str:
    return hay.tokenizer.decode(prompt.token_ids.tolist())


def after(hay: Haystack, prompt: Prompt) -> list[tuple[str, str]]:
    """What should follow, as text: (given, answer) of each value."""
    return [(hay.tokenizer.decode(v.given), hay.tokenizer.decode(v.answer)) for v in prompt.values]


@pytest.mark.parametrize("mode", MODES)
def test_prompts_have_their_exact_length_their_needles_and_their_question_last(hay, mode):
    for prompt in make_prompts(hay, [mode], [LENGTH, LENGTH + 57], [0.0, 0.37, 1.0], 1, seed=3):
        assert len(prompt.token_ids) == prompt.length
        text = text_of(hay, prompt)
        assert text.endswith(prompt.task.question)
        places = [text.index(needle.strip()) for needle in prompt.task.needles]
        assert all(text.count(needle.strip()) == 1 for needle in prompt.task.needles)
        if mode not in PLACED:
            assert prompt.depth is None
            assert places == sorted(places)
        assert after(hay, prompt) == [(part.given, part.answer) for part in prompt.task.parts]


@pytest.mark.parametrize("mode", PLACED)
@pytest.mark.parametrize("depth", [0.0, 0.37, 1.0])
def test_the_needle_stands_at_its_depth_after_a_sentence(hay, mode, depth):
    [prompt] = make_prompts(hay, [mode], [LENGTH], [depth], 1, seed=0)
    text, needle = text_of(hay, prompt), prompt.task.needles[0]
    before = text.index(needle.strip())
    assert before / (len(text) - len(needle) - len(prompt.task.question)) == pytest.approx(depth, abs=0.1)
    if depth == 0.37:
        assert text[:before].rstrip().endswith((".", "!", "?"))


@pytest.mark.parametrize("mode", MODES)
def test_trials_differ_in_facts_questions_and_text(hay, mode):
    prompts = make_prompts(hay, [mode], [LENGTH], [0.5], 8, seed=0)
    assert len(prompts) == 8
    assert len({prompt.token_ids.tobytes() for prompt in prompts}) == 8
    assert len({prompt.task.answer for prompt in prompts}) == 8
    stretches = set()
    for prompt in prompts:
        text = text_of(hay, prompt)
        for piece in (*prompt.task.needles, prompt.task.question):
            text = text.replace(piece, "")
        stretches.add(text)
    assert len(stretches) == 8
    if mode != "common-words":  # whose question is always the same
        assert len({prompt.task.question for prompt in prompts}) == 8


def test_the_seed_decides_facts_and_stretches(hay):
    one, same, other = (make_prompts(hay, MODES, [LENGTH], [0.5], 2, seed=seed) for seed in (1, 1, 2))
    assert [p.token_ids.tobytes() for p in one] == [p.token_ids.tobytes() for p in same]
    assert not {p.token_ids.tobytes() for p in one} & {p.token_ids.tobytes() for p in other}


def test_facts_are_the_same_at_every_length_and_differ_over_all_depths(hay):
    prompts = make_prompts(hay, ["easy"], [700, 900], [0.0, 0.5, 1.0], 30, seed=0)
    answers = [(p.task.subject, p.task.answer) for p in prompts]
    assert answers[:90] == answers[90:]
    assert len(set(answers)) == 90


def test_easy_needles_hold_question_and_answer_and_standard_ones_only_the_statement():
    easy, standard = (make_task(mode, 0, "seed") for mode in ("easy", "standard"))
    asked = f"What is the best thing to do in {easy.subject}?"
    assert asked in easy.needles[0]
    assert easy.needles[0].startswith(easy.question)
    assert f"do in {standard.subject}?" not in standard.needles[0]
    assert f"do in {standard.subject}?" in standard.question
    for task in (easy, standard):
        assert task.answer in task.needles[0]
        assert task.answer not in task.question


def test_multi_key_asks_for_one_of_four_numbers():
    task = make_task("multi-key", 5, "seed")
    matches = [re.fullmatch(r"\nThe secret number of the (.*) is (\d{7})\.\n", needle) for needle in task.needles]
    pairs = {match[1]: match[2] for match in matches if match}
    assert len(pairs) == len(set(pairs.values())) == 4
    assert task.question.endswith(f"The secret number of the {task.subject} is")
    assert [part.answer for part in task.parts] == [f" {pairs[task.subject]}"]


def test_multi_value_asks_for_all_numbers_of_one_thing_in_order():
    task = make_task("multi-value", 5, "seed")
    values = [re.search(rf"of the {task.subject} is (\d{{7}})\.", needle).group(1) for needle in task.needles]  # type: ignore[union-attr]
    assert len(set(values)) == 4
    assert task.answer == ", ".join(values)
    assert [part.given for part in task.parts] == ["", ",", ",", ","]


def test_multi_query_asks_for_four_numbers_and_names_their_things():
    task = make_task("multi-query", 5, "seed")
    answer = "The secret number of the " + task.question.rpartition("The secret number of the ")[2]
    answer += "".join(part.given + part.answer for part in task.parts) + "."
    assert {f"\n{sentence}.\n" for sentence in answer.rstrip(".").split(". ")} == set(task.needles)
    asked = re.search(r"numbers of (.*)\?", task.question).group(1)  # type: ignore[union-attr]
    assert re.split(r", | and ", asked) == [f"the {thing}" for thing in task.subject.split(", ")]


def test_variable_tracking_asks_for_the_chain_of_a_value_and_hides_a_second_one():
    task = make_task("variable-tracking", 5, "seed")
    holds: dict[str, str] = {}
    for needle in task.needles:
        name, value = re.fullmatch(r"\nVAR ([A-Z]{5}) = (?:VAR )?(\w{5})\n", needle).groups()  # type: ignore[union-attr]
        holds[name] = holds.get(value, value)  # a variable is assigned before it is read
    assert Counter(holds.values())[task.subject] == 5
    assert len(holds) == 10
    assert len(set(holds.values())) == 2
    assert task.answer == ", ".join(name for name, value in holds.items() if value == task.subject)


def test_common_words_are_those_that_the_list_holds_most_often(hay):
    for prompt in make_prompts(hay, ["common-words"], [LENGTH, 3400], [0.5], 2, seed=0):
        words = text_of(hay, prompt).partition("List of words: ")[2].removesuffix(prompt.task.question).split(" ")
        counts = Counter(words)
        common = [word for word in counts if counts[word] == word_lists.COMMON_TIMES]
        assert len(common) == word_lists.COMMON
        assert prompt.task.answer == ", ".join(common)  # a Counter keeps the order of first occurrence
        assert set(counts.values()) == {word_lists.COMMON_TIMES, word_lists.OTHER_TIMES}
        listed = len(hay.encode(" ".join(words))) + len(hay.encode(prompt.task.question))
        assert prompt.length - listed < 60  # the list fills the prompt
    assert len(counts) > 40


@pytest.mark.parametrize("mode", MODES)
def test_the_shortest_length_that_is_named_is_the_shortest(hay, mode):
    with pytest.raises(
        ValueError, match=rf"50 tokens can't hold needle and question of mode {mode}: .* at least (\d+)"
    ) as e:
        make_prompts(hay, [mode], [4000, 50], [0.5], 3, seed=0)
    least = int(re.search(r"at least (\d+)", str(e.value)).group(1))  # type: ignore[union-attr]
    assert [p.length for p in make_prompts(hay, [mode], [least], [0.5], 3, seed=0)] == [least] * 3
    with pytest.raises(ValueError, match=f"at least {least}"):
        make_prompts(hay, [mode], [least - 1], [0.5], 3, seed=0)


def test_of_all_modes_the_shortest_length_that_works_is_named_at_once(hay):
    least = {}
    for mode in MODES:
        with pytest.raises(ValueError, match="at least") as refused:
            make_prompts(hay, [mode], [50], [0.5], 3, seed=0)
        least[mode] = int(str(refused.value).split()[-1])
    each = ", ".join(f"{mode} {least[mode]}" for mode in MODES)
    with pytest.raises(ValueError, match=re.escape(f"at least {max(least.values())} ({each})")):
        make_prompts(hay, MODES, [50, 4000], [0.5], 3, seed=0)
    enough = [max(least.values())]
    assert len(make_prompts(hay, MODES, enough, [0.5], 3, seed=0)) == 3 * len(MODES)


def test_a_haystack_of_few_words_can_set_no_word_list(pico_tokenizer):
    few = Haystack(pico_tokenizer, np.array(pico_tokenizer(SENTENCES * 200)["input_ids"], np.int32))
    with pytest.raises(ValueError, match=r"at least 20 different words .* this one has"):
        make_prompts(few, ["common-words"], [LENGTH], [0.5], 1, seed=0)
    text = " ".join(made_up_words(21)) + ". "
    few = Haystack(pico_tokenizer, np.array(pico_tokenizer(text * 400)["input_ids"], np.int32))
    with pytest.raises(ValueError, match=r"21 different words .* too few for a list of"):
        make_prompts(few, ["common-words"], [12000], [0.5], 1, seed=0)


class Joining:
    """A tokenizer of characters that joins "is 7" and "9." to one token each, as some join what stands at a border."""

    all_special_ids: tuple[int, ...] = ()

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, Any]:
        return {
            "input_ids": [
                ord(c) for c in text.replace("is 7", "\u0101").replace("9.", "\u0102").replace("9,", "\u0103")
            ]
        }


def test_a_token_that_holds_a_piece_of_a_value_belongs_to_it():
    hay = Haystack(Joining(), np.zeros(0, np.int32))
    task = Task("multi-value", "x", (), "it is", (Part("", " 79"), Part(",", " 89")))
    encoded = encode_task(hay, task)
    assert "".join(map(chr, encoded.question)) == "it "
    first, second = encoded.values
    assert (first.given, "".join(map(chr, first.answer))) == ([], "\u0101\u0103")
    assert (second.given, "".join(map(chr, second.answer))) == ([], " 8\u0102")
