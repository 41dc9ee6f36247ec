"""Heads that look facts up: measured with the gates on, and told beside the heads that stay open."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from retrofox.anatomy import attentions
from retrofox.data.windows import Window
from retrofox.evaluation.gates import measure_needle_heads
from retrofox.evaluation.gates_report import open_heads_sentence
from retrofox.evaluation.live_share import measure_live_share
from retrofox.loading.loaded_model import LoadedModel

TEXT = "The fox keeps stones beside the river, and counts them every winter evening. " * 40


@pytest.fixture
def windows(pico_tokenizer) -> list[Window]:
    return [Window(np.array(pico_tokenizer(TEXT)["input_ids"][:900]))]


def test_closed_heads_see_no_planted_fact(pico_fox, pico_tokenizer, windows):
    model = pico_fox(stirred=False, config={"max_position_embeddings": 1024}, half_life=(1.0, 100_000.0))
    found = measure_needle_heads(LoadedModel(model, pico_tokenizer, "fox", "fox"), windows, False)
    assert found is not None
    scores = np.array(found)
    assert scores.shape == (len([*attentions(model)]), 4)
    assert (scores[:, 0] < 1e-3).all(), "half-lives of one token"
    assert (scores[:, 3] > 1e-3).all(), "half-lives beyond the text"


def test_a_gate_for_each_kv_head_has_the_most_of_its_query_heads(pico_fox, pico_tokenizer, windows):
    spec = {"stirred": False, "half_life": (1.0, 100_000.0), "config": {"max_position_embeddings": 1024}}
    opened = LoadedModel(pico_fox(**spec, gate_heads="kv"), pico_tokenizer, "fox", "fox")
    found = np.array(measure_needle_heads(opened, windows, False))
    assert found.shape == (2, 2)
    assert (found[:, 0] < found[:, 1]).all(), "half-lives of one token, and beyond the text"
    live, _ = measure_live_share(opened, windows, 8.0, (800,), progress=False)
    assert live["lengths"][0]["open_heads"] == ["0.1", "1.1"]


def test_texts_or_models_too_short_for_a_fact_tell_nothing(pico_fox, pico_tokenizer, windows):
    short = [Window(windows[0].token_ids[:400])]
    long = LoadedModel(pico_fox(config={"max_position_embeddings": 1024}), pico_tokenizer, "fox", "fox")
    assert measure_needle_heads(long, short, False) is None
    assert measure_needle_heads(LoadedModel(pico_fox(), pico_tokenizer, "fox", "fox"), windows, False) is None


def test_the_sentence_says_why_heads_stay_open():
    scores = {"0.0": 0.5, "0.1": 0.0, "1.0": 0.3, "1.1": 0.02}
    heads: list[dict[str, Any]] = [
        {"layer": int(name[0]), "head": int(name[2]), "needle_attention": score} for name, score in scores.items()
    ]
    live = {"lengths": [{"length": 32768, "open_heads": ["0.0", "1.1"]}]}
    assert open_heads_sentence(live, heads) == (
        "2 heads of 4 see all of 32k tokens; 1 of these look facts up (at least 10 % of attention on a planted fact): "
        "0.0 (50 %); closed heads that would: 1.0 (30 %)"
    )
    unknown = [{**head, "needle_attention": None} for head in heads]
    unmeasured = "; attention to planted facts was not measured: text or model is too short"
    assert open_heads_sentence(live, unknown) == f"2 heads of 4 see all of 32k tokens: 0.0, 1.1{unmeasured}"
    live = {"lengths": [{"length": 8192, "open_heads": []}]}
    assert open_heads_sentence(live, heads) == "no head sees all of 8k tokens"
    assert open_heads_sentence(live, unknown) == f"no head sees all of 8k tokens{unmeasured}"
