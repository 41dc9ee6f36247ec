"""Recall: what counts as repeated, a model that copies, the control, batching, files, refusals."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retrofox import anatomy
from retrofox.evaluation.bootstrap import Bootstrap, student_t, trend
from retrofox.evaluation.readings import Reading, read
from retrofox.evaluation.recall import octave_edges, recall
from retrofox.evaluation.recall_control import GUARD, MOST_CUT, MOST_EARLIER, _in_turn, plan_control
from retrofox.evaluation.recall_report import verdicts
from retrofox.evaluation.repeats import WordStarts, find_repeats
from retrofox.loading.opened import open_model
from tests.evaluation.copying import copying_model, text_with_repeats, word_tokenizer


@pytest.fixture(scope="module")
def copier():
    return copying_model()


@pytest.fixture(scope="module")
def words():
    return word_tokenizer()


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("repeats")
    for seed in range(3):
        (folder / f"{seed}.txt").write_text(text_with_repeats(seed), encoding="utf-8")
    return [str(folder / f"{seed}.txt") for seed in range(3)]


def by_brute_force(ids: list[int], starts: list[bool], n: int) -> list[tuple[int, int]]:
    """(start of the n-gram, its last earlier end) per position, straight from the definition."""
    found = []
    for i in range(len(ids)):
        begins = [s for s in range(i + 1) if starts[s]][-n:]
        if len(begins) < n:
            found.append((-1, -1))
            continue
        gram = ids[begins[0] : i + 1]
        ends = [j for j in range(len(gram) - 1, i) if ids[j - len(gram) + 1 : j + 1] == gram]
        found.append((begins[0], max(ends, default=-1)))
    return found


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 4), min_size=1, max_size=60), n=st.integers(2, 4), heads=st.sets(st.integers(0, 4)))
def test_repeats_are_those_of_a_brute_force_search(ids, n, heads):
    starts = [token in heads for token in ids]  # a token starts a word or does not, wherever it stands
    repeats = find_repeats(np.array(ids), np.array(starts), n)
    expected = by_brute_force(ids, starts, n)
    assert repeats.start.tolist() == [start for start, _ in expected]
    assert repeats.previous.tolist() == [end for _, end in expected]
    for i in np.flatnonzero(repeats.previous >= 0).tolist():
        assert repeats.distance[i] == i - repeats.previous[i]
        occurrences = repeats.earlier(i)
        assert len(occurrences) == repeats.times[i]
        assert all(ids[a : b + 1] == ids[repeats.start[i] : i + 1] for a, b in occurrences)


def test_words_begin_at_spaces_line_breaks_and_characters_of_scripts_without_spaces(pico_tokenizer, words):
    starts = WordStarts(pico_tokenizer)
    text = "gates, and\nfoxes 東京"
    ids = np.array(pico_tokenizer(text)["input_ids"])
    begun = [pico_tokenizer.decode([i]) for i, first in zip(ids, starts(ids), strict=True) if first]
    assert [piece[:1] for piece in begun[:3]] == [" ", "\n", " "]
    assert not starts(ids)[0]  # "gates" with no space before it: unknown whether a word begins
    assert WordStarts(pico_tokenizer, "tokens")(ids).all()
    assert WordStarts(words)(np.array([0, 1, 2])).all()  # a special token, and two words


def test_a_model_that_copies_recalls_at_every_distance_until_its_source_is_cut(copier, words, texts):
    result = recall(copier, None, texts, 700, tokenizer=words, progress=False)
    rows = {row["from"]: row for row in result["octaves"] if row["tokens"]}
    assert set(rows) == {64, 256}  # repeats at 100 and at 400 tokens
    for row in rows.values():
        assert row["tokens"] == 3 * (50 - 3)  # all but the first three words of a stretch complete four
        assert row["accuracy"]["model"]["mean"] > 0.98
        control = row["control"]["model"]
        assert row["control"]["tokens"] >= 12
        assert control["whole"]["accuracy"]["mean"] > 0.98
        assert control["cut"]["accuracy"]["mean"] < 0.05
        assert control["recalled"]["loss"]["interval"][0] > 1.0
    assert verdicts(result)[0].startswith(f"{result['lines'][0]['label']} recalls text up to 256-512 tokens back")


def test_a_model_that_does_not_copy_recalls_nothing(copier, pico_llama, words, texts):
    other = pico_llama(vocab_size=700, max_position_embeddings=1024)
    result = recall(copier, other, texts, 700, tokenizer=words, progress=False)
    for row in result["octaves"]:
        if row["tokens"]:
            assert row["accuracy"]["base"]["mean"] < 0.1
            low, high = row["control"]["base"]["recalled"]["loss"]["interval"]
            assert low < 0.5
            assert high < 0.5 < row["control"]["model"]["recalled"]["loss"]["interval"][0]
            gap = row["difference"]["model"]
            assert gap["loss"]["mean"] == pytest.approx(row["loss"]["model"]["mean"] - row["loss"]["base"]["mean"])
            assert gap["accuracy"]["interval"][0] > 0.5
    assert len({line["label"] for line in result["lines"]}) == 2


def test_batches_and_chunks_change_no_number(copier, words, texts, monkeypatch):
    alone = recall(copier, None, texts, 650, tokenizer=words, progress=False)
    monkeypatch.setitem(anatomy.LOGIT_BYTES, "cpu", 4 * 700 * 5)  # five positions at a time
    widths: list[int] = []
    hook = copier.lm_head.register_forward_hook(lambda module, inputs, output: widths.append(output.shape[0]))
    together = recall(copier, None, texts, 650, batch=4, tokenizer=words, progress=False)
    hook.remove()
    assert max(widths) <= 5
    for one, other in zip(alone["octaves"], together["octaves"], strict=True):
        assert one["control"]["tokens"] == other["control"]["tokens"]
        if one["tokens"]:
            assert one["loss"]["model"]["mean"] == pytest.approx(other["loss"]["model"]["mean"], abs=1e-4)
            cut, too = (row["control"]["model"]["cut"]["loss"]["mean"] for row in (one, other))
            assert cut == pytest.approx(too, abs=1e-4)


def test_readings_are_the_losses_and_hits_of_a_whole_forward_pass(pico_llama):
    model, draw = pico_llama(), np.random.default_rng(0)
    readings = [Reading(draw.integers(0, 288, size), np.arange(1, size, 3)) for size in (40, 17, 64)]
    readings.append(Reading(readings[0].token_ids, np.empty(0, np.int64)))
    for reading, (loss, hit) in zip(readings, read(model, readings, batch=2), strict=True):
        with torch.no_grad():
            logits = model(torch.from_numpy(reading.token_ids)[None]).logits[0].log_softmax(-1).numpy()
        target = reading.token_ids[reading.positions]
        before = logits[reading.positions - 1]
        np.testing.assert_allclose(loss, -before[np.arange(len(target)), target], atol=1e-5)
        assert hit.tolist() == (before.argmax(-1) == target).tolist()


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), spread=st.integers(40, 400))
def test_a_control_cuts_every_source_and_nothing_near_a_measured_token(seed, spread):
    draw = np.random.default_rng(seed)
    ids = draw.integers(0, 5000, 1500)
    for _ in range(12):  # stretches that stand again later, some of them twice
        source = int(draw.integers(0, 700))
        place = int(draw.integers(source + spread, 1480))
        ids[place : place + 12] = ids[source : source + 12]
    repeats = find_repeats(ids, np.ones(1500, bool), 4)
    where = np.flatnonzero(repeats.distance >= 16)
    control = plan_control(ids, repeats, [where[::2], where[1::2]], 16, draw)
    assert all(len(reading.token_ids) >= (1 - MOST_CUT) * 1500 for reading in control.readings)
    assert len(control.positions) == len(set(control.positions.tolist()))
    for position, cut, other in zip(control.positions, control.cut, control.other, strict=True):
        gram = ids[repeats.start[position] : position + 1].tolist()
        for (number, index), stands in ((cut, 0), (other, repeats.times[position])):
            reading = control.readings[number]
            at, text = int(reading.positions[index]), reading.token_ids
            assert text[at - 3 : at + 1].tolist() == gram
            before = [j for j in range(3, at) if text[j - 3 : j + 1].tolist() == gram]
            assert len(before) == stands
        reading = control.readings[other[0]]
        at = int(reading.positions[other[1]])
        near = min(GUARD, int(position))
        assert reading.token_ids[at - near : at + 1].tolist() == ids[position - near : position + 1].tolist()


def test_a_control_of_none_costs_no_forward_pass(copier, words, texts):
    seen: list[int] = []
    hook = copier.model.register_forward_pre_hook(lambda *_: seen.append(1))
    result = recall(copier, None, texts[:2], 700, control=0, tokenizer=words, progress=False)
    hook.remove()
    assert len(seen) == 2
    assert all(row["control"]["tokens"] == 0 for row in result["octaves"])


def test_intervals_are_over_documents():
    draw = np.random.default_rng(0)
    counts = draw.integers(1, 50, 12).astype(float)
    sums = counts * draw.normal(2.0, 0.5, 12)
    found = Bootstrap(12).ratio(sums, counts)
    mean = sums.sum() / counts.sum()
    error = np.sqrt(12 / 11 * ((sums - mean * counts) ** 2).sum()) / counts.sum()  # linearised
    interval: Any = found["interval"]
    low, high = interval
    assert found["mean"] == pytest.approx(mean)
    assert (high - low) / 2 == pytest.approx(student_t(11) * error, rel=0.15)
    assert Bootstrap(1).ratio(sums[:1], counts[:1]) == {"mean": pytest.approx(sums[0] / counts[0]), "interval": None}
    assert Bootstrap(3).ratio(np.zeros(3), np.zeros(3)) == {"mean": None, "interval": None}
    assert [student_t(n) for n in (1, 2, 9)] == pytest.approx([12.7062, 4.3027, 2.2622], abs=1e-3)
    assert [trend(i) for i in ([0.1, 0.2], [-0.2, -0.1], [-0.1, 0.1], None)] == ["rising", "falling", "flat", None]


def test_a_single_document_has_no_interval_and_no_verdict(copier, words, texts, capsys):
    result = recall(copier, None, texts[0], 700, tokenizer=words, progress=False)
    assert all(row["loss"]["model"]["interval"] is None for row in result["octaves"])
    assert "no interval" in capsys.readouterr().out


def test_tables_and_files(copier, words, texts, tmp_path, capsys):
    result = recall(
        open_model(copier, tokenizer=words), [copier], texts, 700, tmp_path, tokenizer=words, progress=False
    )
    assert json.loads((tmp_path / "recall.json").read_text())["octaves"] == result["octaves"]
    rows = list(csv.DictReader((tmp_path / "recall.csv").read_text().splitlines()))
    assert len(rows) == 2 * len(result["octaves"])
    by_distance = [row for row in rows if row["from"] == "64"]
    assert float(by_distance[0]["accuracy"]) == result["octaves"][2]["accuracy"]["model"]["mean"]
    assert float(by_distance[0]["loss recalled low"]) > 1.0
    assert Path(result["files"]["png"]).read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "64-128" in printed
    assert "recalls text up to" in printed
    assert result["lines"][0]["label"] != result["lines"][1]["label"]


def test_octaves_end_at_the_length():
    assert octave_edges(32) == [16, 32]
    assert octave_edges(100) == [16, 32, 64, 100]
    assert octave_edges(8192)[-2:] == [4096, 8192]


def test_the_command_line_passes_every_option_on(run, pico_checkpoint, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the fox forgets the gate and then some other thing happens to it, " * 6, encoding="utf-8")
    arguments = ["recall", pico_checkpoint, "--data", text, "--length", 300, "--out", tmp_path / "out", "--seed", 7]
    (tmp_path / "short.txt").write_text("the fox and the fox", encoding="utf-8")
    arguments.insert(3, tmp_path / "short.txt")
    options = ["--ngram", 3, "--unit", "tokens", "--control", 2, "--max-documents", 1, "--batch", 2, "--device", "cpu"]
    options += ["--min-tokens", 100]
    code, printed, err = run(*arguments, *options, "--against", pico_checkpoint)
    assert code == 0, err
    result = json.loads((tmp_path / "out" / "recall.json").read_text())
    assert (result["ngram"], result["unit"], result["control"], result["seed"]) == (3, "tokens", 2, 7)
    assert [line["key"] for line in result["lines"]] == ["model", "base"]
    assert result["document_names"] == ["text.txt"]  # the other is too short
    assert "3 tokens seen before" in printed


def test_refusals(copier, words, texts, tmp_path, run):
    for options, message in (
        ({"length": 31}, "length must be at least 32"),
        ({"ngram": 1}, "ngram must be at least 2"),
        ({"unit": "letters"}, "unit must be one of words, tokens"),
        ({"control": -1}, "control must be a number of tokens"),
        ({"seed": -1}, "seed must be 0 or more, got -1"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"min_tokens": 1}, "min_tokens must lie between 2 and the length"),
        ({"min_tokens": 701, "length": 700}, "min_tokens must lie between 2 and the length"),
        ({"max_documents": 0}, "max_documents must be at least 1"),
        ({"length": 64}, "no token in .* completes 4 words that stood 16 or more tokens before"),
        ({"data": []}, "nothing to read"),
    ):
        with pytest.raises(ValueError, match=message):
            recall(copier, **{"data": texts, "tokenizer": words, "progress": False, "out": tmp_path / "out", **options})
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="n-gram has at least 2 words"):
        find_repeats(np.arange(5), np.ones(5, bool), 1)
    code, _, err = run("recall", "nowhere/at/all", "--data", texts[0])
    assert code == 2
    assert "no such model" in err


def test_turns_of_phrase_and_ngrams_over_their_own_source_are_not_sampled():
    draw = np.random.default_rng(0)
    phrase = np.array([900, 901, 902, 903])
    ids = np.concatenate([np.concatenate([draw.integers(0, 800, 20), phrase]) for _ in range(MOST_EARLIER + 4)])
    ids = np.concatenate([ids, np.full(6, 950)])  # the same token again and again: its 4-grams overlap
    repeats = find_repeats(ids, np.ones(len(ids), bool), 4)
    ends = np.flatnonzero(ids == 903)
    able = [*ends[1:], *np.flatnonzero(repeats.previous >= len(ids) - 6)]
    assert len(able) > len(ends)
    assert sorted(_in_turn([np.array(able)], repeats, 64, draw)) == ends[1 : MOST_EARLIER + 1].tolist()
