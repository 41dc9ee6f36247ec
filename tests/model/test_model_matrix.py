"""Every kind of retrofit through every way of running it: cached, padded, packed, in beams, drafted, recomputed."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

from retrofox.acceleration import cuda_graph_decoding
from retrofox.anatomy import attention_mode
from retrofox.model.modeling_fox import CACHE
from tests.model.conftest import decode, logits

LENGTH = 24
WINDOW: dict[str, Any] = {"family": "mistral", "config": {"sliding_window": 7}, "rope": "keep"}
HORIZON: dict[str, Any] = {"half_life": (1.0, 12.0), "horizon": 3.0}
MODELS: dict[str, dict[str, Any]] = {
    "no sinks": {"sink_tokens": 0},
    "sinks, rope dropped": {"rope": "drop", "sink_tokens": 4},
    "interpolated, log-n": {"rope": "interpolate", "rope_factor": 4.0, "rope_length": 16, "log_n": 6},
    "gates of biases": {"gate": "bias"},
    "a gate for each kv head": {"gate_heads": "kv"},
    "horizon, sinks": {**HORIZON, "sink_tokens": 2},
    "window, horizon": {**WINDOW, **HORIZON},
    "qk-norm": {"pro": "qk-norm"},
    "output-norm": {"pro": "output-norm"},
    "output-gate": {"pro": "output-gate"},
    "k-shift": {"pro": "k-shift", "sink_tokens": 0},
    "v-shift": {"pro": "v-shift"},
    "all parts, sinks, log-n": {"pro": "all", "sink_tokens": 4, "log_n": 6},
    "all parts, no gate": {"pro": "all", "gate": "none", "rope": "keep"},
    "all parts, window": {**WINDOW, "pro": "all"},
    "all parts, one projection": {"family": "phi3", "pro": "all"},
    "all parts, own norms": {"family": "gemma3_text", "config": {"sliding_window": 7}, "pro": "all"},
}
GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}


@pytest.fixture(scope="module", params=MODELS)
def model(request, pico_fox):
    return pico_fox(**MODELS[request.param])


def close(actual, expected) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def caches(model) -> list[Any]:
    return [DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=LENGTH + 6)]


def test_cached_is_whole_in_every_mode(model, tokens, path):
    for mode in ("fox", "open", "shuffled", "original"):
        with attention_mode(model, mode):
            whole = logits(model, tokens, use_cache=False)
            for cache in caches(model):
                close(decode(model, tokens, cache), whole)


def test_left_padding_is_no_padding(model, tokens, path):
    short = tokens[1, 9:]
    batch = torch.stack([tokens[0], torch.cat([torch.full((9,), 1), short])])
    mask = torch.ones_like(batch)
    mask[1, :9] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    alone = logits(model, short[None])[0]
    whole = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool).tril() & mask[:, None, None].bool()
    for given in (mask, whole):
        if given is mask or getattr(model.config, "sliding_window", None) is None:  # a 4D mask says all: windows, too
            close(logits(model, batch, attention_mask=given, position_ids=positions)[1, 9:], alone)
    close(logits(model, batch, attention_mask=mask)[1, 9:], alone)
    for cache in caches(model):
        close(decode(model, batch, cache, mask, positions)[1, 9:], alone)


def test_documents_of_any_length_see_themselves_only(model, tokens, path):
    starts, flat = [0, 9, 10, LENGTH, 30, tokens.numel()], tokens.flatten()
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(starts)]).view(2, LENGTH)
    for told in ({"position_ids": positions}, {"cu_seqlens": torch.tensor(starts, dtype=torch.int32)}):
        packed = logits(model, tokens, use_cache=False, **told).flatten(0, 1)
        for start, end in pairwise(starts):
            close(packed[start:end], logits(model, flat[None, start:end])[0])


def test_caches_that_are_reordered_and_repeated_go_on_rightly(model, tokens):
    whole = logits(model, tokens, use_cache=False)
    cache: Any = DynamicCache(config=model.config)
    logits(model, tokens[:, :6], **{CACHE: cache})
    cache.reorder_cache(torch.tensor([1, 0]))
    close(logits(model, tokens.flip(0)[:, 6:], **{CACHE: cache}), whole.flip(0)[:, 6:])
    cache = DynamicCache(config=model.config)
    logits(model, tokens[:, :6], **{CACHE: cache})
    cache.batch_repeat_interleave(2)
    again = tokens.repeat_interleave(2, 0)
    close(logits(model, again[:, 6:], **{CACHE: cache}), whole.repeat_interleave(2, 0)[:, 6:])


@pytest.mark.parametrize("beams", [1, 3])
def test_generation_is_the_same_with_every_cache(model, tokens, beams, path, monkeypatch):
    plain = model.generate(tokens, use_cache=False, num_beams=beams, **GREEDY)
    for kind in ("dynamic", "static"):
        assert torch.equal(model.generate(tokens, cache_implementation=kind, num_beams=beams, **GREEDY), plain)
    assert torch.equal(model.generate(tokens, num_beams=beams, **GREEDY), plain)
    monkeypatch.setattr(cuda_graph_decoding, "DEVICES", ("cpu",))
    for kind in (None, "dynamic"):
        assert torch.equal(model.generate(tokens, cache_implementation=kind, num_beams=beams, **GREEDY), plain)
        assert beams > 1 or "captured" in model.decoded_by


def test_drafted_tokens_change_nothing(model, pico_llama, tokens):
    plain = model.generate(tokens[:1], use_cache=False, **GREEDY)
    assert torch.equal(model.generate(tokens[:1], assistant_model=pico_llama(), **GREEDY), plain)
    assert torch.equal(model.generate(tokens[:1], prompt_lookup_num_tokens=3, **GREEDY), plain)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable")  # renamed in later versions of transformers
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("part", ["none", "qk-norm", "output-norm", "output-gate", "k-shift,v-shift", "all"])
def test_recomputed_gradients_are_the_gradients(pico_fox, tokens, part, reentrant):
    found = []
    for recomputed in (False, True):
        model = pico_fox(pro=part).train()
        model.enable_input_require_grads()
        if recomputed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in found[0].items():
        assert gradient.abs().sum() > 0, name
        torch.testing.assert_close(found[1][name], gradient, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("spec", [MODELS["interpolated, log-n"], pytest.param({"pro": "all"}, marks=pytest.mark.slow)])
def test_a_compiled_training_step_is_the_eager_one(pico_fox, tokens, spec):
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = pico_fox(**spec).train()
        step = torch.compile(model, backend="aot_eager") if compiled else model
        output = step(tokens, labels=tokens, use_cache=False)
        output.loss.backward()
        found.append((output.logits.detach(), {name: p.grad for name, p in model.named_parameters()}))
    close(found[1][0], found[0][0])
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], gradient, atol=1e-5, rtol=1e-4)
