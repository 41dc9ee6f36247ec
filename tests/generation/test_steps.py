"""Generation on a CPU from the weights alone: tokens and logits of transformers' loop, and only for plain models."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
)

import retrofox
from retrofox.generation.chat import ChatSession
from retrofox.generation.generate import generate
from retrofox.loading.opened import open_model
from retrofox.model import captured, steps
from retrofox.model.cache import CACHE

PICO = {
    "vocab_size": 288, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.3,
}  # fmt: skip
OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
SPECS: dict[str, dict[str, Any]] = {
    "partial": {"rope": "partial"},
    "kept": {"rope": "keep"},
    "dropped": {"rope": "drop"},
    "interpolated": {"rope": "interpolate", "rope_factor": 4.0, "rope_length": 128},
    "sinks, pruned": {"sink_tokens": 3, "prune": -6.0},
    "pairs by layer": {"layer_pairs": {0: (1,), 1: (0, 2)}},
}


def tokens(rows: int, length: int, seed: int = 5) -> torch.Tensor:
    return torch.randint(2, 288, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def loop(monkeypatch):
    """A call by transformers' loop, with the layers' own forwards."""

    def run(call):
        with monkeypatch.context() as patch:
            patch.setattr(captured, "steps_serve", lambda *_: False)
            return call()

    return run


def both(loop, model, ids, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """(from the steps, from transformers' loop) for the same call."""

    def call():
        torch.manual_seed(3)
        return model.generate(ids, **copy.copy(OPTIONS | options))

    ours = call()
    assert model.decoded_by == steps.HOW
    theirs = loop(call)
    assert "the model is on cpu" in model.decoded_by
    return ours, theirs


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("length", [1, 2, 40, 700])
@pytest.mark.parametrize("spec", SPECS)
def test_tokens_and_logits_are_those_of_the_loop(pico_fox, loop, spec, length, rows):
    """More tokens than there is room for at first, and than angles are made for together."""
    model, found = pico_fox(**SPECS[spec]), []
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.normal_()
    for run in (lambda call: call(), loop):
        seen: list[torch.Tensor] = []
        noted: Any = lambda input_ids, scores, seen=seen: seen.append(scores.clone()) or scores  # noqa: E731
        options = OPTIONS | {"max_new_tokens": 90, "logits_processor": LogitsProcessorList([noted])}
        ids = run(lambda options=options: model.generate(tokens(rows, length), **options))
        found.append((ids, torch.stack(seen)))
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], atol=2e-4, rtol=1e-4)
    assert torch.equal(model.generate(tokens(rows, length), **OPTIONS | {"max_new_tokens": 90}), found[0][0])
    assert model.decoded_by == steps.HOW


@pytest.mark.parametrize(
    "make",
    [
        lambda: MistralForCausalLM(MistralConfig(**PICO, sliding_window=None)),
        lambda: Qwen2ForCausalLM(Qwen2Config(**PICO)),
    ],
    ids=["mistral", "qwen2"],
)
def test_other_families_that_are_written_alike(loop, make):
    torch.manual_seed(0)
    model = retrofox.convert(make(), fox=retrofox.FoxSpec(half_life=(2.0, 200.0), rope="partial")).eval()
    ours, theirs = both(loop, model, tokens(2, 30))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("options", [{"temperature": 1.3}, {"top_k": 9}, {"top_p": 0.8}], ids=str)
def test_draws_are_the_same_with_a_seed_and_leave_the_same_state(pico_fox, loop, options):
    model, options = pico_fox(), options | {"do_sample": True}
    ours, theirs = both(loop, model, tokens(2, 20), **options)
    after = torch.rand(1)
    assert torch.equal(ours, theirs)
    torch.manual_seed(3)
    model.generate(tokens(2, 20), **OPTIONS | options)
    assert torch.equal(torch.rand(1), after)


def test_processors_criteria_and_ends_see_what_they_would(pico_fox, loop, pico_tokenizer):
    model, ids = pico_fox(), tokens(2, 20)

    class Every7(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return (input_ids[:, 20:].sum(1) % 7 == 0) & (torch.arange(len(input_ids)) > 0)

    free = model.generate(ids, **OPTIONS)
    for options in (
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[5], [9, 17]]},
        {"stopping_criteria": StoppingCriteriaList([Every7()])},
        {"eos_token_id": [int(free[0, 25])]},
        {"eos_token_id": [int(free[0, 20])]},
        {"eos_token_id": [int(free[0, 30]), int(free[1, 24])]},
        {"max_new_tokens": 1},
    ):
        ours, theirs = both(loop, model, ids, **options)
        assert torch.equal(ours, theirs), options
    ours, theirs = both(loop, model, ids[:1], eos_token_id=[int(free[0, 20])])
    assert torch.equal(ours, theirs)
    assert ours.shape[1] == 21
    text = pico_tokenizer.decode(free[0, 20:32])
    stop = next(c for c in text[4:] if c.isascii() and c.isalnum())
    ours, theirs = both(loop, model, ids[:1], stop_strings=[stop], tokenizer=pico_tokenizer)
    assert torch.equal(ours, theirs)
    assert ours.shape[1] < 44


def test_what_is_streamed_and_the_results_of_generate(pico_fox, loop, pico_tokenizer):
    opened = open_model(pico_fox(), tokenizer=pico_tokenizer)

    def call():
        place = io.StringIO()
        result = generate(opened.model, ["the fox forgets"], 16, tokenizer=pico_tokenizer, output=place)
        return place.getvalue(), result["token_ids"], result["new_tokens"], result["decoded_by"]

    ours, theirs = call(), loop(call)
    assert ours[:3] == theirs[:3]
    assert ours[3] == steps.HOW != theirs[3]


def test_a_cache_goes_on_where_steps_left_it(pico_fox, loop):
    """Over the turns of a chat; positions are those of the whole text."""
    model = pico_fox(sink_tokens=2)

    def call():
        cache: Any = DynamicCache(config=model.config)
        text = tokens(1, 20)
        for turn in range(3):
            text = model.generate(text, attention_mask=torch.ones_like(text), **{CACHE: cache}, **OPTIONS)
            assert cache.get_seq_length() == text.shape[1] - 1
            text = torch.cat([text, tokens(1, 5, seed=turn)], 1)
        with torch.no_grad():
            logits = model(text[:, cache.get_seq_length() :], **{CACHE: cache}).logits
        return text, logits

    ours, theirs = call(), loop(call)
    assert torch.equal(ours[0], theirs[0])
    torch.testing.assert_close(ours[1], theirs[1], atol=1e-4, rtol=1e-4)


def test_a_chat_reuses_its_cache(pico_fox, loop, pico_tokenizer):
    def call():
        session = ChatSession(open_model(pico_fox(), tokenizer=pico_tokenizer))
        answers = [session.reply(text, 20) for text in ("hello", "and so on", "the fox")]
        assert session.reused_tokens > 20
        return answers

    assert call() == loop(call)


def test_a_long_prompt_is_read_in_parts(pico_fox, loop, monkeypatch):
    model, ids, lengths, read = pico_fox(), tokens(2, 100), [], steps.Steps._read

    def noted(self, tokens, positions):
        lengths.append(tokens.shape[1])
        return read(self, tokens, positions)

    monkeypatch.setattr(steps.Steps, "_read", noted)
    ours, theirs = both(loop, model, ids, prefill_chunk_size=32)
    assert torch.equal(ours, theirs)
    assert lengths == [32, 32, 32, 4]
    cache: Any = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :70], **{CACHE: cache})
    lengths.clear()
    ours = model.generate(ids, **{CACHE: cache}, **OPTIONS | {"prefill_chunk_size": 25})
    assert torch.equal(ours, theirs)
    assert lengths == [25, 5]


def test_positions_that_are_given(pico_fox, loop):
    model, ids = pico_fox(rope="keep"), tokens(2, 20)
    for positions in (torch.arange(7, 27).expand(2, -1), torch.arange(20)[None] + torch.tensor([[3], [50]])):
        ours, theirs = both(loop, model, ids, position_ids=positions)
        assert torch.equal(ours, theirs)


def test_an_interruption_leaves_a_cache_that_goes_on(pico_fox):
    model, ids = pico_fox(), tokens(1, 20)
    cache: Any = DynamicCache(config=model.config)

    class Stop:
        count = 0

        def put(self, value):
            self.count += 1
            if self.count == 6:
                raise KeyboardInterrupt

        def end(self):
            pytest.fail("the text did not end")

    with pytest.raises(KeyboardInterrupt):
        model.generate(ids, **{CACHE: cache}, streamer=Stop(), **OPTIONS)
    whole = model.generate(ids, **OPTIONS)
    kept = cache.get_seq_length()
    assert 20 < kept < 30
    again = model.generate(whole[:, : kept + 1], **{CACHE: cache}, **OPTIONS | {"max_new_tokens": 43 - kept})
    assert torch.equal(again, whole)
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("held", [0, 12])
def test_an_interruption_while_a_prompt_is_read_leaves_the_cache_as_it_was(pico_fox, monkeypatch, held):
    model, ids = pico_fox(), tokens(1, 40)
    cache: Any = DynamicCache(config=model.config)
    with torch.no_grad():
        if held:
            model(ids[:, :held], **{CACHE: cache})

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(steps, "leave", stop)
        with pytest.raises(KeyboardInterrupt):
            model.generate(ids, **{CACHE: cache}, **OPTIONS)
    assert [layer.get_seq_length() for layer in cache.layers] == [held] * len(cache.layers)
    expected = model.generate(ids, **OPTIONS)
    assert torch.equal(model.generate(ids, **{CACHE: cache}, **OPTIONS), expected)


def hooked(model) -> None:
    model.lm_head.register_forward_hook(lambda *_: None)


def watched(model) -> None:
    forward = model.model.forward
    model.model.forward = lambda *args, **kwargs: forward(*args, **kwargs)


def extended(model) -> None:
    own = type(model)
    model.__class__ = type(
        "Mine", (own,), {"forward": lambda self, *args, **kwargs: own.forward(self, *args, **kwargs)}
    )


@pytest.mark.parametrize("change", [hooked, watched, extended])
def test_a_model_that_was_touched_keeps_its_forward(pico_fox, loop, change):
    model, ids = pico_fox(), tokens(2, 20)
    expected = model.generate(ids, **OPTIONS)
    assert model.decoded_by == steps.HOW
    change(model)
    assert torch.equal(model.generate(ids, **OPTIONS), expected)
    assert "the model is on cpu" in model.decoded_by


@pytest.mark.parametrize(
    ("spec", "options", "why"),
    [
        ({"pro": ("qk-norm", "k-shift")}, {}, "the model is on cpu"),
        ({"log_n": 16}, {}, "the model is on cpu"),
        ({}, {"attention_mask": torch.tensor([[0, 0, 0] + [1] * 17, [1] * 20])}, "the model is on cpu"),
        ({}, {"use_cache": False}, "there is no cache"),
        ({}, {"cache_implementation": "static"}, "StaticCache"),
        ({}, {"return_dict_in_generate": True}, "more than tokens"),
    ],
)
def test_what_steps_do_not_serve_goes_through_the_loop(pico_fox, loop, spec, options, why):
    model, ids = pico_fox(**spec), tokens(2, 20)
    found = model.generate(ids, **OPTIONS | options)
    assert why in model.decoded_by
    expected = loop(lambda: model.generate(ids, **OPTIONS | options))
    found, expected = (getattr(x, "sequences", x) for x in (found, expected))
    assert torch.equal(found, expected)


def test_a_model_told_to_stop_early_goes_through_the_loop(pico_fox, loop):
    model, ids = pico_fox(), tokens(2, 20)
    model.config.num_hidden_layers = 1
    found = model.generate(ids, **OPTIONS)
    assert "the model is on cpu" in model.decoded_by
    assert torch.equal(found, loop(lambda: model.generate(ids, **OPTIONS)))


def test_other_dtypes_and_autocast_go_through_the_loop(pico_fox):
    model, ids = pico_fox(), tokens(1, 20)
    with torch.autocast("cpu", torch.bfloat16):
        model.generate(ids, **OPTIONS)
    assert "the model is on cpu" in model.decoded_by
    model.to(torch.bfloat16).generate(ids, **OPTIONS)
    assert "the model is on cpu" in model.decoded_by
