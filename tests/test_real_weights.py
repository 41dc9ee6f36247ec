"""The promises on SmolLM2-135M itself; the demo fetches and dequantises it (`make test` runs the demo first)."""

import os
from pathlib import Path

import pytest
import torch

import retrofox
from retrofox import FoxSpec
from retrofox.conversion.verify import TEXT
from retrofox.loading.base import load_base

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "retrofox" / "demo"
MODEL = CACHE / "SmolLM2-135M-Instruct.Q4_1"
pytestmark = pytest.mark.skipif(not MODEL.is_dir(), reason="SmolLM2-135M is not here: `make demo` fetches it")


@pytest.fixture(scope="module")
def base():
    model, tokenizer = load_base(MODEL)
    return model.eval(), tokenizer


@torch.no_grad()
def test_open_gates_and_kept_rope_are_the_base_model(base):
    model, tokenizer = base
    tokens = tokenizer(TEXT, return_tensors="pt").input_ids
    converted = retrofox.convert(model, fox=FoxSpec(rope="keep", init="open"))
    torch.testing.assert_close(converted(tokens).logits, model(tokens).logits, atol=1e-5, rtol=0)


@torch.no_grad()
def test_cached_greedy_decoding_equals_uncached_and_batched(base):
    model, tokenizer = base
    converted = retrofox.convert(model, fox=FoxSpec(rope="partial", max_wavelength=1400))
    prompts = ["The capital of France is", "Once upon a time there was an old fox who"]
    alone = []
    for prompt in prompts:
        tokens = tokenizer(prompt, return_tensors="pt")
        options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 2}
        cached = converted.generate(**tokens, **options)
        assert torch.equal(cached, converted.generate(**tokens, **options, use_cache=False))
        alone.append(cached[0, tokens.input_ids.shape[1] :])
    tokenizer.padding_side = "left"
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    together = converted.generate(**batch, max_new_tokens=8, do_sample=False, pad_token_id=2)
    for row, expected in zip(together[:, batch.input_ids.shape[1] :], alone, strict=True):
        assert torch.equal(row, expected)
