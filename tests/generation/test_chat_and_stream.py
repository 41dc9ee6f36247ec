"""A chat's cache over turns that go wrong or repeat, and what a stream holds back."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from retrofox.acceleration.growing_cache import GrowingLayer
from retrofox.generation.chat import ChatSession, chat
from retrofox.generation.generate import complete, generate, render
from retrofox.generation.streaming import Meter, Writer
from retrofox.loading.loaded_model import LoadedModel, open_model

LAST_ALONE = "{{ messages[-1]['content'] }}"


@pytest.fixture
def opened(pico_fox, pico_tokenizer) -> LoadedModel:
    """A model that ends no text, and a tokenizer whose template shows the last message alone."""
    tokenizer = copy.deepcopy(pico_tokenizer)
    tokenizer.chat_template = LAST_ALONE
    model = pico_fox()
    model.generation_config.eos_token_id = 287
    return open_model(model, tokenizer=tokenizer)


def fresh(opened: LoadedModel, text: str, new: int) -> str:
    ids = render(opened.tokenizer, [{"role": "user", "content": text}])
    [tokens] = complete(opened, [ids], new)
    return opened.tokenizer.decode(tokens, skip_special_tokens=True)


def test_a_message_said_twice_leaves_its_last_token_to_compute(opened):
    session, text = ChatSession(opened), "the fox forgets the gate"
    for turn in range(3):
        assert session.reply(text, 6) == fresh(opened, text, 6)
        length = len(render(opened.tokenizer, session.messages[-2:-1]))
        assert session.reused_tokens == (length - 1 if turn else 0)
        assert len(session.cached_ids) == session.cache.get_seq_length()


def test_a_window_that_dropped_shared_tokens_starts_a_new_cache(pico_fox, pico_tokenizer):
    tokenizer = copy.deepcopy(pico_tokenizer)
    tokenizer.chat_template = LAST_ALONE
    model = pico_fox(family="mistral", config={"sliding_window": 8, "eos_token_id": 287}, rope="keep")
    opened = open_model(model, tokenizer=tokenizer)
    session = ChatSession(opened)
    for text in ("the fox forgets the gate and so on", "the fox forgets another gate", "so on and on and on"):
        assert session.reply(text, 8) == fresh(opened, text, 8)


class Interrupting(io.StringIO):
    """Ctrl-C at the third piece of the first answer."""

    left = 3

    def write(self, text: str) -> int:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return super().write(text)


def test_an_answer_that_was_stopped_is_forgotten(opened, capsys):
    lines = iter(["the fox forgets the gate", "the fox forgets the gate, the gate", "/exit"])
    output = Interrupting()
    told = {"temperature": 0.0, "max_new_tokens": 12, "read": lambda prompt: next(lines), "output": output}
    conversation = chat(opened.model, tokenizer=opened.tokenizer, **told)
    assert "(stopped)" in capsys.readouterr().err
    assert [message["role"] for message in conversation] == ["user", "assistant"]
    assert conversation[1]["content"] == fresh(opened, conversation[0]["content"], 12)


def test_a_turn_that_ran_out_of_memory_leaves_a_session_that_goes_on(opened, monkeypatch):
    session, text = ChatSession(opened), "the fox forgets the gate"
    answer = session.reply(text, 6)

    calls, update = [], GrowingLayer.update

    def fails(layer, *given, **options):
        calls.append(layer)
        if len(calls) == 6:  # the second layer's, after two tokens
            raise torch.OutOfMemoryError
        return update(layer, *given, **options)

    monkeypatch.setattr(GrowingLayer, "update", fails)
    with pytest.raises(torch.OutOfMemoryError):
        session.reply("the fox forgets the gate, the gate", 6)
    assert len(session.messages) == 2
    for other in ("the fox forgets the gate, the gate and so on", "the fox forgets another gate"):
        assert session.reply(other, 6) == fresh(opened, other, 6)
    assert session.messages[1]["content"] == answer


def test_turns_draw_anew(opened):
    lines = iter(["the fox", "the fox", "/exit"])
    options = {"read": lambda prompt: next(lines), "output": io.StringIO(), "max_new_tokens": 12}
    conversation = chat(opened.model, tokenizer=opened.tokenizer, seed=3, temperature=50.0, **options)
    assert conversation[1]["content"] != conversation[3]["content"]


def test_a_template_writes_its_own_first_token(opened):
    adding = copy.deepcopy(opened.tokenizer)
    adding._tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    message = [{"role": "user", "content": "the fox"}]
    assert adding("the fox")["input_ids"][0] == 0
    assert render(adding, message) == adding("the fox")["input_ids"][1:]


def test_ends_are_the_tokenizers_where_the_model_names_none_and_can_be_ignored(opened):
    opened.model.generation_config.eos_token_id = None
    free = generate(opened.model, ["the fox"], 24, tokenizer=opened.tokenizer, stream=False, ignore_eos=True)
    whole = free["token_ids"][0]
    assert len(whole) == 24
    opened.tokenizer.eos_token = opened.tokenizer.convert_ids_to_tokens(whole[5])
    ended = generate(opened.model, ["the fox"], 24, tokenizer=opened.tokenizer, stream=False)["token_ids"][0]
    assert ended == whole[: whole.index(whole[5]) + 1]
    again = generate(opened.model, ["the fox"], 24, tokenizer=opened.tokenizer, stream=False, ignore_eos=True)
    assert again["token_ids"][0] == whole


def test_characters_are_written_whole_and_what_was_written_stays(pico_tokenizer):
    output = io.StringIO()
    writer, shown = Writer(pico_tokenizer, output), []
    for token in pico_tokenizer("é東", add_special_tokens=False)["input_ids"]:
        writer.put(token)
        shown.append(output.getvalue())
    assert len(shown) == 5
    assert shown == ["", "é", "é", "é", "é東"]


def test_tokens_are_counted_up_to_the_end():
    meter = Meter([7], None)
    for token in (0, 3, 4, 7, 1, 1):  # the prompt first, padding last
        meter.put(torch.tensor([token]))
    assert meter.count == 3
