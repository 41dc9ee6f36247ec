"""data.self_chat: conversations that the model makes itself, made once, and trained on as a share of the tokens."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from retrofox.config import Recipe
from retrofox.data.prepare import prepare_data
from retrofox.loading.loaded_model import open_model
from retrofox.training import self_chat
from retrofox.training.run_directory import claim_data
from retrofox.training.self_chat import rows_at_a_time, sample_conversations, turns_around_user, with_self_chat
from retrofox.training.train import train
from retrofox.training.validate import preflight

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def few(monkeypatch):
    for name, value in {"FEWEST": 5, "USER_TOKENS": 60, "ANSWER_TOKENS": 100}.items():
        monkeypatch.setattr(self_chat, name, value)


def with_share(recipe: Recipe, share: float, **data: Any) -> Recipe:
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"self_chat": share, **data})})


def test_the_template_says_where_the_user_speaks(pico_tokenizer):
    opening, closing = turns_around_user(pico_tokenizer)
    message = [{"role": "user", "content": "Why?"}]
    rendered = pico_tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    assert opening + "Why?" + closing == rendered


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"chat_template": None}, "no instruct model"),
        ({"chat_template": "{{ raise_exception('tools only') }}"}, "refuses a user's turn: tools only"),
        ({"chat_template": "{{ messages[0].content | upper }}"}, "changes what the user says"),
        ({"eos_token": None}, "no token that ends a turn"),
    ],
)
def test_a_tokenizer_that_can_not_talk_is_refused_before_the_run(make_recipe, pico_tokenizer, changed, message):
    recipe = with_share(make_recipe(), 0.25)
    tokenizer = copy.deepcopy(pico_tokenizer)
    for name, value in changed.items():
        setattr(tokenizer, name, value)
    Path(recipe.model, "chat_template.jinja").unlink()  # of the tokenizer before
    tokenizer.save_pretrained(recipe.model)
    [refusal] = preflight(recipe, 1, CPU)
    assert message in str(refusal)


def test_a_cache_that_can_not_be_written_is_refused_before_they_are_made(
    make_recipe, pico_tokenizer, monkeypatch, tmp_path
):
    (tmp_path / "file").write_text("")
    recipe = with_share(make_recipe(), 0.25, cache=str(tmp_path / "file"))
    monkeypatch.delattr(self_chat, "open_model")
    with pytest.raises(ValueError, match="name another directory"):
        with_self_chat(recipe, pico_tokenizer, CPU, False)


def test_texts_that_can_not_be_read_are_told_before_they_are_made(make_recipe, monkeypatch, tmp_path):
    (tmp_path / "bad.jsonl").write_text("{no JSON")
    monkeypatch.delattr(self_chat, "open_model")
    with pytest.raises(ValueError, match="not a line of JSON"):
        train(with_share(make_recipe(data={"train": [str(tmp_path / "bad.jsonl")]}), 0.25))


def test_conversations_end_and_are_the_same_each_time(pico_llama, pico_tokenizer):
    opened, around = open_model(pico_llama(), tokenizer=pico_tokenizer), turns_around_user(pico_tokenizer)
    first = sample_conversations(opened, 5, *around, progress=False)
    assert len(first) == 5
    assert all([turn["role"] for turn in chat] == ["user", "assistant"] for chat in first)
    assert all(turn["content"] for chat in first for turn in chat)
    assert sample_conversations(opened, 5, *around, progress=False) == first


@pytest.mark.parametrize(("free", "rows"), [(70, 1536), (8, 256), (0, 1)])
def test_a_gpu_makes_as_many_together_as_its_free_memory_holds(monkeypatch, free, rows):
    monkeypatch.setattr(self_chat, "USER_TOKENS", 28)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free << 30, 80 << 30))
    config = SimpleNamespace(num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, hidden_size=4096)
    model = SimpleNamespace(config=config, device=torch.device("cuda"), dtype=torch.bfloat16)
    assert rows_at_a_time(model, 9999) == rows  # 128 KiB a token, 128 tokens a row


def test_a_model_that_ends_no_turn_is_refused(pico_llama, pico_tokenizer, monkeypatch):
    monkeypatch.setattr(self_chat, "USER_TOKENS", 1)
    monkeypatch.setattr(self_chat, "ANSWER_TOKENS", 1)
    opened = open_model(pico_llama(), tokenizer=pico_tokenizer)
    with pytest.raises(ValueError, match=r"hardly an instruct model; remove self_chat"):
        sample_conversations(opened, 5, *turns_around_user(pico_tokenizer), progress=False)


def test_they_are_made_once_and_are_their_share_of_the_tokens(make_recipe, pico_tokenizer, monkeypatch):
    recipe = make_recipe()
    assert with_self_chat(recipe, pico_tokenizer, CPU, False) is recipe.data
    recipe = with_share(recipe, 0.25)
    data = with_self_chat(recipe, pico_tokenizer, CPU, False)
    *texts, chat = data.train
    assert texts == recipe.data.train
    assert chat.chat
    assert chat.weight / sum(source.weight for source in data.train) == pytest.approx(0.25)
    monkeypatch.delattr(self_chat, "open_model")  # what is there is not made again
    assert with_self_chat(recipe, pico_tokenizer, CPU, False) == data
    learnt = prepare_data(data, pico_tokenizer, progress=False).train.sources[-1]
    assert learnt.total("documents") == 5
    small = with_self_chat(with_share(recipe, 0.0005), pico_tokenizer, CPU, False).train[-1].weight
    assert small == pytest.approx(0.0005 / 0.9995 * len(texts))


def test_those_that_a_run_beside_this_one_makes_meanwhile_stand(make_recipe, pico_tokenizer, monkeypatch):
    recipe, its = with_share(make_recipe(), 0.25), []

    def sample(opened: Any, count: int, *_: Any) -> list[list[dict[str, str]]]:
        own = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": f"So {len(its)}."}]
        if not its:
            its.append("")
            its[:] = [Path(with_self_chat(recipe, pico_tokenizer, CPU, False).train[-1].path).read_text()]
        return [own] * count

    monkeypatch.setattr(self_chat, "sample_conversations", sample)
    assert Path(with_self_chat(recipe, pico_tokenizer, CPU, False).train[-1].path).read_text() == its[0]


def test_a_run_trains_on_them_wherever_the_cache_lies(make_recipe, pico_tokenizer, tmp_path):
    recipe = with_share(make_recipe(), 0.25)
    train(recipe)
    file = Path(recipe.output, "data.json")
    assert "self-chat" in file.read_text(encoding="utf-8")
    moved = with_self_chat(with_share(recipe, 0.25, cache=str(tmp_path / "moved")), pico_tokenizer, CPU, False)
    tokens = prepare_data(moved, pico_tokenizer, progress=False)
    claim_data(file, tokens.train, tokens.eval)  # else it would refuse to go on
