"""The captured step of a cache that forgets, uncaptured on a CPU: the full cache's logits from live keys alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from retrofox.acceleration import cuda_graph_decoding as captured
from retrofox.acceleration import forgetting_cache, pooled_cache
from retrofox.acceleration.forgetting_cache import ForgettingCache
from retrofox.acceleration.pooled_cache import PooledDecoding, PooledLayer
from retrofox.model.modeling_fox import CACHE
from tests.conftest import MLA
from tests.model.conftest import ids_of, mask_of

STEP = "the step of a captured graph, uncaptured on a CPU"
SPEC: dict[str, Any] = {"half_life": (1.0, 100.0), "horizon": 8.0}
OPTIONS: dict[str, Any] = {"max_new_tokens": 200, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
WINDOWS = {"sliding_window": 24}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sinks": {"sink_tokens": 4},
    "sinks, log n": {"sink_tokens": 2, "rope": "drop", "log_n": 64},
    "pro": {"pro": "all"},
    "gates of kv heads": {"gate_heads": "kv"},
    "open": {"rope": "keep", "half_life": (1e6, 1e6)},
    "windows": {"family": "mistral", "config": WINDOWS, "rope": "keep"},
    "windows in some layers, softcap": {
        "family": "gemma2", "config": {**WINDOWS, "query_pre_attn_scalar": 8}, "rope": "keep", "sink_tokens": 2,
    },
}  # fmt: skip


@pytest.fixture(autouse=True, params=[(), ("cpu",)], ids=["", "keys of a prompt are freed afterwards"])
def on_cpu(monkeypatch, small_pages, request):
    monkeypatch.setattr(captured, "DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(forgetting_cache, "LATER", request.param)
    for name in ("MOST", "ROOM", "SPARE"):  # pools are laid out again, and grow, within a test
        monkeypatch.setattr(pooled_cache, name, 24)
    lay_out = PooledLayer._lay_out

    def poisoned(self, moved, held, order, room, left):
        """What holds no key of a segment is NaN: what was freed, and room that nothing has been written to."""
        lay_out(self, moved, held, order, room, left)
        slots, _ = pooled_cache.slots_of(self.begin, self.held, self.device)
        for buffer in self._buffers:
            kept = buffer.index_select(2, slots)
            buffer.fill_(float("nan")).index_copy_(2, slots, kept)

    monkeypatch.setattr(PooledLayer, "_lay_out", poisoned)


@pytest.mark.parametrize("prompt", [40, 300])  # before and after the first key is forgotten
@pytest.mark.parametrize("spec", MODELS)
def test_logits_are_those_of_all_keys(pico_fox, monkeypatch, spec, prompt):
    model, ids, mask, seen = pico_fox(**SPEC | MODELS[spec]), ids_of(3, prompt), mask_of(3, prompt), []
    run = PooledDecoding._run
    monkeypatch.setattr(PooledDecoding, "_run", lambda *given: (run(*given), seen.append(given[0].logits.clone())))
    cache, positions = ForgettingCache(), (mask.cumsum(1) - 1).clamp_min(0)
    out = model.generate(ids, attention_mask=mask, position_ids=positions, **{CACHE: cache}, **OPTIONS)
    assert model.decoded_by == STEP
    mask = torch.nn.functional.pad(mask, (0, 200), value=1)
    with torch.no_grad():
        wanted = model(out, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0), use_cache=False).logits
    torch.testing.assert_close(torch.stack(seen, 1), wanted[:, prompt:-1], atol=1e-4, rtol=1e-4)
    assert cache.get_seq_length() == prompt + 199
    assert (cache.num_live < 0.7 * 2 * 3 * 2 * (prompt + 200)) == (spec != "open")


@pytest.mark.parametrize(("half_life", "most"), [((1.0, 4.0), 1), ((1e6, 1e6), 8)])
def test_pools_are_small_and_are_replaced_rarely(pico_fox, monkeypatch, half_life, most):
    """A captured graph holds addresses: each move costs a capture."""
    places, shares = set(), []
    run = PooledDecoding._run

    def noted(self, sampler):
        run(self, sampler)
        places.add(tuple(layer._buffers[0].data_ptr() for layer in self.running.layers))
        shares.append(sum(layer.fits for layer in self.running.layers) / (2 * 2 * 2 * self.fed))
        assert not self.cache.num_live

    monkeypatch.setattr(PooledDecoding, "_run", noted)
    model = pico_fox(**SPEC | {"half_life": half_life})
    model.generate(ids_of(2, 300), **{CACHE: ForgettingCache()}, **OPTIONS)
    assert len(places) <= most
    assert (shares[-1] < 0.6) == (most == 1)


@pytest.mark.parametrize(
    "spec", [{"sink_tokens": 3}, {"pro": ("k-shift", "v-shift")}, {"horizon": None, **MODELS["windows"]}]
)
def test_a_cache_goes_on_where_decoding_left_it(pico_fox, spec):
    """Turns of a chat, a crop between them, rows reordered: what a full cache would do."""
    model, turns = pico_fox(**SPEC | spec), []
    for made in (lambda: ForgettingCache(), lambda: DynamicCache(config=model.config)):
        cache: Any = made()
        text, mask = ids_of(3, 40), mask_of(3, 40)
        for turn in range(3):
            text = model.generate(text, attention_mask=mask, **{CACHE: cache}, **OPTIONS | {"max_new_tokens": 60})
            assert model.decoded_by == STEP
            assert cache.get_seq_length() == text.shape[1] - 1
            if "pro" not in spec and "config" not in spec:
                cache.crop(-7)
                text = text[:, :-7]
            order = torch.tensor([2, 0, 0])
            cache.reorder_cache(order)
            text, mask = text[order], torch.nn.functional.pad(mask[order], (0, text.shape[1] - mask.shape[1]), value=1)
            text = torch.cat([text, ids_of(3, 5, seed=turn)], 1)
            mask = torch.nn.functional.pad(mask, (0, 5), value=1)
        turns.append(text)
    assert torch.equal(*turns)


def test_a_crop_below_what_was_forgotten_is_refused(pico_fox):
    model, cache = pico_fox(**SPEC, sink_tokens=4), ForgettingCache()
    model.generate(ids_of(2, 40), attention_mask=mask_of(2, 40), **{CACHE: cache}, **OPTIONS)
    cache.crop(-16)
    with pytest.raises(ValueError, match="has forgotten keys"):
        cache.crop(-180)


def test_what_can_not_be_captured_says_why(pico_fox):
    def reason(model, rows: int, tokens: int, cache=None, **more) -> str:
        given = {CACHE: ForgettingCache() if cache is None else cache, **OPTIONS, "max_new_tokens": 10, **more}
        model.generate(ids_of(rows, tokens), **given)
        return model.decoded_by

    model, cache, mask = pico_fox(**SPEC, sink_tokens=4), ForgettingCache(), torch.ones(2, 20, dtype=torch.long)
    mask[1, :17] = 0
    assert "shorter than its sinks" in reason(model, 2, 20, attention_mask=mask)
    mask[1, :17], mask[1, 5] = 1, 0
    with torch.no_grad():
        model(ids_of(2, 20), attention_mask=mask, **{CACHE: cache})
    assert "mask with holes" in reason(model, 2, 25, cache=cache)
    assert "latent" in reason(pico_fox(family="youtu", config=MLA, rope="keep", **SPEC), 1, 20)


@pytest.mark.parametrize(("where", "kept"), [("_lay_out", 0), ("update", 40), ("returned", 0)])
def test_memory_that_runs_out_leaves_a_cache_that_goes_on_or_says_why_not(pico_fox, monkeypatch, where, kept):
    model, ids, cache, calls = pico_fox(**SPEC), ids_of(2, 40), ForgettingCache(), []
    wanted = model.generate(ids, **OPTIONS)
    slow = getattr(PooledLayer, where)

    def full(self, *args, **kwargs):
        calls.append(None)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("none left")
        return slow(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(PooledLayer, where, full)
        with pytest.raises(RuntimeError, match="none left"):
            model.generate(ids, **{CACHE: cache}, **OPTIONS)
    assert cache.get_seq_length() == kept
    if where == "returned":  # the first layer is filled again, the second empty
        with pytest.raises(ValueError, match="interrupted call"):
            model.generate(ids, **{CACHE: cache}, **OPTIONS)
    else:
        again = model.generate(wanted[:, : kept + 1] if kept else ids, **{CACHE: cache}, **OPTIONS)
        assert torch.equal(again[:, :240], wanted)


def test_ctrl_c_while_a_step_is_counted_leaves_no_wrong_tokens(pico_fox, monkeypatch):
    model, ids, cache, slow = pico_fox(**SPEC), ids_of(2, 40), ForgettingCache(), PooledDecoding.step
    wanted = model.generate(ids, **OPTIONS)

    def step(self, sampler):
        slow(self, sampler)
        if self.fed == 100:
            for length in self.by_window.values():
                length.tokens -= 1  # not yet counted
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PooledDecoding, "step", step)
        with pytest.raises(KeyboardInterrupt):
            model.generate(ids, **{CACHE: cache}, **OPTIONS)
    kept = cache.get_seq_length()
    assert kept > 90
    given = {"attention_mask": torch.ones(2, kept + 1, dtype=torch.long), CACHE: cache}
    assert torch.equal(model.generate(wanted[:, : kept + 1], **given, **OPTIONS)[:, :240], wanted)
