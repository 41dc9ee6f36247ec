"""Scores of chosen tokens: those of a whole forward pass, in any batch, also on a small GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from retrofox import anatomy
from retrofox.evaluation import token_scores
from retrofox.evaluation.token_scores import Scored, score_tokens


@pytest.fixture(scope="module", params=["pico_llama", "pico_fox", "odd"])
def model(request, pico_llama) -> Any:
    """A plain model, a converted one, and one whose logits are not its head's alone."""
    if request.param != "odd":
        return request.getfixturevalue(request.param)()

    class Odd(type(pico_llama())):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * 0.5
            return output

    model = pico_llama()
    model.__class__ = Odd
    model.config.model_type = "odd"
    return model


@pytest.fixture(scope="module")
def texts() -> list[Scored]:
    draw = np.random.default_rng(0)
    return [Scored(draw.integers(0, 288, size), np.arange(1, size, 3)) for size in (40, 17, 64, 40, 9, 33)]


def test_scores_are_those_of_a_whole_forward_pass(model, texts):
    empty = Scored(texts[0].token_ids, np.empty(0, np.int64))
    *found, nothing = score_tokens(model, [*texts, empty])
    for text, (loss, best) in zip(texts, found, strict=True):
        with torch.no_grad():
            log_p = model(input_ids=torch.tensor(text.token_ids)[None]).logits[0].log_softmax(-1)
        expected = [-log_p[at - 1, text.token_ids[at]].item() for at in text.positions]
        assert loss.tolist() == pytest.approx(expected, abs=1e-4)
        assert best.tolist() == log_p.argmax(-1)[text.positions - 1].tolist()
    assert [len(x) for x in nothing] == [0, 0]


def test_texts_of_unequal_length_are_not_padded_under_a_rope_that_depends_on_the_length(pico_llama):
    model = pico_llama(rope_scaling={"rope_type": "dynamic", "factor": 4.0})
    draw = np.random.default_rng(0)
    texts = [Scored(draw.integers(0, 288, size), np.arange(1, size)) for size in (400, 100, 100)]
    for text, (loss, _) in zip(texts, score_tokens(model, texts), strict=True):
        [(alone, _)] = score_tokens(model, [text])
        assert loss == pytest.approx(alone, abs=1e-4)


def test_a_token_budget_makes_the_batches_and_the_bar_reaches_its_end(pico_llama, texts, monkeypatch):
    monkeypatch.setitem(token_scores.BATCH_TOKENS, "cpu", 100)
    model, done = pico_llama(), []
    found = score_tokens(model, texts, done.append)
    assert sum(done) == pytest.approx(sum(text.needed for text in texts))
    assert max(done) < 100  # a batch has several layers
    for text, (loss, _) in zip(texts, found, strict=True):
        [(alone, _)] = score_tokens(model, [text])
        assert loss == pytest.approx(alone, abs=1e-4)


def test_the_head_is_applied_to_chosen_positions_a_few_at_a_time(pico_llama, texts, monkeypatch):
    monkeypatch.setitem(anatomy.LOGIT_BYTES, "cpu", 288 * 4 * 5)
    model, rows = pico_llama(), []
    model.lm_head.register_forward_hook(lambda m, a, output: rows.append(output.shape[0]))
    score_tokens(model, texts[:2])
    assert max(rows) <= 5
    assert sum(rows) == sum(len(text.positions) for text in texts[:2])


@pytest.fixture
def small_gpu(monkeypatch) -> list[int]:
    """Rows of each batch that was tried; batches of more than three are too large."""
    tried: list[int] = []
    original = token_scores._score

    def score(texts: Any, *rest: Any) -> Any:
        tried.append(len(texts))
        if len(texts) > 3:
            raise torch.cuda.OutOfMemoryError
        return original(texts, *rest)

    monkeypatch.setattr(token_scores, "_score", score)
    return tried


def test_a_gpu_that_runs_out_of_memory_gets_smaller_batches(pico_llama, texts, small_gpu):
    score_tokens(pico_llama(), texts)
    assert small_gpu[:2] == [6, 3]
