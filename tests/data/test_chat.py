"""Conversations as training data: the tokenizer's template, the assistant's words learnt and no others, no leaks."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from retrofox.config import Recipe, Source
from retrofox.data.chat import ChatEncoder
from retrofox.data.packed import IGNORE, PackedDataset, collate, open_tokens
from retrofox.data.shards import prepare_sources
from retrofox.training.trainer import FoxTrainer
from tests.data.conftest import held

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think></think>"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_END = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
BACKWARDS = "{% for m in messages | reverse %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def chat_tokenizer(make_tokenizer):
    """chat_tokenizer(template) -> one with that template and <|im_start|>, <|im_end|> and </s> as special tokens."""

    def make(template: str | None) -> Any:
        tokenizer = make_tokenizer()
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        tokenizer.chat_template = template
        return tokenizer

    return make


def said(*words: str, system: str | None = None) -> list[dict[str, str]]:
    """A user and an assistant in turns."""
    turns = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(words)]
    return [{"role": "system", "content": system}, *turns] if system else turns


def learnt(tokenizer, messages) -> list[str]:
    """Stretches of the text that are learnt."""
    ids, marks = ChatEncoder(tokenizer)(messages, "a.jsonl:1")
    assert len(ids) == len(marks)
    runs: list[list[int]] = []
    for number, (token, mark) in enumerate(zip(ids, marks, strict=True)):
        if mark and (not number or not marks[number - 1]):
            runs.append([])
        if mark:
            runs[-1].append(token)
    return [tokenizer.decode(run) for run in runs]


TALK = said("the fox?", "it forgets", "and the gate?", "it lets go", system="keep the key")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ["it forgets<|im_end|>", "it lets go<|im_end|>"]),
        (LLAMA2, [" it forgets</s>", " it lets go</s>"]),
        (THINKING, ["it forgets<|im_end|>", "<think></think>it lets go<|im_end|>"]),
        (NO_END, [" it forgets", " it lets go", "</s>"]),
    ],
)
def test_the_assistants_turns_are_learnt_with_their_end_and_nothing_else(template, expected, chat_tokenizer):
    messages = TALK[1:] if template == LLAMA2 else TALK
    assert learnt(chat_tokenizer(template), messages) == expected


@pytest.mark.parametrize("template", [CHATML, LLAMA2, THINKING])
def test_the_tokens_are_those_of_the_template(template, chat_tokenizer):
    tokenizer, messages = chat_tokenizer(template), TALK[1:]
    ids, _ = ChatEncoder(tokenizer)(messages, "a.jsonl:1")
    assert ids == tokenizer.apply_chat_template(messages, tokenize=True)["input_ids"]


def test_special_tokens_in_a_message_are_plain_text(chat_tokenizer):
    tokenizer = chat_tokenizer(CHATML)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    messages = said("say <|im_end|>", "here: <|im_end|> and </s>, done")
    ids, _ = ChatEncoder(tokenizer)(messages, "a.jsonl:1")
    assert ids.count(end) == 2
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(messages, tokenize=False)
    assert learnt(tokenizer, messages) == ["here: <|im_end|> and </s>, done<|im_end|>"]
    assert ChatEncoder(tokenizer, split_special_tokens=False)(messages, "a.jsonl:1")[0].count(end) == 4


def test_marks_of_the_encoder_and_lone_surrogates_in_a_message_are_plain_text(chat_tokenizer):
    tokenizer, mark = chat_tokenizer(CHATML), "\U000f00000\U000f0001"
    messages = said(f"say <|im_end|> {mark}", f"{mark}, \ud800 <|im_end|> \U000f00009\U000f0001")
    assert learnt(tokenizer, messages) == [f"{mark}, \ufffd <|im_end|> \U000f00009\U000f0001<|im_end|>"]


def test_an_assistant_who_speaks_first_is_read_and_not_learnt(chat_tokenizer):
    messages = [{"role": "assistant", "content": "hello"}, *said("the fox?", "it forgets")]
    assert learnt(chat_tokenizer(CHATML), messages) == ["it forgets<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (BACKWARDS, r"a\.jsonl:1: the chat template writes message \d otherwise when more follow"),
        ("{{ raise_exception('no') }}", r"a\.jsonl:1: the chat template refuses these messages: no"),
        (None, r"no chat template: set data\.tokenizer to that of an Instruct model"),
    ],
)
def test_templates_that_can_not_be_learnt_from_are_refused(template, why, chat_tokenizer):
    with pytest.raises(ValueError, match=why):
        ChatEncoder(chat_tokenizer(template))(TALK, "a.jsonl:1")


def test_a_message_that_is_no_text_is_refused_where_the_template_would_spell_it_out(chat_tokenizer):
    content = [{"type": "text", "text": "it forgets"}]
    talk: list[dict[str, Any]] = [*said("the fox?"), {"role": "assistant", "content": content}]
    with pytest.raises(ValueError, match=r"a\.jsonl:1: .* as Python writes it, in message 2: make it text"):
        ChatEncoder(chat_tokenizer(CHATML))(talk, "a.jsonl:1")
    reads = CHATML.replace("m.content }}", "m.content if m.content is string else 'well' }}")
    assert learnt(chat_tokenizer(reads), talk) == ["well<|im_end|>"]


def test_tool_calls_that_the_template_leaves_out_are_refused(chat_tokenizer):
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "hunt", "arguments": {}}}]}
    talk: list[dict[str, Any]] = [*said("the fox?"), call]
    silent = CHATML.replace("m.content }}", "m.content or '' }}")
    with pytest.raises(ValueError, match=r"a\.jsonl:1: the chat template leaves out the tool_calls of message 2"):
        ChatEncoder(chat_tokenizer(silent))(talk, "a.jsonl:1")
    writes = CHATML.replace("m.content }}", "m.content or (m.tool_calls[0].function.name if m.tool_calls else '') }}")
    assert learnt(chat_tokenizer(writes), talk) == ["hunt<|im_end|>"]
    needs = "{% for m in messages[1:] if not m.tool_calls %}{{ raise_exception('no call') }}{% endfor %}"
    assert learnt(chat_tokenizer(needs + writes), talk) == ["hunt<|im_end|>"]


TALKS = [said(f"{n} the fox?", f"{n} forgets " * (n % 5 + 1), "and?", "goes") for n in range(30)]


def write(talks: list[Any], path: Path, field: str = "messages") -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({field: talk, "id": 1}) + "\n" for talk in talks))
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({field: talks}), path)
    return path


@pytest.fixture
def talks(tmp_path, chat_tokenizer):
    """talks(name="a.jsonl", field="messages", template=CHATML) -> the manifest of TALKS written there."""

    def prepare(name: str = "a.jsonl", field: str = "messages", template: str = CHATML) -> Any:
        file = write(TALKS, tmp_path / name, field)
        named = None if field == "messages" else field
        source = Source(path=str(file), text_field=named, chat=True)
        return prepare_sources([source], chat_tokenizer(template), tmp_path / "out", progress=False)

    return prepare


@pytest.mark.parametrize(("name", "field"), [("a.jsonl", "messages"), ("a.parquet", "messages"), ("a.jsonl", "turns")])
def test_conversations_come_from_json_lines_and_parquet(name, field, talks, chat_tokenizer):
    (tokens,) = open_tokens(talks(name, field))
    encode = ChatEncoder(chat_tokenizer(CHATML))
    assert len(held(tokens)) == len(TALKS)
    for number, talk in enumerate(TALKS):
        ids, marks = encode(talk, "")
        start = int(tokens.bounds[number])
        assert held(tokens)[number] == ids
        assert np.array_equal(tokens.slice(start, len(ids))[1], marks)  # type: ignore[arg-type]


def test_windows_learn_the_assistants_tokens_and_no_others(talks, chat_tokenizer):
    dataset = PackedDataset(talks(), sequence_length=128)
    learnt_here = [
        int(label) for number in range(len(dataset)) for label in dataset[number]["labels"] if label != IGNORE
    ]
    encode = ChatEncoder(chat_tokenizer(CHATML))
    expected = [token for talk in TALKS for token, mark in zip(*encode(talk, ""), strict=True) if mark]
    assert sorted(learnt_here) == sorted(expected)


def test_packed_conversations_do_not_see_each_other(talks, pico_llama):
    import retrofox
    from retrofox.fox_spec import FoxSpec

    model = retrofox.convert(pico_llama(vocab_size=512), fox=FoxSpec(rope="keep", init="open")).eval()
    dataset = PackedDataset(talks(), sequence_length=256)
    number = next(n for n in range(len(dataset)) if len(dataset[n]["doc_lengths"]) > 2)
    batch = collate([dataset[number]])
    batch.pop("labels")
    first = int(dataset[number]["doc_lengths"][0])
    other = {**batch, "input_ids": batch["input_ids"].clone()}
    other["input_ids"][:, :first] = 7
    with torch.no_grad():
        one, two = (model(**each).logits for each in (batch, other))
    assert not torch.allclose(one[:, :first], two[:, :first])
    torch.testing.assert_close(one[:, first:], two[:, first:], atol=0, rtol=0)


def test_another_template_makes_another_shard(talks):
    keys = {talks(template=template).sources[0].shards[0].key for template in (CHATML, THINKING)}
    assert len(keys) == 2


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ('{"messages": "hello"}', r"a\.jsonl:1: field 'messages' must hold a list of {role, content}, got 'hello'"),
        ('{"messages": [{"from": "human"}]}', "must hold a list of {role, content}"),
        ('{"messages": [], "tools": [{"type": "function"}]}', r"a\.jsonl:1: has `tools`"),
        ('{"messages": ["hello"]}', "must hold a list of {role, content}"),
        ('{"text": "hello"}', "no field 'messages'; the record has 'text': set text_field"),
        (
            '{"messages": [{"role": "user", "content": "hello"}]}',
            r"no turn of an assistant in it \(empty documents: 1\)",
        ),
        ('{"messages": null}', r"no turn of an assistant in it \(empty documents: 1\)"),
    ],
)
def test_records_that_hold_no_conversation_are_named(content, why, tmp_path, chat_tokenizer):
    (tmp_path / "a.jsonl").write_text(content + "\n")
    source = Source(path=str(tmp_path / "a.jsonl"), chat=True)
    with pytest.raises(ValueError, match=why):
        prepare_sources([source], chat_tokenizer(CHATML), tmp_path / "out", progress=False)


def test_a_recipe_mixes_conversations_and_refuses_changes_of_them():
    recipe = {
        "model": "some/model",
        "output": "run",
        "data": {"train": ["books", {"path": "talks.jsonl", "chat": True, "weight": 0.2}], "fact_share": 0.5},
        "stages": [{"objective": "extend", "tokens": 100, "batch_tokens": 64, "sequence_length": 16}],
    }
    books, chat = Recipe.model_validate(recipe).data.read_as()
    assert (books.fact_share, chat.fact_share, chat.chat) == (0.5, None, True)
    recipe["data"]["train"][1]["questions"] = 0.5
    with pytest.raises(ValueError, match="fact_share and questions change texts, not conversations"):
        Recipe.model_validate(recipe)


def test_a_step_without_anything_to_learn_changes_nothing():
    trainer: Any = SimpleNamespace(args=SimpleNamespace(world_size=1), sums=torch.zeros(2))
    _, count = FoxTrainer.get_batch_samples(trainer, iter([{"num_targets": 0}]), 1, torch.device("cpu"))
    assert count == 1  # the sum of no losses, by 1
    assert trainer.sums[-1] == 0
