"""Needle in a haystack: prompts of the exact length, the needle where it should be, a grid that counts right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import retrofox.evaluation.needle as module
from retrofox.evaluation.needle import Needle, found, make_prompt, needle

SENTENCES = "A fox crossed the field. Rain fell on the mill! Nobody came. Who would? "


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([SENTENCES * 4, Needle("Cairo", module.ACTS[0]).hidden("easy")], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")


@pytest.fixture(scope="module")
def haystack(tmp_path_factory) -> list[str]:
    path = tmp_path_factory.mktemp("hay") / "hay.txt"
    path.write_text(SENTENCES * 40, encoding="utf-8")
    return [str(path)]


@pytest.fixture(scope="module")
def llama(pico_llama) -> Any:
    return pico_llama(vocab_size=400, max_position_embeddings=4096)


@pytest.mark.parametrize("mode", ["easy", "standard"])
@pytest.mark.parametrize("depth", [0.0, 0.37, 1.0])
def test_a_prompt_has_its_exact_length_and_the_needle_at_its_depth_after_a_sentence(tokenizer, mode, depth):
    hay = tokenizer(SENTENCES * 60, add_special_tokens=False)["input_ids"]
    prompt = make_prompt(tokenizer, hay, 700, depth, mode, "seed")
    assert len(prompt.token_ids) == 700
    text = tokenizer.decode(prompt.token_ids)
    hidden, asked = prompt.fact.hidden(mode), prompt.fact.asked(mode)
    assert text.count(hidden.strip()) == 1
    assert text.endswith(asked)
    before = text.index(hidden.strip())
    room = len(text) - len(hidden) - len(asked)
    assert before / room == pytest.approx(depth, abs=0.1)
    if depth == 0.37:
        assert text[:before].rstrip().endswith((".", "!", "?"))


def test_easy_needles_hold_question_and_answer_and_standard_ones_only_the_statement():
    fact = Needle("Lisbon", "count the red boats")
    assert fact.question in fact.hidden("easy")
    assert fact.hidden("easy").strip().startswith(fact.asked("easy").strip())
    assert fact.question not in fact.hidden("standard")
    assert fact.act in fact.hidden("standard")
    assert fact.question in fact.asked("standard")
    assert fact.act not in fact.asked("standard")


def test_an_answer_is_matched_by_its_words():
    fact = Needle("Lisbon", "count the red boats")
    assert found(" Count  the red boats, then sleep.", fact)
    assert not found("count the boats", fact)
    assert not found("you should count the red boats", fact)
    assert not found("", fact)


def test_the_seed_decides_facts_and_stretches(tokenizer):
    hay = tokenizer(SENTENCES * 60, add_special_tokens=False)["input_ids"]
    one, same, other = (make_prompt(tokenizer, hay, 500, 0.5, "easy", seed) for seed in ("a", "a", "b"))
    assert one.token_ids == same.token_ids
    assert one.token_ids != other.token_ids


def test_the_grid_counts_exact_matches_and_the_files_hold_it(tokenizer, haystack, llama, tmp_path, monkeypatch):
    def answer(opened, token_ids, max_new_tokens):
        """A model that reads only the last 400 tokens, and those perfectly."""
        answers = []
        for ids in token_ids:
            seen = tokenizer.decode(ids[-400:])
            act = next((act for act in module.ACTS if f"is to {act}" in seen), "do nothing")
            answers.append(tokenizer(" " + act, add_special_tokens=False)["input_ids"][:max_new_tokens])
        return answers

    monkeypatch.setattr(module, "complete", answer)
    result = needle(
        llama, llama, haystack, [380, 1200], [0.0, 1.0], "easy", tmp_path, tokenizer=tokenizer, trials=3, progress=False
    )
    assert [values["found"] for values in result["models"].values()] == [[[1.0, 0.0], [1.0, 1.0]]] * 2
    assert len(result["answers"]) == 2 * 2 * 2 * 3
    written = json.loads((tmp_path / "needle.json").read_text())
    assert written["models"] == result["models"]
    for kind in ("model", "base"):
        assert Path(result["files"][f"{kind}_png"]).read_bytes().startswith(b"\x89PNG")


def test_needle_runs_a_model_in_batches(tokenizer, haystack, llama):
    together = needle(llama, None, haystack, [300, 400], 3, tokenizer=tokenizer, batch=4, trials=1, progress=False)
    alone = needle(llama, None, haystack, [300, 400], 3, tokenizer=tokenizer, batch=1, trials=1, progress=False)
    assert [a["answer"] for a in together["answers"]] == [a["answer"] for a in alone["answers"]]
    assert together["depths"] == [0.0, 0.5, 1.0]


def test_refusals(tokenizer, haystack, llama):
    for options, message in (
        ({"mode": "hard"}, "mode must be one of easy, standard"),
        ({"lengths": [0]}, "lengths"),
        ({"lengths": [10**30]}, "lengths"),
        ({"depths": -1}, "depths must be at least 1"),
        ({"depths": [1.5]}, "depths"),
        ({"trials": 0}, "trials"),
        ({"data": []}, "haystack"),
        ({"lengths": [40]}, "can't hold needle and question"),
    ):
        with pytest.raises(ValueError, match=message):
            needle(llama, **{"data": haystack, "tokenizer": tokenizer, "progress": False, **options})
    with pytest.raises(FileNotFoundError, match="nowhere"):
        needle(llama, None, ["nowhere.txt"], tokenizer=tokenizer)


def test_models_with_other_tokenizers_are_not_compared(tokenizer, haystack, llama, pico_checkpoint):
    with pytest.raises(ValueError, match="tokenizer mismatch"):
        needle(llama, pico_checkpoint, haystack, [300], tokenizer=tokenizer, progress=False)
