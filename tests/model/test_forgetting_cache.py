"""The cache that forgets gives the full cache's logits and holds fewer keys."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import DynamicCache

from retrofox.acceleration import forgetting_cache
from retrofox.acceleration.forgetting_cache import ForgettingCache, ForgettingLayer
from retrofox.anatomy import attentions, cached_heads
from retrofox.generation.chat import ChatSession
from retrofox.generation.generate import generate
from retrofox.loading.loaded_model import open_model
from retrofox.model.modeling_fox import CACHE
from tests.conftest import MLA
from tests.model.conftest import ids_of, mask_of
from tests.model.test_families import ROWS

SPEC: dict[str, Any] = {"half_life": (1.0, 12.0), "horizon": 8.0}
OTHERS = [{"horizon": None}, {"sink_tokens": 4}, {"rope": "drop", "log_n": 64}, {"pro": "all"}, {"gate_heads": "kv"}]
OPTIONS: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
FULL = {"cache_implementation": "dynamic"}
pytestmark = pytest.mark.usefixtures("small_pages")


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


def compared(model, sizes=(40, 1), length=540, rows=3, on_the_edge=0) -> ForgettingCache:
    """The cache after a text whose logits it gave to rounding.

    on_the_edge: tokens from which rounding may hide, or show, a key whose weight has just decayed to e^-8.
    """
    ids, mask, cache = ids_of(rows, length), mask_of(rows, length), ForgettingCache()
    found = logits(model, ids, mask, cache, sizes)
    wanted = logits(model, ids, mask, DynamicCache(config=model.config), sizes)
    error = ((found - wanted).abs() - 1e-4 * wanted.abs()).amax(-1)[mask.bool()]
    assert error.max() < (1e-3 if on_the_edge else 1e-4)
    assert (error > 1e-4).sum() <= on_the_edge
    return cache


@pytest.mark.parametrize("sizes", [(40, 1), (300, 7, 64, 1)], ids=str)
def test_logits_are_the_full_caches_over_540_tokens(pico_fox, sizes):
    cache = compared(pico_fox(**SPEC), sizes)
    assert cache.num_live < 0.2 * 2 * 3 * 2 * 540


def test_a_key_stays_two_pages_longer_than_it_is_seen(pico_fox):
    """A half-life of 60 tokens and a horizon of 8 nats let 693 keys be seen."""
    cache = compared(pico_fox(rope="keep", gate="fixed", half_life=(60.0, 60.0), horizon=8.0), (700, 1), 880, rows=1)
    layers: list[Any] = cache.layers
    held = [group._buffers[0].shape[2] for layer in layers for group in layer.groups]
    assert max(held) <= 693 + 1 + 3 * forgetting_cache.PAGE  # and the sink, and room for a page to come


@pytest.mark.parametrize("name", ROWS)
def test_every_familys_logits_are_the_full_caches_over_10000_tokens(pico_fox, monkeypatch, name):
    monkeypatch.setattr(forgetting_cache, "PAGE", 256)
    model = pico_fox(family=name.split()[0], config=ROWS[name], rope="keep", half_life=(1.0, 60.0), horizon=8.0)
    cache = compared(model, (2048, 700, 1, 300, 1, 1, 511), 10_000, rows=2, on_the_edge=3)
    layers: list[Any] = cache.layers
    assert cache.num_live < 0.15 * sum(len(layer) * layer.seen for layer in layers)


@pytest.mark.parametrize("spec", OTHERS, ids=str)
def test_other_retrofits_forget_alike(pico_fox, spec):
    compared(pico_fox(**SPEC | spec))


def test_a_latent_is_freed_when_the_last_of_its_heads_has_forgotten_it(pico_fox):
    model = pico_fox(family="youtu", config=MLA, rope="keep", **SPEC)
    heads = cached_heads(next(attentions(model))[1])[0]  # 4 with transformers that cache what the latent expands to
    assert compared(model).num_live < 0.25 * 2 * 3 * heads * 540


def test_bfloat16_loses_no_more_than_with_the_full_cache(pico_fox):
    model, ids, mask = pico_fox(**SPEC), ids_of(3, 300), mask_of(3, 300)
    whole = logits(model, ids, mask, DynamicCache(), (40, 1))[mask.bool()]
    model.to(torch.bfloat16)
    lost = [(logits(model, ids, mask, x, (40, 1))[mask.bool()] - whole) for x in (ForgettingCache(), DynamicCache())]
    forgetting, full = (float(x.double().square().mean().sqrt()) for x in lost)
    assert forgetting < 1.05 * full


@torch.no_grad()
def test_a_layer_frees_its_keys_while_the_second_next_runs(pico_fox):
    model, ids, cache = pico_fox(**SPEC, config={"num_hidden_layers": 4}), ids_of(1, 800), ForgettingCache()
    model(ids, **{CACHE: cache})
    layers: list[Any] = cache.layers
    assert [layer.starts is None for layer in layers] == [False, False, True, True]
    with pytest.raises(ValueError, match="has forgotten keys"):
        layers[3].crop(-300)
    assert [layer.starts is None for layer in layers] == [False, False, True, False]
    cache.settle()
    assert layers[2].starts is not None


@torch.no_grad()
def test_a_short_prompts_keys_are_freed_with_the_next_token(pico_fox, monkeypatch):
    monkeypatch.setattr(forgetting_cache, "LATER", ("cpu",))
    model, ids, caches = pico_fox(**SPEC), ids_of(1, 801), [ForgettingCache(), ForgettingCache()]
    for cache, large in zip(caches, (1 << 30, 0), strict=True):
        monkeypatch.setattr(forgetting_cache, "LARGE", large)
        model(ids[:, :800], **{CACHE: cache})
    assert caches[0].num_live == 2 * 2 * 800 > 2 * caches[1].num_live
    found = [model(ids[:, 800:], **{CACHE: cache}).logits for cache in caches]
    assert abs(caches[0].num_live - caches[1].num_live) < 2 * 2 * 16
    torch.testing.assert_close(*found)


def test_sinks_stay(pico_fox):
    """The first keys of a row in a full cache are the first of each of its kv heads' rows."""
    model, ids, mask = pico_fox(**SPEC, sink_tokens=4), ids_of(3, 400), mask_of(3, 400)
    found, wanted = ForgettingCache(), DynamicCache(config=model.config)
    for cache in (found, wanted):
        logits(model, ids, mask, cache, (400,))
    found.settle()
    layer: Any = found.layers[0]
    assert layer.starts is not None
    for group, pairs in zip(layer.groups, layer.pairs, strict=True):
        for keys, pair in zip(group.keys, pairs, strict=True):
            row, head = divmod(pair, 2)
            full = wanted.layers[0].keys[row, head, 11 * row :]  # type: ignore[index]
            torch.testing.assert_close(keys[0, :4], full[:4])


def test_a_freed_key_is_never_read(pico_fox, monkeypatch):
    """What was let go is NaN from then on, and so is room that nothing has been written to."""
    freed = []

    def buffers(layer: Any) -> list[torch.Tensor]:
        segments = [] if layer._segments is None else layer._segments[0]
        return [*segments, *(buffer for group in layer._groups for buffer in group._buffers)]

    def poisoned(change):
        def changed(self, *given):
            old = buffers(self)
            change(self, *given)
            used = {buffer.data_ptr() for buffer in buffers(self)}
            freed.extend(buffer.fill_(float("nan")) for buffer in old if buffer.data_ptr() not in used)
            for group in self._groups:
                for buffer in group._buffers:
                    buffer[:, :, group.get_seq_length() :] = float("nan")

        return changed

    for name in ("hold", "_take"):
        monkeypatch.setattr(ForgettingLayer, name, poisoned(getattr(ForgettingLayer, name)))
    compared(pico_fox(**SPEC), (40, 1, 1, 30, 1))
    assert len(freed) > 50


def test_open_gates_keep_every_key(pico_fox):
    model = pico_fox(rope="keep", half_life=(1e6, 1e6), horizon=8.0)
    assert compared(model).num_live >= 2 * 2 * (3 * 540 - 11 - 22)  # but those of the padding


@pytest.mark.parametrize(
    "more", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 25}], ids=str
)
def test_generate_forgets_unasked_and_gives_the_full_caches_tokens(pico_fox, kept, more):
    rows = 1 if "prompt_lookup_num_tokens" in more else 2
    model, ids, mask = pico_fox(**SPEC), ids_of(rows, 60), mask_of(rows, 60)
    found = model.generate(ids, attention_mask=mask, **OPTIONS, **more)
    assert kept[-1] < 0.75
    del kept[:]
    assert torch.equal(found, model.generate(ids, attention_mask=mask, **FULL, **OPTIONS, **more))
    assert not kept


def test_a_row_that_begins_after_the_first_part_is_forgotten_too(pico_fox, kept):
    model, ids, mask = pico_fox(**SPEC), ids_of(2, 120), torch.ones(2, 120, dtype=torch.long)
    mask[1, :40] = 0
    found = model.generate(ids, attention_mask=mask, prefill_chunk_size=25, **OPTIONS)
    assert kept[-1] < 0.5
    assert torch.equal(found[1:, 120:], model.generate(ids[1:, 40:], **FULL, **OPTIONS)[:, 80:])


def test_a_forgetting_assistant_helps_a_forgetting_model(pico_fox, kept):
    model, assistant, ids = pico_fox(**SPEC), pico_fox(**SPEC, sink_tokens=4), ids_of(1, 60)
    assistant.generation_config.num_assistant_tokens = 5
    wanted = model.generate(ids, **FULL, **OPTIONS)
    assert torch.equal(model.generate(ids, assistant_model=assistant, **OPTIONS), wanted)
    assert kept[-1] < 0.75


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing")  # peft under the newest transformers
def test_an_adapters_model_forgets(pico_fox, kept):
    torch.manual_seed(1)
    lora = LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)
    model: Any = get_peft_model(pico_fox(**SPEC), lora)
    found = model.generate(input_ids=ids_of(1, 60), **OPTIONS)
    assert kept[-1] < 0.75
    assert torch.equal(found, model.generate(input_ids=ids_of(1, 60), **FULL, **OPTIONS))


def test_a_chat_forgets_and_answers_as_without(pico_fox, pico_tokenizer, monkeypatch, kept):
    opened, answers = open_model(pico_fox(**SPEC), tokenizer=pico_tokenizer), []
    for forgets in (True, False):
        monkeypatch.setattr("retrofox.generation.generate.forgets", lambda model, answer=forgets: answer)
        session = ChatSession(opened, system="be brief")
        answers.append([session.reply(text, 30) for text in ("the fox forgets", "the gate", "and so on and on")])
        assert session.reused_tokens > 70
        assert type(session.cache) is (ForgettingCache if forgets else DynamicCache)
    assert kept[-1] < 0.3
    assert answers[0] == answers[1]


def test_a_chat_begins_anew_where_it_would_need_what_is_forgotten(pico_fox, pico_tokenizer):
    opened = open_model(pico_fox(**SPEC), tokenizer=pico_tokenizer)
    session = ChatSession(opened)
    session.reply("the fox forgets the gate, the gate forgets the fox", 60)
    session.messages[-1]["content"] = "another answer"
    answer = session.reply("and so on", 20)
    assert session.reused_tokens == 0
    other = ChatSession(opened)
    other.messages = session.messages[:2]
    assert other.reply("and so on", 20) == answer


def test_without_a_horizon_or_with_more_drafts_than_may_be_cropped_all_keys_stay(pico_fox, kept):
    pico_fox(**SPEC | {"horizon": None}).generate(ids_of(1, 60), **OPTIONS)
    pico_fox(**SPEC).generate(ids_of(1, 60), prompt_lookup_num_tokens=257, **OPTIONS)
    assert not kept


def test_generate_says_what_each_cache_takes(pico_fox, pico_tokenizer):
    model, prompt = pico_fox(**SPEC), "the gate is open and the fox forgets " * 20
    results = {
        kind: generate(model, [prompt], 40, tokenizer=pico_tokenizer, stream=False, cache=kind)
        for kind in ("auto", "full", "forgetting")
    }
    assert len({str(x["token_ids"]) for x in results.values()}) == 1
    taken = {kind: x["cache_bytes"] for kind, x in results.items()}
    assert taken["auto"] == taken["forgetting"] < 0.5 * taken["full"]
    windows = pico_fox(family="mistral", config={"sliding_window": 7})
    assert 0 < generate(windows, [prompt], 4, tokenizer=pico_tokenizer, stream=False)["cache_bytes"] < taken["full"]
    with pytest.raises(ValueError, match="needs a model with a horizon"):
        generate(windows, ["a"], tokenizer=pico_tokenizer, cache="forgetting")


@pytest.mark.parametrize("crop", [-15, 85], ids=["by 15", "to 85"])
def test_a_crop_within_a_page_is_exact_and_one_beyond_is_refused(pico_fox, crop):
    model, ids, mask, cache = pico_fox(**SPEC), ids_of(1, 120), mask_of(1, 120), ForgettingCache()
    wanted = logits(model, ids, mask, DynamicCache(config=model.config), (120,))
    logits(model, ids[:, :100], mask[:, :100], cache, (100,))
    cache.crop(crop)
    with torch.no_grad():
        again = model(ids[:, 85:], attention_mask=mask, position_ids=torch.arange(85, 120)[None], **{CACHE: cache})
    torch.testing.assert_close(again.logits, wanted[:, 85:], atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="has forgotten keys that a text of 60 tokens needs"):
        cache.crop(-60)


@pytest.mark.parametrize("change", ["reorder_cache", "batch_select_indices", "batch_repeat_interleave"])
def test_rows_that_move_take_their_heads_along(pico_fox, change):
    model, ids, mask, rows = pico_fox(**SPEC), ids_of(3, 200), mask_of(3, 200), torch.tensor([2, 0, 0])
    argument, moved = (2, torch.arange(3).repeat_interleave(2)) if "repeat" in change else (rows, rows)
    found = []
    for cache in (ForgettingCache(), DynamicCache(config=model.config)):
        logits(model, ids[:, :120], mask[:, :120], cache, (40, 1))
        getattr(cache, change)(argument)
        with torch.no_grad():
            given = {"position_ids": (mask.cumsum(1) - 1)[moved, 120:], CACHE: cache}
            found.append(model(ids[moved, 120:], attention_mask=mask[moved], **given).logits)
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


def test_rows_move_twice_between_two_tokens(pico_fox):
    model, ids, found = pico_fox(**SPEC), ids_of(1, 20), []
    for cache in (ForgettingCache(), DynamicCache(config=model.config)):
        logits(model, ids, torch.ones_like(ids), cache, (20,))
        cache.batch_repeat_interleave(3)
        cache.batch_select_indices(torch.tensor([2, 0]))
        with torch.no_grad():
            found.append(model(ids_of(2, 5), **{CACHE: cache}).logits)
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


def test_a_group_without_rows_is_left_out(pico_fox):
    model, ids, mask, cache = pico_fox(**SPEC), ids_of(3, 200), mask_of(3, 200), ForgettingCache()
    wanted = logits(model, ids, mask, DynamicCache(config=model.config), (200,))
    logits(model, ids[:, :180], mask[:, :180], cache, (40, 1))
    layers: list[Any] = cache.layers
    groups = [{pair // 2 for pair in pairs} for layer in layers for pairs in layer.pairs]  # 2 kv heads a row
    row = next(row for row in range(3) if any(row not in group for group in groups))
    rows: Any = torch.tensor([row] * 3)
    cache.reorder_cache(rows)
    with torch.no_grad():
        given = {"position_ids": (mask.cumsum(1) - 1)[rows, 180:], CACHE: cache}
        found = model(ids[rows, 180:], attention_mask=mask[rows], **given).logits
    torch.testing.assert_close(found, wanted[rows, 180:], atol=1e-4, rtol=1e-4)


def test_what_is_freed_is_decided_in_the_precision_of_the_sums():
    """Sums of two floats: far into a text, 2^25 and more, the first of the two has steps of four."""
    fallen = -(2.0**25) - torch.arange(200, dtype=torch.float64)[None, None]
    high = fallen.float()
    sums = torch.cat([high, (fallen - high.double()).float()], 1)[..., None]
    group = SimpleNamespace(sums=sums, keys=torch.empty(1, 1, 200, 1))
    layer = SimpleNamespace(groups=[group], bases=[0], _joined=lambda parts: parts[0])
    start = ForgettingLayer._faded(layer, 200, 30.5 / forgetting_cache.LOG2_E)  # type: ignore[arg-type]
    assert start.tolist() == [200 - 1 - 30]
