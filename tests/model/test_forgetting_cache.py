"""The cache that forgets gives the full cache's logits and holds fewer keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache, Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM

import retrofox
from retrofox.acceleration import forgetting_cache
from retrofox.acceleration.forgetting_cache import ForgettingCache, ForgettingLayer
from retrofox.anatomy import attention_mode
from retrofox.model.modeling_fox import CACHE

SPEC: dict[str, Any] = {"half_life": (1.0, 12.0), "horizon": 8.0}
PICO = {
    "vocab_size": 288, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3,
}  # fmt: skip
OPTIONS: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}


@pytest.fixture(autouse=True)
def small_pages(monkeypatch):
    monkeypatch.setattr(forgetting_cache, "PAGE", 16)


def ids_of(rows: int, length: int) -> torch.Tensor:
    return torch.randint(2, 288, (rows, length), generator=torch.Generator().manual_seed(3))


def mask_of(rows: int, length: int) -> torch.Tensor:
    mask = torch.ones(rows, length, dtype=torch.long)
    for row in range(rows):
        mask[row, : 11 * row] = 0
    return mask


@torch.no_grad()
def logits(model, ids, mask, cache, sizes) -> torch.Tensor:
    """The text in calls of these sizes; the last repeats."""
    found, begin = [], 0
    while begin < ids.shape[1]:
        end = min(begin + sizes[min(len(found), len(sizes) - 1)], ids.shape[1])
        given = {CACHE: cache, "position_ids": (mask.cumsum(1) - 1).clamp_min(0)[:, begin:end]}
        found.append(model(ids[:, begin:end], attention_mask=mask[:, :end], **given).logits)
        begin = end
    return torch.cat(found, 1)


def compared(model, sizes=(40, 1)) -> ForgettingCache:
    ids, mask, cache = ids_of(3, 540), mask_of(3, 540), ForgettingCache()
    found = logits(model, ids, mask, cache, sizes)
    wanted = logits(model, ids, mask, DynamicCache(config=model.config), sizes)
    real = mask.bool()
    torch.testing.assert_close(found[real], wanted[real], atol=1e-4, rtol=1e-4)
    return cache


@pytest.mark.parametrize("sizes", [(40, 1), (300, 7, 64, 1)], ids=str)
def test_logits_are_the_full_caches_over_540_tokens(pico_fox, sizes):
    cache = compared(pico_fox(**SPEC), sizes)
    assert cache.num_live < 0.2 * 2 * 3 * 2 * 540


@pytest.mark.parametrize(
    "spec",
    [{"horizon": None}, {"sink_tokens": 4}, {"rope": "drop", "log_n": 64}, {"pro": "all"}, {"gate_heads": "kv"}],
    ids=str,
)
def test_other_retrofits_forget_alike(pico_fox, spec):
    compared(pico_fox(**SPEC | spec))


def test_sinks_stay(pico_fox):
    """The first keys of a row in a full cache are the first of each of its kv heads' rows."""
    model, ids, mask = pico_fox(**SPEC, sink_tokens=4), ids_of(3, 400), mask_of(3, 400)
    found, wanted = ForgettingCache(), DynamicCache(config=model.config)
    for cache in (found, wanted):
        logits(model, ids, mask, cache, (400,))
    layer: Any = found.layers[0]
    assert layer.pairs is not None
    for group, pairs in zip(layer.groups, layer.pairs, strict=True):
        for keys, pair in zip(group.keys, pairs, strict=True):
            row, head = divmod(pair, 2)
            full = wanted.layers[0].keys[row, head, 11 * row :]  # type: ignore[index]
            torch.testing.assert_close(keys[0, :4], full[:4])


def test_windows_and_softcaps():
    torch.manual_seed(0)
    mistral = MistralForCausalLM(MistralConfig(**PICO, sliding_window=24))
    gemma = Gemma2ForCausalLM(Gemma2Config(**PICO, sliding_window=24, query_pre_attn_scalar=8))
    for base in (mistral, gemma):
        compared(retrofox.convert(base, fox=retrofox.FoxSpec(rope="keep", **SPEC)).eval())


def test_open_gates_keep_every_key(pico_fox):
    model = pico_fox(rope="keep", half_life=(1e6, 1e6), horizon=8.0)
    assert compared(model).num_live == 2 * 2 * 3 * 540


@pytest.mark.parametrize("more", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_generate_gives_the_full_caches_tokens(pico_fox, more):
    model, ids, mask = pico_fox(**SPEC), ids_of(2, 60), mask_of(2, 60)
    wanted = model.generate(ids, attention_mask=mask, **OPTIONS, **more)
    found = model.generate(ids, attention_mask=mask, **{CACHE: ForgettingCache()}, **OPTIONS, **more)
    assert torch.equal(found, wanted)


def test_a_crop_within_a_page_is_exact_and_one_beyond_is_refused(pico_fox):
    model, ids, mask, cache = pico_fox(**SPEC), ids_of(1, 120), mask_of(1, 120), ForgettingCache()
    wanted = logits(model, ids, mask, DynamicCache(config=model.config), (120,))
    logits(model, ids[:, :100], mask[:, :100], cache, (100,))
    cache.crop(-15)
    with torch.no_grad():
        again = model(ids[:, 85:], attention_mask=mask, position_ids=torch.arange(85, 120)[None], **{CACHE: cache})
    torch.testing.assert_close(again.logits, wanted[:, 85:], atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="has forgotten keys that a text of 60 tokens needs"):
        cache.crop(-60)


def test_another_mode_than_it_forgot_in_is_refused(pico_fox):
    model, ids, cache = pico_fox(**SPEC), ids_of(1, 101), ForgettingCache()
    with torch.no_grad():
        model(ids[:, :100], **{CACHE: cache})
        with attention_mode(model, "open"), pytest.raises(ValueError, match=r"forgot by a horizon of 8\.0 nats"):
            model(ids[:, 100:], **{CACHE: cache})


def storage(layer: Any) -> int:
    """Bytes that a layer's tensors keep allocated."""
    parts = layer.groups if isinstance(layer, ForgettingLayer) else [layer]
    return sum(x.untyped_storage().nbytes() for part in parts for x in part._rooms)


def test_memory_falls(pico_fox):
    model, ids, mask, kept = pico_fox(**SPEC), ids_of(1, 2000), mask_of(1, 2000), []
    for cache in (ForgettingCache(), DynamicCache(config=model.config)):
        logits(model, ids, mask, cache, (2000,))
        kept.append(sum(map(storage, cache.layers)))
    assert kept[0] < 0.1 * kept[1]
