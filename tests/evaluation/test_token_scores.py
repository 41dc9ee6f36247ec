"""Scores of chosen tokens: those of a whole forward pass, in any batch; damaged weights and small GPUs are told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from retrofox.evaluation import token_scores
from retrofox.evaluation.token_scores import Scored, score_tokens


@pytest.fixture(scope="module")
def model(pico_llama) -> Any:
    return pico_llama()


@pytest.fixture(scope="module")
def texts() -> list[Scored]:
    draw = np.random.default_rng(0)
    return [Scored(draw.integers(0, 288, size), np.arange(1, size, 3)) for size in (40, 17, 64, 40, 9, 33)]


def test_scores_are_those_of_a_whole_forward_pass(model, texts):
    empty = Scored(texts[0].token_ids, np.empty(0, np.int64))
    *found, nothing = score_tokens(model, [*texts, empty], batch=2)
    for text, (loss, best) in zip(texts, found, strict=True):
        with torch.no_grad():
            log_p = model(input_ids=torch.tensor(text.token_ids)[None]).logits[0].log_softmax(-1)
        expected = [-log_p[at - 1, text.token_ids[at]].item() for at in text.positions]
        assert loss.tolist() == pytest.approx(expected, abs=1e-4)
        assert best.tolist() == log_p.argmax(-1)[text.positions - 1].tolist()
    assert [len(x) for x in nothing] == [0, 0]


def test_a_token_budget_makes_the_batches_and_the_bar_reaches_its_end(model, texts, monkeypatch):
    monkeypatch.setitem(token_scores.BATCH_TOKENS, "cpu", 100)
    done: list[int] = []
    found = score_tokens(model, texts, "auto", done.append)
    assert sum(done) == sum(text.needed for text in texts)
    assert 2 < len(done) < len(texts)
    for one, other in zip(found, score_tokens(model, texts, 1), strict=True):
        assert one[0] == pytest.approx(other[0], abs=1e-4)


def test_the_head_is_applied_to_chosen_positions_alone(model, texts):
    shapes: list[Any] = []
    hook = model.lm_head.register_forward_hook(lambda m, a, output: shapes.append(output.shape))
    score_tokens(model, texts[:2], 2)
    hook.remove()
    assert sum(shape[0] for shape in shapes) == sum(len(text.positions) for text in texts[:2])


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


def test_a_gpu_that_runs_out_of_memory_gets_smaller_batches(model, texts, small_gpu):
    score_tokens(model, texts, "auto")
    assert small_gpu[:2] == [6, 3]


def test_a_batch_that_was_asked_for_and_does_not_fit_is_refused(model, texts, small_gpu):
    with pytest.raises(ValueError, match=r"out of memory at batch 4 x 61 tokens; lower the batch"):
        score_tokens(model, texts, 4)


def test_damaged_weights_are_told(pico_llama, texts):
    model = pico_llama()
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(ValueError, match="the loss at position 1 of a text is nan in float32"):
        score_tokens(model, texts[:1])


def test_tokens_outside_the_vocabulary_are_refused(model):
    with pytest.raises(ValueError, match="vocabulary of 288"):
        score_tokens(model, [Scored(np.array([1, 300]), np.array([1]))])
