"""The step of captured decoding, uncaptured on a CPU: the tokens of transformers' own loop over a growing cache."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

from retrofox.acceleration import captured_step
from retrofox.acceleration import cuda_graph_decoding as captured
from retrofox.acceleration import static_cache as fixed
from retrofox.generation.generate import generate
from retrofox.loading.loaded_model import open_model
from retrofox.model.modeling_fox import CACHE
from tests.model.conftest import ids_of

STEP = "the step of a captured graph, uncaptured on a CPU"
WINDOW: dict[str, Any] = {"family": "mistral", "config": {"sliding_window": 9}, "rope": "keep"}
OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
FULL = OPTIONS | {"cache_implementation": "dynamic"}  # all keys; others: tests/model/test_captured_forgetting.py
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rope kept": {"rope": "keep"},
    "rope dropped": {"rope": "drop"},
    "rope interpolated": {"rope": "interpolate", "rope_factor": 4.0, "rope_length": 128},
    "sinks, log n": {"sink_tokens": 3, "log_n": 16},
    "pro": {"pro": ("qk-norm", "output-norm", "output-gate", "k-shift", "v-shift")},
    "horizon and sinks": {"half_life": (2.0, 30.0), "horizon": 3.0, "sink_tokens": 2},
    "no gate": {"gate": "none", "rope": "keep"},
    "window": WINDOW,
}


@pytest.fixture
def fixed_on_cpu(monkeypatch):
    monkeypatch.setattr(captured, "DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(captured_step, "LEAST_CAPACITY", 32)  # buffers and reads grow within a test
    monkeypatch.setattr(captured_step, "SHIFT_EVERY", 4)
    return monkeypatch


def both(monkeypatch, model, ids, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """(from the fixed cache, from the growing one) for the same call."""
    options = FULL | options
    torch.manual_seed(3)
    ours = model.generate(ids, **copy.copy(options))
    assert model.decoded_by == STEP
    with monkeypatch.context() as patch:
        patch.setattr(captured, "DEVICES", ("cuda",))
        torch.manual_seed(3)
        theirs = model.generate(ids, **copy.copy(options))
        assert "the model is on cpu" in model.decoded_by
    return ours, theirs


@pytest.mark.parametrize(("spec", "prompt"), [*((name, 50) for name in MODELS), ("window", 10)])
def test_logits_of_a_step_are_those_of_the_growing_cache(pico_fox, fixed_on_cpu, spec, prompt):
    """Tokens of a pico model could agree by luck: so do logits, step by step, with padding, also within a window."""
    model, ids, mask = pico_fox(**MODELS[spec]), ids_of(2, prompt), torch.ones(2, prompt, dtype=torch.long)
    mask[1, :7] = 0
    position_ids = (mask.cumsum(1) - 1).clamp_min(0)
    seen = []
    step = captured.Decoding._run

    def noted(self, sampler):
        step(self, sampler)
        seen.append(self.logits.clone())

    fixed_on_cpu.setattr(captured.Decoding, "_run", noted)
    out = model.generate(ids, attention_mask=mask, position_ids=position_ids, **FULL)
    mask = torch.nn.functional.pad(mask, (0, 24), value=1)
    with torch.no_grad():
        whole = model(out, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0), use_cache=False).logits
    assert len(seen) == 23
    for n, logits in enumerate(seen):
        torch.testing.assert_close(logits, whole[:, prompt + n], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", [{"temperature": 1.3}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.05}], ids=str)
def test_draws_are_the_same_with_a_seed_and_leave_the_same_state(pico_fox, fixed_on_cpu, options):
    model = pico_fox()
    ours, theirs = both(fixed_on_cpu, model, ids_of(2, 20), do_sample=True, **options)
    after = torch.rand(1)
    assert torch.equal(ours, theirs)
    torch.manual_seed(3)
    model.generate(ids_of(2, 20), **OPTIONS | options | {"do_sample": True})
    assert torch.equal(torch.rand(1), after)


def test_processors_and_criteria_see_what_they_would(pico_fox, fixed_on_cpu, pico_tokenizer):
    model, ids = pico_fox(), ids_of(2, 20)

    class Every7(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return (input_ids[:, 20:].sum(1) % 7 == 0) & (torch.arange(len(input_ids)) > 0)

    for options in (
        {"repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2},
        {"stopping_criteria": StoppingCriteriaList([Every7()])},
        {"bad_words_ids": [[5], [9, 17]]},
    ):
        ours, theirs = both(fixed_on_cpu, model, ids, **options)
        assert torch.equal(ours, theirs), options
    text = pico_tokenizer.decode(model.generate(ids[:1], **OPTIONS)[0, 20:32])
    stop = next(c for c in text[4:] if c.isascii() and c.isalnum())
    ours, theirs = both(fixed_on_cpu, model, ids[:1], stop_strings=[stop], tokenizer=pico_tokenizer)
    assert torch.equal(ours, theirs)
    assert ours.shape[1] < 44


def test_rows_end_at_their_end_tokens(pico_fox, fixed_on_cpu):
    model, ids = pico_fox(), ids_of(3, 20)
    free = model.generate(ids, **OPTIONS)
    for ends in ([int(free[0, 25])], [int(free[0, 30]), int(free[1, 24]), int(free[2, 27])], [int(free[0, 20])]):
        ours, theirs = both(fixed_on_cpu, model, ids, eos_token_id=ends)
        assert torch.equal(ours, theirs)
    ours, theirs = both(fixed_on_cpu, model, ids[:1], eos_token_id=[int(free[0, 26])])
    assert torch.equal(ours, theirs)
    assert ours.shape[1] <= 27


def test_a_stream_ends_where_the_first_token_ends_the_text(pico_fox, fixed_on_cpu):
    model, ids, ended = pico_fox(), ids_of(1, 20), []
    free = model.generate(ids, **OPTIONS)
    place: Any = SimpleNamespace(put=lambda value: None, end=lambda: ended.append(True))
    for devices in (("cpu",), ()):
        fixed_on_cpu.setattr(captured, "DEVICES", devices)
        found = model.generate(ids, streamer=place, **OPTIONS | {"eos_token_id": [int(free[0, 20])]})
        assert torch.equal(found, free[:, :21])
    assert ended == [True, True]


def test_streams_and_results_of_generate(pico_fox, fixed_on_cpu, pico_tokenizer):
    import io

    opened = open_model(pico_fox(), tokenizer=pico_tokenizer)
    texts = []
    for devices in (("cpu",), ()):
        fixed_on_cpu.setattr(captured, "DEVICES", devices)
        place = io.StringIO()
        result = generate(opened.model, ["the fox forgets", "a"], 16, tokenizer=pico_tokenizer, output=place)
        texts.append((place.getvalue(), result["token_ids"], result["new_tokens"]))
        assert (result["decoded_by"] == STEP) == bool(devices)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("spec", [{"pro": ("k-shift", "v-shift")}, WINDOW], ids=["shifts", "window"])
def test_a_cache_goes_on_where_decoding_left_it(pico_fox, fixed_on_cpu, spec):
    """Over the turns of a chat, also once its window has passed, the cache holds what a growing one would."""
    model, caches = pico_fox(**spec), []
    for devices in (("cpu",), ()):
        fixed_on_cpu.setattr(captured, "DEVICES", devices)
        cache: Any = DynamicCache(config=model.config)
        text = ids_of(1, 20)
        for turn in range(3):
            text = model.generate(text, attention_mask=torch.ones_like(text), **{CACHE: cache}, **OPTIONS)
            assert (model.decoded_by == STEP) == bool(devices)
            assert cache.get_seq_length() == text.shape[1] - 1
            for layer in cache.layers:
                window = getattr(layer, "sliding_window", None)
                assert window is None or layer.keys.shape[2] == window - 1
            text = torch.cat([text, ids_of(1, 5, seed=turn)], 1)
        with torch.no_grad():
            logits = model(text[:, cache.get_seq_length() :], **{CACHE: cache}).logits
        caches.append((text, logits))
    assert torch.equal(caches[0][0], caches[1][0])
    torch.testing.assert_close(caches[0][1], caches[1][1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"max_new_tokens": 4}, "doesn't pay for 4"),
        ({"max_new_tokens": 10**20, "eos_token_id": list(range(2, 288))}, "has no limit"),
        ({"use_cache": False}, "there is no cache"),
        ({"cache_implementation": "static"}, "StaticCache"),
        ({"return_dict_in_generate": True}, "more than tokens"),
        ({"attention_mask": torch.tensor([[1, 1, 0] + [1] * 17])}, "hides more"),
    ],
)
def test_the_reason_is_stated_where_the_step_can_not_serve(pico_fox, fixed_on_cpu, options, why):
    model = pico_fox()
    model.generate(ids_of(1, 20), **OPTIONS | options)
    assert why in model.decoded_by


def test_a_model_that_trains_and_angles_that_depend_on_the_length_take_the_loop(pico_fox, fixed_on_cpu):
    model = pico_fox().train()
    model.generate(ids_of(1, 20), **OPTIONS)
    assert "training mode" in model.decoded_by
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0], "original_max_position_embeddings": 40}
    for rope in ({"rope_type": "dynamic", "factor": 4.0}, {"rope_type": "longrope", "factor": 4.0, **factors}):
        model = pico_fox(rope="keep", config={"rope_parameters": {**rope, "rope_theta": 1e4}})
        model.generate(ids_of(1, 20), **OPTIONS)
        assert f"depend on the length of the text ({rope['rope_type']})" in model.decoded_by


def test_an_interruption_leaves_a_cache_that_goes_on(pico_fox, fixed_on_cpu):
    model, ids = pico_fox(), ids_of(1, 20)
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
    assert not any(isinstance(x, fixed.FixedLayer) for x in cache.layers)
    again = model.generate(whole[:, : kept + 1], **{CACHE: cache}, **OPTIONS | {"max_new_tokens": 43 - kept})
    assert torch.equal(again, whole)
