"""A cache that forgets: what it drops could not have mattered, whatever queries and keys come."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    DynamicCache,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import retrofox
from retrofox.model import attention as attention_module
from retrofox.model import forgetting
from retrofox.model.cache import CACHE, GateCache
from retrofox.model.forgetting import Bounds, ForgettingCache, ForgettingLayer, weight_bounds

QUERY, KEY, HEADS, KV_HEADS, WIDTH = 3.0, 2.0, 4, 2, 8
OPTIONS: dict[str, Any] = {"scale": WIDTH**-0.5, "window": None, "sink": 0, "softcap": None, "prune": None}
PICO: dict[str, Any] = {
    "vocab_size": 288, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3, "max_position_embeddings": 1024,
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_pages(monkeypatch):
    monkeypatch.setattr(forgetting, "PAGE", 4)
    monkeypatch.setattr(forgetting, "LOOK", 12)
    monkeypatch.setattr(forgetting, "EVERY", 1)


def sized(x: torch.Tensor, norm: float) -> torch.Tensor:
    return x / x.norm(dim=-1, keepdim=True) * norm


def worst(tokens: int, generator: torch.Generator, spite: float) -> tuple[torch.Tensor, ...]:
    """q, k, v: part of the queries as long as they may be, against their own key and along the oldest ones, all as long
    as they may be."""
    q, k, v = (
        torch.randn(1, heads, tokens, WIDTH, generator=generator, dtype=torch.float64)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    q, k = sized(q, QUERY), sized(k, KEY)
    chosen = torch.rand(tokens, generator=generator) < spite
    chosen[0] = False
    first = k.repeat_interleave(HEADS // KV_HEADS, 1)[:, :, :1]
    q[:, :, chosen] = sized(first, QUERY)
    k[:, :, chosen] = -sized(k[:, :, :1], KEY)
    return q, k, v


def answered(cache: Any, q, k, v, log_f, options, chunks) -> torch.Tensor:
    outputs = []
    with torch.no_grad():
        for qc, kc, vc, fc in zip(*(x.split(chunks, 2) for x in (q, k, v)), log_f.split(chunks, 1), strict=True):
            gates = GateCache(cache, fc)
            keys, values = gates.update(kc, vc, 0)
            outputs.append(attention_module.attend(qc, keys, values, gates, None, None, options))
    return torch.cat(outputs, 1)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    log_eps=st.floats(-12.0, -0.7),
    decay=st.lists(st.floats(0.0, 3.0), min_size=HEADS, max_size=HEADS),
    spite=st.floats(0.0, 1.0),
    sink=st.integers(0, 3),
    softcap=st.sampled_from([None, 1.5]),
    chunk=st.integers(1, 30),
)
def test_outputs_stay_within_the_bound(seed, log_eps, decay, spite, sink, softcap, chunk):
    generator, tokens = torch.Generator().manual_seed(seed), 90
    q, k, v = worst(tokens, generator, spite)
    bursts = torch.rand(1, tokens, HEADS, generator=generator) ** 4 * 3
    log_f = -(torch.tensor(decay) * bursts).float()
    own = torch.full((HEADS,), -QUERY * KEY * WIDTH**-0.5).double()
    bounds = Bounds(torch.full((HEADS,), QUERY).double(), own, WIDTH**-0.5, softcap)
    options = OPTIONS | {"sink": sink, "softcap": softcap}
    cache: Any = DynamicCache()
    cache.layers.append(ForgettingLayer(bounds, log_eps, sink))
    found = answered(cache, q, k, v, log_f, options, chunk)
    full = answered(DynamicCache(), q, k, v, log_f, options, tokens)
    longest = v.norm(dim=-1).max()
    assert (found - full).norm(dim=-1).max() <= 2 * math.exp(log_eps) * longest + 1e-5
    layer = cache.layers[0]
    assert layer.kept() == [tokens - n for n in layer.dropped]
    assert all(n % 4 == 0 for n in layer.dropped)
    held = [part.keys[:, n] for part in layer.parts for n in range(part.keys.shape[1])]
    for number, found in enumerate(held):  # sinks and the newest are those of the text
        expected = torch.cat([k[:, number, :sink], k[:, number, sink + layer.dropped[number] :]], 1)
        assert torch.equal(found, expected)


def test_short_gates_forget_and_open_ones_do_not():
    generator = torch.Generator().manual_seed(0)
    q, k, v = worst(90, generator, 0.0)
    log_f = torch.zeros(1, 90, HEADS)
    log_f[..., :2] = -2.0
    own = torch.full((HEADS,), -QUERY * KEY * WIDTH**-0.5).double()
    cache: Any = DynamicCache()
    cache.layers.append(ForgettingLayer(Bounds(torch.full((HEADS,), QUERY).double(), own, WIDTH**-0.5), -8.0, 2))
    answered(cache, q, k, v, log_f, OPTIONS | {"sink": 2}, 10)
    kept = cache.layers[0].kept()
    assert kept[0] < 20
    assert kept[1] == 90


def test_heads_stay_together_while_they_drop_about_the_same():
    assert forgetting.together([8, 7, 6, 0, 0, 9]) == [(0, 3, 6), (3, 5, 0), (5, 6, 9)]
    assert forgetting.together([0, 0]) == [(0, 2, 0)]
    generator = torch.Generator().manual_seed(0)
    q, k, v = worst(90, generator, 0.0)
    own = torch.full((HEADS,), -QUERY * KEY * WIDTH**-0.5).double()
    bounds = Bounds(torch.full((HEADS,), QUERY).double(), own, WIDTH**-0.5)
    for decay, parts in (([0.0, 0.0], 1), ([2.0, 2.0], 1), ([2.0, 0.0], 2)):
        log_f = -torch.tensor(decay).repeat_interleave(2).expand(1, 90, HEADS).contiguous()
        cache: Any = DynamicCache()
        cache.layers.append(ForgettingLayer(bounds, -8.0, 2))
        answered(cache, q, k, v, log_f, OPTIONS | {"sink": 2}, 10)
        assert len(cache.layers[0].parts) == parts
        assert len(cache.layers[0].kept()) == KV_HEADS


def test_a_look_waits_for_the_device_once(monkeypatch):
    """However many heads, parts and keys: one transfer of the counts to the host."""
    from torch.utils._python_dispatch import TorchDispatchMode

    monkeypatch.setattr(forgetting, "LOOK", 1 << 15)
    monkeypatch.setattr(forgetting, "EVERY", 1 << 20)
    generator = torch.Generator().manual_seed(0)
    q, k, v = worst(400, generator, 0.0)
    own = torch.full((HEADS,), -QUERY * KEY * WIDTH**-0.5).double()
    log_f = -torch.tensor([2.0, 2.0, 0.1, 0.1]).expand(1, 400, HEADS).contiguous()
    cache: Any = DynamicCache()
    cache.layers.append(ForgettingLayer(Bounds(torch.full((HEADS,), QUERY).double(), own, WIDTH**-0.5), -8.0, 2))
    answered(cache, q, k, v, log_f, OPTIONS | {"sink": 2}, 400)
    reads = []

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name = str(function)
            if "_local_scalar_dense" in name or "nonzero" in name:
                reads.append(name)
            return function(*args, **(kwargs or {}))

    lists = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: lists.append(x.shape) or tolist(x))
    layer = cache.layers[0]
    with Reads(), torch.no_grad():
        found, again = layer.look()
    assert not again
    assert sum(n for _, runs in found for *_, n in runs) > 300
    assert lists == [(KV_HEADS,)]
    assert reads == []


def seen_norms(model, ids) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(largest |q| of each head, largest |k|, least own score) of each layer on a text."""
    found, original = [], attention_module.attend

    def noted(query, key, value, gates, mask, cu_seqlens, options):
        scale = options["scale"] or query.shape[-1] ** -0.5
        own = (query * key.repeat_interleave(query.shape[1] // key.shape[1], 1)).sum(-1) * scale
        found.append((query.norm(dim=-1).amax((0, 2)), key.norm(dim=-1).amax((0, 2)), own.amin((0, 2))))
        return original(query, key, value, gates, mask, cu_seqlens, options)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(attention_module, "attend", noted)
        model(ids, use_cache=False)
    return found


BASES: dict[str, Any] = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**PICO)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**PICO)),
}
SPECS: dict[str, dict[str, Any]] = {
    "plain": {},
    "log n": {"log_n": 16},
    "pro": {"pro": ("qk-norm", "k-shift", "v-shift", "output-gate")},
    "shift": {"pro": ("k-shift",)},
    "qwen2": {},
    "qwen3": {},
}


@pytest.fixture(params=SPECS)
def model(request, pico_fox, stir) -> Any:
    if request.param not in BASES:
        return pico_fox(**SPECS[request.param])
    torch.manual_seed(0)
    base = BASES[request.param]()
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.5)
    return stir(retrofox.convert(base, fox=retrofox.FoxSpec(half_life=(2.0, 200.0), max_wavelength=40.0))).eval()


def test_the_bounds_hold_for_what_a_model_makes(model):
    ids = torch.randint(2, 288, (4, 100), generator=torch.Generator().manual_seed(1))
    for layer, (query, _, own) in zip(model.model.layers, seen_norms(model, ids), strict=True):
        bounds = weight_bounds(layer.self_attn, layer.input_layernorm)
        assert bool((query.double() <= bounds.query).all())
        assert bool((own.double() >= bounds.own).all())


def test_own_scores_have_a_bound_that_some_hidden_state_reaches(pico_fox):
    """The least own score over all inputs: an eigenvector of the least eigenvalue has it."""
    layer = pico_fox(rope="drop", stirred=False).model.layers[0]
    attention = layer.self_attn
    bounds = weight_bounds(attention, layer.input_layernorm)
    gain = layer.input_layernorm.weight
    for head in range(4):
        wq = attention.q_proj.weight[head * 8 : head * 8 + 8] * gain
        wk = attention.k_proj.weight[head // 2 * 8 : head // 2 * 8 + 8] * gain
        product = (wq.t() @ wk).detach().double()
        least = torch.linalg.eigvalsh((product + product.t()) / 2)[0] * 32 * 8**-0.5
        assert bounds.own[head] == pytest.approx(float(least) * forgetting.SLACK**2, rel=1e-4)


@pytest.mark.parametrize("length", [40, 150])
def test_a_model_forgets_and_answers_alike(pico_fox, monkeypatch, length):
    """Prefilled in chunks, then token by token: logits as near to the full cache's as ln eps says, and less is kept."""
    model = pico_fox(half_life=(1.0, 1.2), sink_tokens=2, config={"initializer_range": 0.1})
    ids = torch.randint(2, 288, (2, length + 20), generator=torch.Generator().manual_seed(2))
    cache = model.forgetting_cache(-16.0)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        parts = [model(x, **{CACHE: cache}).logits for x in ids[:, :length].split(30, 1)]
        parts += [model(x, **{CACHE: cache}).logits for x in ids[:, length:].split(1, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-4, rtol=1e-4)
    report = cache.report()
    assert report["seen"] == length + 20
    assert cache.get_seq_length() == length + 20
    if length == 150:
        assert report["kept_share"] < 0.8
        held = sum(map(sum, report["kept"]))
        assert report["kept_share"] == pytest.approx(held / (4 * 170))


def test_a_text_cut_back_too_far_is_refused(pico_fox):
    model = pico_fox(half_life=(1.0, 1.2), config={"initializer_range": 0.1})
    ids = torch.randint(2, 288, (1, 150), generator=torch.Generator().manual_seed(2))
    cache: Any = ForgettingCache(model, -16.0)
    with torch.no_grad():
        model(ids, **{CACHE: cache})
        monkeypatched = forgetting.EVERY
        forgetting.EVERY = 1000
        try:
            model(ids[:, :9], **{CACHE: cache})
            cache.crop(-9)
            assert cache.get_seq_length() == 150
            with pytest.raises(RuntimeError, match="may need again"):
                cache.crop(-1)
        finally:
            forgetting.EVERY = monkeypatched


def test_assisted_decoding_forgets_and_takes_its_guesses_back(pico_fox):
    model = pico_fox(half_life=(1.0, 1.2), config={"initializer_range": 0.1})
    ids = torch.randint(2, 288, (1, 20), generator=torch.Generator().manual_seed(2)).repeat(1, 4)
    options: dict[str, Any] = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
    cache = model.forgetting_cache(-16.0)
    found = model.generate(ids, **{CACHE: cache}, prompt_lookup_num_tokens=5, **options)
    assert torch.equal(found, model.generate(ids, use_cache=False, **options))
    assert cache.report()["kept_share"] < 0.8


def test_layers_with_a_window_keep_it_and_do_not_count(stir):
    config = MistralConfig(**PICO, sliding_window=9)
    torch.manual_seed(0)
    model = stir(retrofox.convert(MistralForCausalLM(config), fox=retrofox.FoxSpec(half_life=(1.0, 2.0)))).eval()
    ids = torch.randint(2, 288, (1, 40), generator=torch.Generator().manual_seed(2))
    cache = model.forgetting_cache(-10.0)
    assert cache.report() == {"seen": 0, "kept_share": 1.0, "kept": [], "bytes": 0}
    with torch.no_grad():
        logits = model(ids, **{CACHE: cache}).logits
        torch.testing.assert_close(logits, model(ids, use_cache=False).logits)
    assert cache.report() == {"seen": 40, "kept_share": 1.0, "kept": [], "bytes": 0}


def test_what_can_not_forget_is_refused(pico_llama, pico_fox, stir):
    with pytest.raises(ValueError, match="only a converted model"):
        ForgettingCache(pico_llama(), -10.0)
    with pytest.raises(ValueError, match="without gates"):
        ForgettingCache(pico_fox(gate="none", rope="keep"), -10.0)
    for wrong in (0.0, 1.0, float("nan"), -math.inf):
        with pytest.raises(ValueError, match="below 0"):
            ForgettingCache(pico_fox(), wrong)
    model = pico_fox()
    ids, mask = torch.arange(4, 40).view(2, 18), torch.ones(2, 18, dtype=torch.long)
    mask[1, :5] = 0
    with pytest.raises(ValueError, match="whole rows"), torch.no_grad():
        model(ids, attention_mask=mask, **{CACHE: ForgettingCache(model, -10.0)})
    with pytest.raises(ValueError, match="inference"):
        model.train()(ids, **{CACHE: ForgettingCache(model, -10.0)})
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="merge the adapter"):
        ForgettingCache(model, -10.0)
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(**PICO)
    config._attn_implementation = "eager"
    gemma = retrofox.convert(Gemma2ForCausalLM(config), fox=retrofox.FoxSpec(half_life=(2.0, 9.0)))
    with pytest.raises(ValueError, match="no bound on the scores"):
        ForgettingCache(gemma, -10.0)
