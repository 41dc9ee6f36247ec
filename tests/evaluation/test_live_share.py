"""Live share: against the definition pair by pair, and measured on a model's own gates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from retrofox.anatomy import attentions, exempt_tokens
from retrofox.data.windows import Window
from retrofox.evaluation.live_share import BANDWIDTH, live_share, measure_live_share
from retrofox.loading.loaded_model import LoadedModel


def by_definition(c: np.ndarray, t: float, kv_heads: int, sinks: int = 0, window: int | None = None) -> Any:
    """(ops, reach, cache) by the full (H, T, T) matrix of pairs."""
    H, T = c.shape
    i, j = np.arange(T)[:, None], np.arange(T)
    visible = (j <= i) & (j > i - (window or T))
    alive = visible & ((c[:, :, None] - c[:, None] > -t) | (j < sinks))
    kept = alive[:, -1].reshape(kv_heads, H // kv_heads, T).any(1)
    last = visible[-1].sum()
    return alive.sum((1, 2)) / visible.sum(), alive[:, -1].sum(-1) / last, kept.sum(-1) / last


@pytest.mark.parametrize("options", [{}, {"sinks": 3}, {"window": 9}, {"window": 9, "sinks": 2}], ids=str)
def test_shares_are_those_of_the_definition(options):
    draw = np.random.default_rng(0)
    c = np.cumsum(-draw.exponential([[0.05], [0.6], [0.05], [0.2]], (4, 40)), axis=-1)
    found = live_share(c, 2.0, 2, **options)
    for own, expected in zip((found.ops, found.reach, found.cache), by_definition(c, 2.0, 2, **options), strict=True):
        assert own == pytest.approx(expected)


def test_a_decay_of_exactly_the_horizon_is_dead():
    assert live_share(np.array([[0.0, -16.0]]), 16.0, 1).cache == pytest.approx([0.5])


@pytest.fixture
def opened(pico_fox, pico_tokenizer) -> LoadedModel:
    """A pico model whose heads have half-lives of 2 to 1000 tokens."""
    return LoadedModel(pico_fox(stirred=False, half_life=(2.0, 1000.0)), pico_tokenizer, "fox", "fox")


def test_a_model_is_measured_at_each_length_from_its_own_gates(opened):
    windows = [Window(np.arange(3, 67), "a"), Window(np.arange(3, 43), "b")]
    result, decay = measure_live_share(opened, windows, 16.0, (32, 64, 128), progress=False)
    assert [(row["length"], row["documents"]) for row in result["lengths"]] == [(32, 2), (64, 1)]
    attention: Any = next(attentions(opened.model))[1]
    log_f = torch.nn.functional.logsigmoid(attention.forget_gate.bias.detach().double())
    c = (log_f[:, None] * torch.arange(1, 65)).numpy()
    torch.testing.assert_close(decay[0], -log_f)
    ops, _, cache = by_definition(c, 16.0, 2, sinks=exempt_tokens(attention))
    row = result["lengths"][1]
    assert row["ops"] == pytest.approx(ops.mean(), rel=1e-6)
    assert row["cache"] == pytest.approx(cache.mean(), rel=1e-6)
    assert row["open_heads"] == ["0.1", "0.2", "0.3", "1.1", "1.2", "1.3"]


def test_bytes_and_decoding_are_predicted_from_weights_and_live_cache(opened):
    found, _ = measure_live_share(opened, [Window(np.arange(3, 67), "a")], 16.0, (64,), progress=False)
    row = found["lengths"][0]
    entry = 2 * 8 * 4  # head_dim 8 in float32
    assert row["base_bytes_per_token"] == 2 * 2 * entry
    assert row["cache_bytes_per_token"] == pytest.approx(row["cache"] * 2 * 2 * (entry + 8 * 2))
    weights = sum(parameter.numel() * 4 for parameter in opened.model.parameters())
    if not opened.model.config.tie_word_embeddings:
        weights -= 288 * 32 * 4  # one row of the embedding is read
    for time, size in (("decode_ms", "cache_bytes_per_token"), ("base_decode_ms", "base_bytes_per_token")):
        assert row[time] == pytest.approx(1e3 * (weights + 64 * row[size]) / BANDWIDTH)
