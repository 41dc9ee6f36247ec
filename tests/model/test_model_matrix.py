"""Every Pro part, alone and together, with every number of sinks, through every way of running a model."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

from retrofox.anatomy import attention_mode
from retrofox.model.modeling_fox import CACHE
from tests.model.conftest import decode, logits

LENGTH = 24
PARTS = ["none", "qk-norm", "output-norm", "output-gate", "k-shift", "v-shift", "k-shift,v-shift", "all"]
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}


@pytest.fixture(scope="module", params=[(part, sink) for part in PARTS for sink in (0, 1, 4)], ids=str)
def model(request, pico_fox):
    part, sink = request.param
    return pico_fox(pro=part, sink_tokens=sink, log_n=6 if part == "all" else None)


def close(actual, expected) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def caches(model) -> list[Any]:
    return [DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=LENGTH + 6)]


def test_cached_is_whole_in_every_mode(model, tokens):
    for mode in ("fox", "open", "shuffled", "original"):
        with attention_mode(model, mode):
            whole = logits(model, tokens, use_cache=False)
            for cache in caches(model):
                close(decode(model, tokens, cache), whole)


def test_left_padding_is_no_padding(model, tokens):
    short = tokens[1, 9:]
    batch = torch.stack([tokens[0], torch.cat([torch.full((9,), 1), short])])
    mask = torch.ones_like(batch)
    mask[1, :9] = 0
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    alone = logits(model, short[None])[0]
    close(logits(model, batch, attention_mask=mask, position_ids=positions)[1, 9:], alone)
    for cache in caches(model):
        close(decode(model, batch, cache, mask, positions)[1, 9:], alone)


def test_documents_of_any_length_see_themselves_only(model, tokens):
    packed = torch.cat([tokens[0, :15], tokens[1, :1], tokens[1, :9]])[None]
    positions = torch.cat([torch.arange(15), torch.arange(1), torch.arange(9)])[None]
    out = logits(model, packed, position_ids=positions, use_cache=False)[0]
    for part, document in (
        (slice(0, 15), tokens[:1, :15]),
        (slice(15, 16), tokens[1:, :1]),
        (slice(16, 25), tokens[1:, :9]),
    ):
        close(out[part], logits(model, document)[0])


def test_caches_that_are_reordered_and_repeated_go_on_rightly(model, tokens):
    whole = logits(model, tokens, use_cache=False)
    cache: Any = DynamicCache(config=model.config)
    logits(model, tokens[:, :10], **{CACHE: cache})
    cache.reorder_cache(torch.tensor([1, 0]))
    close(logits(model, tokens.flip(0)[:, 10:], **{CACHE: cache}), whole.flip(0)[:, 10:])
    cache.crop(10 - LENGTH)
    cache.batch_repeat_interleave(2)
    again = tokens.flip(0).repeat_interleave(2, 0)
    close(logits(model, again[:, 10:], **{CACHE: cache}), whole.flip(0).repeat_interleave(2, 0)[:, 10:])


def test_drafted_tokens_change_nothing(model, pico_llama, tokens):
    plain = model.generate(tokens[:1], use_cache=False, **GREEDY)
    assert torch.equal(model.generate(tokens[:1], assistant_model=pico_llama(), **GREEDY), plain)
    assert torch.equal(model.generate(tokens[:1], prompt_lookup_num_tokens=3, **GREEDY), plain)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable")  # renamed in later versions of transformers
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("part", PARTS)
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


ANNEAL = {"rope": "anneal", "anneal_tokens": 9, "annealed_tokens": 4}


@pytest.mark.parametrize("spec", [ANNEAL, pytest.param({"pro": "all"}, marks=pytest.mark.slow)])
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_keeps_added_parts_in_float32(pico_fox, tokens, dtype):
    wide = pico_fox(pro="all", log_n=6)
    expected = logits(wide, tokens)
    cast = wide.half() if dtype == torch.float16 else wide.bfloat16()
    added = {
        p.dtype for name, p in cast.named_parameters() if any(x in name for x in ("forget", "fox", "shift", "output_"))
    }
    assert added == {torch.float32}
    assert (logits(cast, tokens).float() - expected).norm() < 0.1 * expected.norm()
    close(
        decode(cast, tokens, DynamicCache(config=cast.config)).argmax(-1)[:, -1], logits(cast, tokens).argmax(-1)[:, -1]
    )
