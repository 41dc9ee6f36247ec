"""One gate per kv head: the model whose query heads of a kv head have equal gates, with fewer parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import DynamicCache, StaticCache

import retrofox
from retrofox import FoxSpec
from retrofox.anatomy import attention_mode, attentions
from retrofox.conversion.directory import GATES_SHARD
from retrofox.conversion.report import print_conversion
from tests.model.conftest import decode

LAYERS, HEADS, KV_HEADS, HIDDEN = 2, 4, 2, 32


@pytest.fixture(scope="module")
def shared(pico_fox) -> Any:
    return pico_fox(gate_heads="kv")


@pytest.fixture(scope="module")
def repeated(pico_fox, shared) -> Any:
    """The model with a gate per query head, equal within each kv head."""
    model = pico_fox()
    for (_, ours), (_, theirs) in zip(attentions(model), attentions(shared), strict=True):
        for name, value in theirs.forget_gate.named_parameters():
            getattr(ours.forget_gate, name).data.copy_(value.repeat_interleave(HEADS // KV_HEADS, 0))
    return model


@pytest.mark.parametrize("mode", ["fox", "open", "original"])
def test_a_text_is_read_alike_and_caches_keep_a_shared_gate_once(shared, repeated, tokens, mode):
    found = []
    for model, gates in ((shared, KV_HEADS), (repeated, HEADS)):
        caches: list[Any] = [DynamicCache(), StaticCache(config=model.config, max_cache_len=tokens.shape[1])]
        with attention_mode(model, mode):
            found.append([decode(model, tokens, cache) for cache in caches])
        grown, static = (cache.layers[0] for cache in caches)
        assert grown.sums.shape[1] // 2 == static.twin.keys.shape[-1] == gates
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


def test_a_shared_gate_has_the_gradients_of_its_query_heads(shared, repeated, tokens):
    for model in (shared, repeated):
        model.zero_grad()
        model(tokens, use_cache=False).logits.square().mean().backward()
    for (_, ours), (_, theirs) in zip(attentions(shared), attentions(repeated), strict=True):
        for name, value in ours.forget_gate.named_parameters():
            summed = getattr(theirs.forget_gate, name).grad.unflatten(0, (KV_HEADS, -1)).sum(1)
            torch.testing.assert_close(value.grad, summed, rtol=1e-4, atol=1e-7)


def test_a_conversion_writes_them_and_says_so(pico_checkpoint, tmp_path, capsys):
    report = retrofox.convert(pico_checkpoint, tmp_path / "out", fox=FoxSpec(gate_heads="kv", half_life=(8, 64)))
    assert report["parity"]["equal"]
    assert report["plan"]["half_lives_tokens"] == pytest.approx([8, 64])
    assert {t.shape[0] for t in load_file(tmp_path / "out" / GATES_SHARD).values()} == {KV_HEADS}
    print_conversion(report, tmp_path / "out")
    assert "data, one per kv head, half-lives of 8 to 64 tokens" in capsys.readouterr().out


def test_measured_gates_are_as_many_and_start_where_those_of_query_heads_do(pico_checkpoint, tmp_path):
    (tmp_path / "text.txt").write_text("the fox forgets many different foxes beside these rivers. " * 60)
    texts = [str(tmp_path / "text.txt")]

    def half_lives(heads: str) -> torch.Tensor:
        spec = FoxSpec(gate_heads=heads, init="measured", half_life=(8, 64))
        report = retrofox.convert(pico_checkpoint, tmp_path / heads, fox=spec, texts=texts, verify=False)
        return torch.tensor(report["start"]["half_lives"])

    ours, theirs = half_lives("kv"), half_lives("query")
    assert ours.shape == (LAYERS, KV_HEADS)
    assert torch.equal(ours.repeat_interleave(HEADS // KV_HEADS, -1), theirs)
