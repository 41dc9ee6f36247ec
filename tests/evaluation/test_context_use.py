"""Trends of L(i) are named where their intervals allow it; P(l); how much context a model uses."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest

from retrofox.data.windows import Window
from retrofox.evaluation.context_use import ShortContexts, perplexities, short_contexts, trends, use_of_context
from retrofox.evaluation.evaluate import evaluate
from retrofox.evaluation.loss_report import summarise
from retrofox.evaluation.per_token_loss import slope, window_losses
from tests.evaluation.copying import copying_model, text_with_repeats, word_tokenizer

LENGTH = 2048


def synthetic(seed: int, per_octave: float, documents: int = 10, spread: float = 0.0) -> tuple[list, list]:
    """(losses, windows) of documents whose loss changes by so much per octave, with noise of 1 nat per token."""
    draw = np.random.default_rng(seed)
    position = np.arange(1, LENGTH)
    windows = [Window(n, np.zeros(LENGTH, np.int64)) for n in range(documents)]
    losses = [
        (draw.normal(3, 0.5) + draw.normal(per_octave, spread) * np.log2(position) + draw.normal(0, 1, LENGTH - 1))
        for _ in windows
    ]
    return losses, windows


def said(seed: int, per_octave: float, **options) -> str:
    losses, windows = synthetic(seed, per_octave, **options)
    [summary] = summarise({"model": losses}, windows, LENGTH).values()
    [sentence] = trends({"longest": LENGTH, "lines": [{"label": "it", **summary}]})
    return sentence.split(" per octave")[0]


def test_noise_is_called_flat_and_slopes_are_named():
    words = [said(seed, 0.0) for seed in range(20)]
    assert sum("flat" in text for text in words) >= 17  # one in twenty is expected to fall outside
    assert all("falling (-0." in said(seed, -0.1) for seed in range(5))
    assert all("rising (+0." in said(seed, 0.1) for seed in range(5))


def test_documents_that_disagree_make_a_slope_flat():
    """The mean slope is not 0, but neither is the spread of it over documents small."""
    words = [said(seed, -0.02, documents=5, spread=0.3) for seed in range(10)]
    assert sum("flat" in text for text in words) >= 8


def test_one_document_gets_no_word():
    losses, windows = synthetic(0, -0.5, documents=1)
    summary = summarise({"model": losses}, windows, LENGTH)["model"]
    assert summary["slope_per_doubling"]["trend"] is None
    [sentence] = trends({"longest": LENGTH, "lines": [{"label": "it", **summary}]})
    assert not {"flat", "falling", "rising"} & set(sentence.split())
    assert "only one document" in sentence


def test_documents_too_short_for_a_slope_are_not_called_one_document():
    losses, windows = [np.zeros(8)] * 12, [Window(n, np.zeros(9, np.int64)) for n in range(12)]
    summary = summarise({"model": losses}, windows, 9)["model"]
    [sentence] = trends({"longest": 9, "lines": [{"label": "it", **summary}]})
    assert sentence == "beyond position 8 no document reaches, so no trend of the loss is named"


def test_the_interval_of_a_slope_covers_the_true_one():
    covered = 0
    for seed in range(60):
        losses, windows = synthetic(seed, -0.05, documents=6, spread=0.05)
        low, high = slope(losses, windows, 16, LENGTH, np.log2)["interval"]
        covered += low <= -0.05 <= high
    assert covered >= 52


def test_perplexity_is_that_of_the_first_tokens():
    loss = np.array([3.0, 1.0, 2.0])
    assert perplexities(loss) == pytest.approx(np.exp([3.0, 2.0, 2.0]))


def test_contexts_are_chosen_and_refused():
    assert short_contexts("auto", 1024) == [16, 32, 64, 128, 256, 512]
    assert short_contexts(["512", 64], 1024) == [64, 512]
    assert short_contexts((), 1024) == []
    for asked in (["15"], ["513"], ["many"]):
        with pytest.raises(ValueError, match="short_context must"):
            short_contexts(asked, 1024)
    with pytest.raises(ValueError, match="no document has the 516 tokens"):
        ShortContexts([32, 512], [Window(0, np.zeros(515, np.int64))])


def test_with_all_of_its_context_nothing_is_left_to_use(pico_fox):
    """A stretch that starts right after the longest context sees the very text that the whole window has."""
    draw, model = np.random.default_rng(0), pico_fox()
    windows = [Window(n, draw.integers(0, 288, 128 + 4)) for n in range(3)]
    short = ShortContexts([32, 128], windows)
    assert short.stretches == [[128]] * 3
    seen: list[int] = []
    table = short.measure(model, window_losses(model, windows), batch=2, advance=seen.append)
    assert sum(seen) == short.tokens == 3 * (32 + 3 + 128 + 3)
    assert table[1]["excess"]["mean"] == pytest.approx(0, abs=1e-5)
    assert abs(table[0]["excess"]["mean"]) > 1e-3
    for row in table:
        kept = [window.token_ids[128 - row["tokens"] :] for window in windows]
        losses = window_losses(model, [Window(n, ids) for n, ids in enumerate(kept)])
        assert row["loss"]["mean"] == pytest.approx(np.mean([loss[-4:] for loss in losses]), abs=1e-5)


def test_a_model_that_copies_uses_context_as_far_as_its_text_repeats(tmp_path, capsys):
    words = word_tokenizer()
    for seed in range(3):
        (tmp_path / f"{seed}.txt").write_text(text_with_repeats(seed), encoding="utf-8")
    files = [str(tmp_path / f"{seed}.txt") for seed in range(3)]
    options: dict = {"short_context": [64, 256], "tokenizer": words, "progress": False, "out": tmp_path / "out"}
    result = evaluate(copying_model(), None, files, 540, **options)
    [line] = result["lines"]
    near, far = line["short_context"]
    assert (near["tokens"], far["tokens"]) == (64, 256)
    assert near["excess"]["interval"][0] > 0.1  # half of what it copies there lies 400 tokens back
    assert "uses its context" in capsys.readouterr().out
    written = json.loads((tmp_path / "out" / "eval.json").read_text())
    assert written["lines"][0]["short_context"] == line["short_context"]
    assert (tmp_path / "out" / "short_context.png").read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader((tmp_path / "out" / "per_token_loss.csv").read_text().splitlines()))
    mean = np.cumsum([float(row["model"]) for row in rows]) / np.arange(1, len(rows) + 1)
    assert [float(row["model perplexity"]) for row in rows] == pytest.approx(np.exp(mean).tolist(), rel=1e-4)
    assert result["buckets"][-1]["perplexity"]["model"] == pytest.approx(np.exp(mean[-1]), rel=1e-4)


def test_what_is_said_of_context_follows_the_intervals():
    def row(tokens: int, low: float, high: float) -> dict:
        value = {"mean": (low + high) / 2, "interval": [low, high]}
        return {"tokens": tokens, "excess": value, "loss": {"mean": 3 + value["mean"], "interval": None}}

    text = use_of_context("it", [row(512, 0.1, 0.2), row(2048, 0.01, 0.03), row(8192, -0.01, 0.01)])
    assert "beyond the last 2k tokens lies 0.0200 nats (0.0100 to 0.0300), and nothing clear beyond 8k" in text
    assert "the longest context asked for" in use_of_context("it", [row(512, 0.1, 0.2)])
    assert "gains nothing clear from more than the last 512" in use_of_context("it", [row(512, -0.1, 0.1)])
    assert "harmed by long context: with the last 4k tokens only" in use_of_context("it", [row(4096, -2.0, -1.0)])
    assert "no interval" in use_of_context("it", [{**row(512, 0, 0), "excess": {"mean": 0.1, "interval": None}}])
