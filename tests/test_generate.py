"""Generation: the cache, batches, beams, sampling, streaming and chat, each against the plain computation."""

from __future__ import annotations

import copy
import io

import pytest
import torch

import retrofox
from retrofox.generate import ChatSession, chat, complete, generate
from retrofox.opening import Opened, open_model

PROMPTS = ["the fox forgets", "a", "the gate is open and the fox forgets the gate"]


@pytest.fixture(scope="module", params=["pico_llama", "pico_fox"])
def opened(request, pico_tokenizer) -> Opened:
    """A plain and a converted pico model in turn."""
    return open_model(request.getfixturevalue(request.param)(), tokenizer=pico_tokenizer)


def run(opened: Opened, prompts: list[str], new: int = 16, **options) -> dict:
    return generate(opened.model, prompts, new, tokenizer=opened.tokenizer, stream=False, ignore_eos=True, **options)


def by_hand(opened: Opened, prompt: str, new: int) -> list[int]:
    """Greedy tokens, each from a forward pass over everything so far."""
    ids = opened.tokenizer(prompt)["input_ids"]
    start = len(ids)
    for _ in range(new):
        with torch.no_grad():
            logits = opened.model(input_ids=torch.tensor([ids]), use_cache=False).logits
        ids = [*ids, int(logits[0, -1].argmax())]
    return ids[start:]


def test_greedy_with_cache_equals_greedy_without_and_by_hand(opened):
    for prompt in PROMPTS:
        expected = by_hand(opened, prompt, 16)
        assert run(opened, [prompt])["token_ids"] == [expected]
        assert run(opened, [prompt], use_cache=False)["token_ids"] == [expected]


def test_a_left_padded_batch_equals_one_by_one(opened):
    together = run(opened, PROMPTS)
    assert together["token_ids"] == [run(opened, [prompt])["token_ids"][0] for prompt in PROMPTS]
    assert together["new_tokens"] == 16 * len(PROMPTS)
    assert together["tokens_per_second"] == pytest.approx(together["new_tokens"] / together["seconds"])


def test_beam_search_with_cache_equals_beam_search_without(opened):
    cached = run(opened, PROMPTS, num_beams=4)["token_ids"]
    assert cached == run(opened, PROMPTS, num_beams=4, use_cache=False)["token_ids"]
    assert cached != run(opened, PROMPTS)["token_ids"]  # else the beams never crossed and nothing was reordered


def test_the_gates_take_part_in_decoding(pico_fox, pico_tokenizer):
    opened = open_model(pico_fox(), tokenizer=pico_tokenizer)
    gated = run(opened, PROMPTS)["token_ids"]
    with retrofox.surgery.attention_mode(opened.model, "open"):
        assert run(opened, PROMPTS)["token_ids"] != gated


def test_a_seed_repeats_a_draw_and_leaves_the_global_state_alone(opened):
    torch.manual_seed(11)
    untouched = torch.rand(3)
    torch.manual_seed(11)
    first = run(opened, PROMPTS, temperature=1.0, top_p=0.9, seed=4)["token_ids"]
    assert torch.equal(torch.rand(3), untouched)
    assert run(opened, PROMPTS, temperature=1.0, top_p=0.9, seed=4)["token_ids"] == first
    assert run(opened, PROMPTS, temperature=1.0, top_p=0.9, seed=5)["token_ids"] != first


def test_a_vanishing_top_p_is_greedy(opened):
    assert run(opened, PROMPTS, temperature=1.0, top_p=1e-6)["token_ids"] == run(opened, PROMPTS)["token_ids"]


def test_the_checkpoints_sampling_defaults_do_not_leak_in(opened):
    greedy = run(opened, PROMPTS)["token_ids"]
    saved = opened.model.generation_config
    try:
        opened.model.generation_config = type(saved)(
            do_sample=True, temperature=9.0, repetition_penalty=3.0, num_beams=2
        )
        assert run(opened, PROMPTS)["token_ids"] == greedy
    finally:
        opened.model.generation_config = saved


def test_text_ends_at_the_end_token(opened):
    free = run(opened, PROMPTS)["token_ids"]
    end = free[0][5]
    saved = opened.model.generation_config.eos_token_id
    try:
        opened.model.generation_config.eos_token_id = [end]
        result = generate(opened.model, PROMPTS, 16, tokenizer=opened.tokenizer, stream=False)
    finally:
        opened.model.generation_config.eos_token_id = saved
    for ids, whole in zip(result["token_ids"], free, strict=True):
        assert ids == (whole[: whole.index(end) + 1] if end in whole else whole)


def test_the_stream_holds_exactly_the_texts(opened, capsys):
    for prompts, echo in ((PROMPTS[:1], False), (PROMPTS, False), (PROMPTS, True)):
        output = io.StringIO()
        result = generate(opened.model, prompts, 12, tokenizer=opened.tokenizer, output=output, echo=echo)
        shown = [prompt + text if echo else text for prompt, text in zip(prompts, result["texts"], strict=True)]
        if len(prompts) == 1:
            assert output.getvalue() == shown[0] + "\n"
        else:
            assert output.getvalue() == "".join(f"[{n}] {text}\n" for n, text in enumerate(shown, 1))
        assert "tokens/s" in capsys.readouterr().err


def test_the_first_prompt_streams_token_by_token(opened):
    class Pieces(io.StringIO):
        flushes = 0

        def flush(self):
            self.flushes += 1

    output = Pieces()
    generate(opened.model, [PROMPTS[0]], 12, tokenizer=opened.tokenizer, output=output, ignore_eos=True)
    assert output.flushes > 4


def test_bad_options_are_refused(opened):
    for options, message in (
        ({"prompts": []}, "no prompt"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0, "temperature": 1.0}, "top_p"),
        ({"top_p": 0.5}, "no effect on greedy"),
        ({"num_beams": 0}, "num_beams"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(opened.model, **{"prompts": ["a"], "tokenizer": opened.tokenizer, **options})


def test_chat_keeps_its_cache_over_turns_and_answers_as_without_it(opened):
    tokenizer = opened.tokenizer
    session = ChatSession(opened, system="be brief")
    for turn, text in enumerate(["the fox", "the gate", "again"]):
        messages = [*session.messages, {"role": "user", "content": text}]
        rendered = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        [fresh] = complete(opened, [ids], 10)
        assert session.reply(text, 10) == tokenizer.decode(fresh, skip_special_tokens=True)
        shared = len(tokenizer(TEMPLATE_START, add_special_tokens=False)["input_ids"])
        assert (session.reused_tokens >= shared) == (turn > 0)
    session.reset()
    assert session.messages == [{"role": "system", "content": "be brief"}]
    assert session.cache.get_seq_length() == 0


TEMPLATE_START = "<s>system:be brief</s><s>user:the fox</s><s>assistant:"


def test_chat_reads_until_exit_and_returns_the_conversation(opened, capsys):
    tokenizer = opened.tokenizer
    lines = iter(["the fox", "", "/reset", "the gate", "/exit"])
    output = io.StringIO()
    conversation = chat(
        opened.model,
        tokenizer=tokenizer,
        max_new_tokens=5,
        temperature=0.0,
        top_p=1.0,
        read=lambda prompt: next(lines),
        output=output,
    )
    assert [message["role"] for message in conversation] == ["user", "assistant"]
    assert conversation[0]["content"] == "the gate"
    assert conversation[1]["content"] in output.getvalue()
    assert "tokens/s" in capsys.readouterr().err


def test_chat_without_a_template_is_refused(opened):
    plain = copy.deepcopy(opened.tokenizer)
    plain.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        chat(opened.model, tokenizer=plain, read=lambda prompt: "/exit")
    with pytest.raises(ValueError, match="no chat template"):
        generate(opened.model, ["a"], tokenizer=plain, chat_template=True)
