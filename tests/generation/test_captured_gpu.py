"""Captured decoding on a GPU: equal tokens to transformers' own loop, at real sizes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

import retrofox
from retrofox.acceleration import captured_step, pooled_cache
from retrofox.acceleration import cuda_graph_decoding as captured
from retrofox.acceleration.forgetting_cache import ForgettingCache
from retrofox.model.modeling_fox import CACHE

pytestmark = pytest.mark.gpu

SMOLLM2: dict[str, Any] = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "rope_theta": 100000.0,
    "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "initializer_range": 0.06,
}  # fmt: skip
SMALL: dict[str, Any] = SMOLLM2 | {"num_hidden_layers": 6}
OPTIONS: dict[str, Any] = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
SPECS: dict[str, dict[str, Any]] = {
    "partial": {"max_wavelength": 1400.0},
    "interpolated": {"rope": "interpolate", "rope_factor": 4.0, "rope_length": 8192},
    "rope dropped": {"rope": "drop"},
    "sinks, horizon, log n": {"sink_tokens": 3, "horizon": 8.0, "log_n": 512, "rope": "keep"},
    "horizon and sinks": {"half_life": (8.0, 200.0), "horizon": 8.0, "sink_tokens": 2, "rope": "keep"},
    "gates of kv heads": {"gate_heads": "kv", "half_life": (8.0, 200.0), "horizon": 8.0, "rope": "keep"},
    "bounded gates": {"max_half_life": 300.0, "rope": "keep"},
    "pro": {"pro": ("qk-norm", "output-norm", "output-gate", "k-shift", "v-shift"), "rope": "keep"},
}


def made(stir, spec: dict[str, Any], family: type = LlamaForCausalLM, config: Any = None) -> Any:
    torch.manual_seed(0)
    base = family(config or LlamaConfig(**SMALL))
    fox = retrofox.FoxSpec(**{"half_life": (64.0, 8192.0), **spec})
    return stir(retrofox.convert(base, fox=fox)).eval().cuda()


def tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(2, 49152, (rows, length), generator=torch.Generator().manual_seed(5)).cuda()


def both(monkeypatch, model, ids, **options) -> tuple[torch.Tensor, torch.Tensor]:
    options = OPTIONS | options
    torch.manual_seed(3)
    ours = model.generate(ids, **options)
    assert model.decoded_by == "a captured step"
    with monkeypatch.context() as patch:
        patch.setattr(captured, "DEVICES", ())
        torch.manual_seed(3)
        theirs = model.generate(ids, **options)
    return ours, theirs


def mask_of(ids: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(ids)
    for row in range(len(ids)):
        mask[row, : row * 37] = 0
    return mask


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("length", [5, 250, 2040])  # 250 and 2040: what a step reads grows within the text
def test_greedy_in_float32(stir, monkeypatch, spec, length):
    model = made(stir, SPECS[spec])
    ours, theirs = both(monkeypatch, model, tokens(1, length))
    assert torch.equal(ours, theirs)
    if length > 200:
        ids = tokens(3, length)
        ours, theirs = both(monkeypatch, model, ids, attention_mask=mask_of(ids))
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("length", [100, 3000])
def test_the_whole_model_in_bfloat16(stir, monkeypatch, length):
    """A step's logits are at most twice as far from those in float32 as those of the whole text at once."""
    model, seen = made(stir, SPECS["partial"], config=LlamaConfig(**SMOLLM2)).to(torch.bfloat16), []
    step = captured_step.Decoding.step
    noted = lambda *given: (step(*given), seen.append(given[0].logits.clone()))  # noqa: E731
    monkeypatch.setattr(captured_step.Decoding, "step", noted)
    out = model.generate(tokens(2, length), **OPTIONS)
    assert model.decoded_by == "a captured step"
    with torch.no_grad():
        whole, exact = (x(out, use_cache=False).logits[:, length:-1].float() for x in (model, deepcopy(model).float()))
    ours, theirs = ((x - exact).square().mean().sqrt() for x in (torch.stack(seen, 1)[:, : whole.shape[1]], whole))
    assert ours <= 2 * theirs


@pytest.mark.parametrize("length", [300, 1500])  # 300: nothing is forgotten before the first step
@pytest.mark.parametrize("spec", ["horizon and sinks", "sinks, horizon, log n", "gates of kv heads"])
def test_a_cache_that_forgets(stir, monkeypatch, spec, length):
    """The full cache's tokens, over pages that are freed and pools that grow, which are captured anew."""
    for name in ("MOST", "ROOM", "SPARE"):
        monkeypatch.setattr(pooled_cache, name, 256)
    model, ids, captures = made(stir, SPECS[spec]), tokens(3, length), []
    capture = captured_step.Decoding._capture
    monkeypatch.setattr(captured_step.Decoding, "_capture", lambda *given: (captures.append(None), capture(*given)))
    options = OPTIONS | {"max_new_tokens": 700, "attention_mask": mask_of(ids)}
    wanted = model.generate(ids, **options)
    captures.clear()
    cache = ForgettingCache()
    assert torch.equal(model.generate(ids, **{CACHE: cache}, **options), wanted)
    assert model.decoded_by == "a captured step"
    assert 1 <= len(captures) <= 4
    assert cache.num_live < 0.6 * 6 * 3 * 3 * (length + 700)
    longer = torch.cat([wanted, tokens(3, 5)], 1)
    options |= {"max_new_tokens": 40, "attention_mask": torch.nn.functional.pad(mask_of(ids), (0, 705), value=1)}
    assert torch.equal(model.generate(longer, **{CACHE: cache}, **options), model.generate(longer, **options))


def test_draws_are_the_same_and_leave_the_same_state(stir, monkeypatch):
    model, after = made(stir, SPECS["partial"]), []
    for devices in (("cuda",), ()):
        monkeypatch.setattr(captured, "DEVICES", devices)
        torch.manual_seed(3)
        end = model.generate(tokens(1, 40), **OPTIONS | {"do_sample": True, "temperature": 0.7, "top_p": 0.9})
        torch.manual_seed(3)
        ends = [int(end[0, 70])]  # ends early: the step too many is undrawn
        again = model.generate(
            tokens(1, 40), **OPTIONS | {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "eos_token_id": ends}
        )
        after.append((end.tolist(), again.tolist(), torch.rand(3, device="cuda").tolist()))
    assert after[0] == after[1]


def test_sliding_windows(stir, monkeypatch):
    config = MistralConfig(**SMALL, sliding_window=128)
    model = made(stir, {"rope": "keep"}, MistralForCausalLM, config)
    monkeypatch.setattr(captured_step, "SHIFT_EVERY", 16)
    for length in (20, 500):
        ours, theirs = both(monkeypatch, model, tokens(2, length))
        assert torch.equal(ours, theirs)


def test_ends_streams_and_goes_on(stir, monkeypatch):
    from transformers import DynamicCache

    model, ids, results = made(stir, SPECS["partial"]), tokens(1, 40), []

    class Seen:
        def __init__(self):
            self.values, self.ended = [], False

        def put(self, value):
            self.values += value.flatten().tolist()

        def end(self):
            self.ended = True

    free = model.generate(ids, **OPTIONS)
    for devices in (("cuda",), ()):
        monkeypatch.setattr(captured, "DEVICES", devices)
        cache: Any = DynamicCache(config=model.config)
        seen = Seen()
        text = model.generate(ids, **{CACHE: cache}, streamer=seen, **OPTIONS | {"eos_token_id": [int(free[0, 80])]})
        assert cache.get_seq_length() == text.shape[1] - 1
        assert seen.ended
        assert seen.values == text[0].tolist()
        longer = torch.cat([text, tokens(1, 5)], 1)
        results.append([text.tolist(), model.generate(longer, **{CACHE: cache}, **OPTIONS).tolist()])
    assert results[0] == results[1]


def test_threads_at_once_give_what_each_gives_alone(stir, caplog):
    model, options = made(stir, SPECS["partial"]), OPTIONS | {"max_new_tokens": 12}  # threads end while others capture
    prompts = [tokens(1, 64 + 32 * which).flip(1) for which in range(6)]
    alone = [model.generate(prompt, **options) for prompt in prompts]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda prompt: model.generate(prompt, **options), prompts * 8))
    for which, (one, other) in enumerate(zip(found, alone * 8, strict=True)):
        assert torch.equal(one, other), which
    assert "uncaptured" not in caplog.text
