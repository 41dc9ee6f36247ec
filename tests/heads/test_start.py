"""Gates that start by measured attention distance, and heads that start open."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import retrofox
from retrofox import FoxSpec
from retrofox.anatomy import attentions
from retrofox.config import Source
from retrofox.conversion.directory import GATES_SHARD
from retrofox.conversion.report import print_conversion
from retrofox.half_lives import bias_from_half_life
from retrofox.heads.needles import needle_attention, plant
from retrofox.heads.start import Distances, documents_of, half_lives_by_distance, measure_start
from retrofox.surgery import make_plan

LENGTH = 256  # of the pico models' training
OPEN = 128.0 * LENGTH


@pytest.fixture
def text(tmp_path) -> str:
    (tmp_path / "text.txt").write_text("the fox forgets many different foxes beside these rivers, and so on. " * 60)
    return str(tmp_path / "text.txt")


@pytest.fixture
def base(pico_llama, saved, tmp_path) -> str:
    """A pico Llama trained to LENGTH tokens whose attention is far from uniform, with its tokenizer."""
    model = pico_llama(max_position_embeddings=LENGTH)
    for name, parameter in model.named_parameters():
        if "_proj" in name or "embed" in name:
            torch.nn.init.normal_(parameter, std=0.25)
    return str(saved(model, tmp_path / "base"))


def looking_back(heads: list[int], length: int) -> Any:
    """An attention each of whose heads looks so many tokens back."""

    def weights(start: int, stop: int) -> torch.Tensor:
        found = torch.zeros(len(heads), stop - start, stop)
        for head, distance in enumerate(heads):
            for query in range(start, stop):
                found[head, query - start, max(0, query - distance)] = 1.0
        return found

    return SimpleNamespace(query=torch.zeros(len(heads), length, 4), weights=weights)


def eager_attention(base: str, ids: torch.Tensor) -> list[torch.Tensor]:
    """Attention weights (H, T, T) of each layer, by transformers' own code."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    with torch.no_grad():
        return [layer[0] for layer in model(ids, output_attentions=True).attentions]


def test_the_median_distance_is_where_a_head_looks():
    distances = Distances(first_tokens=1)
    for length in (300, 200):
        distances(0, looking_back([0, 3, 64, 99], length))
        distances(1, looking_back([1, 2, 5, 7], length))
    assert distances.medians() == [[0, 3, 64, 99], [1, 2, 5, 7]]


def test_the_farther_a_head_looks_the_longer_its_half_life():
    found = half_lives_by_distance(torch.tensor([[70, 2], [9, 30], [5, 99]]), 16, 1024, [(2, 1), (0, 1)])
    expected = torch.tensor([[1024, torch.inf], [64, 256], [16, torch.inf]]).double()
    assert torch.allclose(found, expected)
    assert half_lives_by_distance(torch.tensor([[5]]), 16, 1024).tolist() == [[1024]]
    assert half_lives_by_distance(torch.tensor([[5, 5]]), 16, 1024)[0].tolist() == pytest.approx([16, 1024])


def test_distances_are_those_of_the_bases_attention(base, text, pico_tokenizer):
    model = retrofox.convert(base, fox=FoxSpec(init="measured", sink_tokens=3), texts=[text])
    start = measure_start(model, pico_tokenizer, [text])
    ids = torch.from_numpy(documents_of([text], pico_tokenizer)[0][:LENGTH]).long()[None]
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    for layer, weights in enumerate(eager_attention(base, ids)):
        half = weights[:, LENGTH // 2 :, 3:].double()
        for head, found in enumerate(start.distances[layer]):
            within = half[head][distance[LENGTH // 2 :, 3:] <= found].sum() / half[head].sum()
            below = half[head][distance[LENGTH // 2 :, 3:] < found].sum() / half[head].sum()
            assert below <= 0.5 <= within


def test_open_heads_are_those_that_attend_most_to_planted_facts(base, text, pico_tokenizer):
    model = retrofox.convert(base, fox=FoxSpec(init="measured", open_heads=2), texts=[text])
    start = measure_start(retrofox.convert(base), pico_tokenizer, [text])
    assert start.open_heads == []
    needles = plant(documents_of([text], pico_tokenizer), pico_tokenizer, LENGTH)
    total = torch.zeros(2, 4)
    for needle in needles:
        for layer, weights in enumerate(eager_attention(base, needle.token_ids)):
            answering = weights[:, needle.answer.start : needle.answer.stop]
            total[layer] += needle_attention(answering, needle.value) / len(needles)
    best = total.view(2, 2, 2).amax(-1).flatten().topk(2).indices.tolist()
    assert model.config.fox["open_heads"] == sorted([kv // 2, kv % 2] for kv in best)


def test_a_measured_start_lands_in_the_checkpoint(base, text, tmp_path, capsys):
    spec = FoxSpec(init="measured", half_life=(4, 64), max_half_life=64, open_heads=1)
    report = retrofox.convert(base, tmp_path / "out", fox=spec, texts=[text])
    assert report["parity"]["equal"]
    ((layer, kv_head),) = report["start"]["open_heads"]
    lives = report["start"]["half_lives"]
    assert lives[layer][2 * kv_head : 2 * kv_head + 2] == [OPEN, OPEN]
    closed = sorted(life for row in lives for life in row if life != OPEN)
    assert closed == pytest.approx([4, 4, 16, 16, 64, 64])  # the query heads of a kv head start alike
    shard = load_file(tmp_path / "out" / GATES_SHARD)
    for number, row in enumerate(lives):
        bias = shard[f"model.layers.{number}.self_attn.forget_gate.bias"]
        assert bias.tolist() == pytest.approx([bias_from_half_life(x) for x in row], rel=1e-5)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["fox"]["open_heads"] == report["plan"]["spec"]["open_heads"] == [[layer, kv_head]]
    assert FoxSpec.from_dict(retrofox.load(tmp_path / "out").config.fox).open_heads == ((layer, kv_head),)
    print_conversion(report, tmp_path / "out")
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "half-lives of 4 to 32 tokens at first, by measured attention distance, never over 64 tokens but in" in shown
    assert report["plan"]["half_lives_tokens"] == pytest.approx(
        [1 / (1 / 4 / n + 1 / 64) for n in (1, 16 ** (1 / 3), 16 ** (2 / 3), 16)]
    )


def test_a_live_model_is_measured_as_its_checkpoint(base, text, tmp_path):
    spec = FoxSpec(init="measured", open_heads=1)
    retrofox.convert(base, tmp_path / "out", fox=spec, texts=[text], verify=False)
    live, saved = retrofox.convert(base, fox=spec, texts=[text]), retrofox.load(tmp_path / "out")
    assert live.config.fox["open_heads"] == saved.config.fox["open_heads"]
    for (_, one), (_, other) in zip(attentions(live), attentions(saved), strict=True):
        assert torch.equal(one.forget_gate.bias, other.forget_gate.bias)


@pytest.mark.parametrize("gate", ["data", "bias", "fixed"])
def test_heads_may_be_named_instead_of_measured(pico_llama, gate):
    base = pico_llama(max_position_embeddings=LENGTH)
    model = retrofox.convert(base, fox=FoxSpec(gate=gate, half_life=(2, 16), open_heads=((1, 0), (1, 0))))
    assert model.config.fox["open_heads"] == [[1, 0]]
    first, second = (attention.forget_gate.bias.tolist() for _, attention in attentions(model))
    ladder = [bias_from_half_life(x) for x in (2, 4, 8, 16)]
    assert first == pytest.approx(ladder, rel=1e-5)
    assert second == pytest.approx([*[bias_from_half_life(OPEN)] * 2, *ladder[2:]], rel=1e-5)


def test_heads_that_there_are_not_are_refused(pico_llama):
    with pytest.raises(ValueError, match=r"open_heads 5: the model has .* 4 in all"):
        make_plan(pico_llama().config, FoxSpec(init="measured", open_heads=5))
    make_plan(pico_llama().config, FoxSpec(init="measured", open_heads=4))


def test_a_text_too_short_to_measure_on_is_named(base, text, tmp_path, caplog):
    (tmp_path / "short.txt").write_text("the fox forgets")
    for file, warned in ((text, False), (tmp_path / "short.txt", True)):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "retrofox"):
            retrofox.convert(base, fox=FoxSpec(init="measured", open_heads=1), texts=[file])
        assert ("too few to tell near heads from far ones: give texts of 256 or more" in caplog.text) == warned


def test_a_windowed_model_is_measured_within_its_windows(pico_fox, pico_tokenizer, text):
    model = pico_fox(stirred=False, family="mistral", config={"sliding_window": 11}, gate="bias")
    start = measure_start(model, pico_tokenizer, [text])
    assert max(max(layer) for layer in start.distances) < 11


def test_the_old_name_of_init_measured_loads_and_says_so(caplog):
    with caplog.at_level(logging.WARNING, "retrofox"):
        assert FoxSpec(init="calibrated").init == "measured"
    assert "init calibrated is the old name of measured" in caplog.text
    saved = {**FoxSpec().resolved(128).to_dict(), "init": "calibrated", "version": "0.1"}
    assert FoxSpec.from_dict(saved).init == "measured"


def test_sources_share_the_tokens_read_by_weight(pico_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("retrofox.heads.start.TOKENS_READ", 400)
    (tmp_path / "a.txt").write_text("the fox " * 1000)
    sources = [Source(path=str(tmp_path / "a.txt"), weight=w) for w in (3.0, 1.0)]
    assert [len(document) for document in documents_of(sources, pico_tokenizer)] == [300, 100]
