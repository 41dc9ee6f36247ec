"""What heads look at: attention as the operator computes it, masses, copy scores, pruning, maps, before and after."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from fox_kernels import reference

from retrofox.anatomy import attentions
from retrofox.calibration.heads import Attention, HeadMass, Maps, copy_scores, watch, watchable
from retrofox.data.windows import Window
from retrofox.evaluation.gates import inspect
from retrofox.evaluation.gates_report import head_sentences
from retrofox.evaluation.heads import measure_heads, summarise_heads
from retrofox.loading.opened import open_model
from tests.evaluation.copying import copying_model

TEXT = "the fox forgets the gate and the gate forgets the fox, often. " * 6


def ids_of(length: int) -> torch.Tensor:
    return torch.randint(0, 288, (1, length), generator=torch.Generator().manual_seed(2))


def watched(model, length: int, original: bool = False) -> dict[int, Attention]:
    found: dict[int, Attention] = {}
    watch(model, ids_of(length), found.__setitem__, original)
    return found


def whole(attention: Attention) -> torch.Tensor:
    """(H, T, T) attention, from blocks of 20 queries."""
    rows = []
    for start in range(0, attention.length, 20):
        stop = min(start + 20, attention.length)
        block = attention.weights(start, stop)
        rows.append(torch.nn.functional.pad(block, (0, attention.length - stop)))
    return torch.cat(rows, 1)


@pytest.mark.parametrize("spec", [{}, {"sink_tokens": 3}, {"log_n": 16}, {"gate": "none", "rope": "keep"}])
def test_watched_attention_is_that_of_the_operator(pico_fox, spec):
    model, length = pico_fox(**spec), 50
    for layer, attention in watched(model, length).items():
        module = list(attentions(model))[layer][1]
        log_f = torch.diff(attention.c, dim=1, prepend=attention.c.new_zeros(4, 1)).float()
        q, k = (x.transpose(0, 1)[None] for x in (attention.query, attention.key))
        weights = whole(attention)
        for start in range(0, length, 8):  # values that single out eight keys at a time: the output is their weights
            value = torch.zeros(1, length, 2, 8)
            for n in range(start, min(start + 8, length)):
                value[0, n, :, n - start] = 1.0
            out = reference.forgetting_attention(q, k, value, log_f.T[None], sink=module.sink_tokens)[0]
            wanted = out[..., : min(8, length - start)].transpose(0, 1)
            torch.testing.assert_close(weights[:, :, start : start + 8], wanted, atol=1e-5, rtol=1e-4)


def test_watching_changes_nothing_and_leaves_nothing_behind(pico_fox):
    model = pico_fox()
    with torch.no_grad():
        before = model(input_ids=ids_of(40)).logits
        watched(model, 40)
        assert torch.equal(model(input_ids=ids_of(40)).logits, before)


def test_masses_are_those_of_the_whole_matrix(pico_fox):
    model = pico_fox()
    mass = HeadMass(first_tokens=2, beyond=(5, 20, 100))
    watch(model, ids_of(60), mass)
    rows = {(row["layer"], row["head"]): row for row in mass.heads()}
    distance = torch.arange(60)[:, None] - torch.arange(60)
    for layer, attention in watched(model, 60).items():
        weights = whole(attention)
        for head in range(4):
            row = rows[layer, head]
            assert row["first_token_mass"] == pytest.approx(weights[head, 2:, :2].sum(1).mean().item(), abs=1e-5)
            for tokens in (5, 20):
                far = (distance > tokens) & (torch.arange(60) >= 2)
                expected = (weights[head] * far).sum(1)[far.any(1)].mean().item()
                assert row["mass_beyond"][str(tokens)] == pytest.approx(expected, abs=1e-5)
            assert row["mass_beyond"]["100"] is None
    assert len(rows) == 8


def test_blocks_of_a_long_text_never_hold_all_of_it(pico_fox, monkeypatch):
    shapes = []
    real = Attention.weights

    def weights(self: Attention, start: int, stop: int) -> torch.Tensor:
        shapes.append(stop - start)
        return real(self, start, stop)

    monkeypatch.setattr(Attention, "weights", weights)
    mass = HeadMass()
    watch(pico_fox(), ids_of(3000), mass)
    assert max(shapes) <= 64
    assert sum(shapes) <= 2 * 1024
    assert mass.heads()[0]["mass_beyond"]["512"] is not None


def test_what_pruning_skips_is_the_rule_of_the_reference(pico_fox):
    model, eps = pico_fox(half_life=(1.0, 4.0)), 1e-3
    mass = HeadMass(prune_eps=eps)
    watch(model, ids_of(60), mass)
    visible = torch.ones(60, 60).tril().bool()
    found = []
    for attention in watched(model, 60).values():
        longest = attention.key.norm(dim=-1).amax(1).repeat_interleave(2)
        bound = attention.scaling * attention.query.norm(dim=-1) * longest[:, None]
        decay = attention.c[:, :, None] - attention.c[:, None]
        skipped = (decay < math.log(eps) - math.log(60) - 2 * bound[..., None]) & visible
        skipped[..., : attention.sink] = False
        found += (skipped.sum((1, 2)) / visible.sum()).tolist()
    assert [row["prune_skips"] for row in mass.heads()] == pytest.approx(found, abs=1e-6)
    assert max(found) > 0.1


def test_an_induction_head_has_a_copy_score_of_nearly_one(pico_llama):
    scores = copy_scores(watchable(copying_model()), 100, original=True)
    assert scores[1][0] > 0.9
    assert scores[0][0] < 0.1
    other = np.array(copy_scores(watchable(pico_llama()), 100, original=True))
    assert other.shape == (2, 4)
    assert other.max() < 0.5


def test_a_base_is_measured_as_its_exact_conversion(pico_llama, pico_fox, pico_tokenizer):
    exact = pico_fox(stirred=False, rope="keep", init="open", sink_tokens=0)
    windows = [Window(0, ids_of(100)[0].numpy())]
    rows = [
        measure_heads(open_model(model, tokenizer=pico_tokenizer), windows, 64, progress=False)[0]
        for model in (pico_llama(), exact)
    ]
    for base, converted in zip(*rows, strict=True):
        assert base["copy_score"] == pytest.approx(converted["copy_score"], abs=1e-5)
        assert base["mass_beyond"]["64"] == pytest.approx(converted["mass_beyond"]["64"], abs=1e-5)
        assert base["first_token_mass"] == pytest.approx(converted["first_token_mass"], abs=1e-5)


def test_maps_are_the_matrices_averaged_over_squares(pico_fox, monkeypatch):
    monkeypatch.setattr("retrofox.calibration.heads.PIXELS", 25)
    model, maps = pico_fox(), Maps([(1, 2)])
    watch(model, ids_of(50), maps)
    attention = watched(model, 50)[1]
    c = attention.c[2]
    decay = (c[:, None] - c).exp().tril()
    decay[:, : attention.sink] = torch.ones(50, attention.sink).double()
    decay = decay.tril()
    for name, matrix in (("attention", whole(attention)[2]), ("decay", decay)):
        squares = matrix.float().view(25, 2, 25, 2).mean((1, 3))
        torch.testing.assert_close(maps.found[1, 2][name], squares, atol=1e-5, rtol=1e-4)


def test_inspect_shows_heads_before_and_after_in_one_call(pico_fox, pico_llama, pico_tokenizer, tmp_path, run, capsys):
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    for name, model in (("fox", pico_fox()), ("base", pico_llama())):
        model.save_pretrained(tmp_path / name)
        pico_tokenizer.save_pretrained(tmp_path / name)
    out = tmp_path / "out"
    options = ["--map", "1.2", "0.0", "--prune-eps", 1e-3, "--length", 128, "--out", out]
    code, printed, err = run("inspect", tmp_path / "fox", "--data", text, "--against", tmp_path / "base", *options)
    assert code == 0, err
    written = json.loads((out / "gates.json").read_text())
    assert [model["label"] for model in written["attention"]] == ["fox", "base"]
    assert len(written["heads"]) == 8  # half-lives, as without data
    rows = list(csv.DictReader((out / "heads.csv").read_text().splitlines()))
    assert [float(row["copy_score"]) for row in rows] == [
        head["copy_score"] for model in written["attention"] for head in model["heads"]
    ]
    assert all(row["mass_beyond_64"] and row["prune_skips"] for row in rows)
    assert all(float(row["prune_skips"]) == 0 for row in rows if row["model"] == "base")
    for name in ("1.2", "0.0", "against-1.2", "against-0.0"):
        assert (out / f"map-{name}.png").read_bytes().startswith(b"\x89PNG")
        drawn = (out / f"map-{name}.svg").read_text()
        assert "mathdefault" not in drawn  # the colour bar's numbers are numbers
        assert f"head {name.removeprefix('against-')} of " in drawn
        assert Path(written["files"][f"map_{name}_svg"]).is_file()
    assert "retrieval head" in printed
    assert "pruning may skip" in printed


def test_two_models_of_one_name_are_told_apart(pico_fox, pico_tokenizer, tmp_path, run):
    for run_of in ("long", "short"):
        pico_fox().save_pretrained(tmp_path / run_of / "small")
        pico_tokenizer.save_pretrained(tmp_path / run_of / "small")
    text = tmp_path / "text.txt"
    text.write_text("the fox forgets the gate, and so on and on, " * 20)
    models = (tmp_path / "long" / "small", "--against", tmp_path / "short" / "small")
    code, printed, err = run("inspect", *models, "--data", text, "--length", 128, "--max-documents", 1)
    assert code == 0, err
    assert "small (1): " in printed
    assert "are retrieval heads in small (1)" in printed.replace("\n", " ")


def test_sentences_name_the_retrieval_heads_kept():
    def model(label: str, scores: list[float]) -> dict:
        heads = [
            {
                "layer": 3,
                "head": n,
                "copy_score": score,
                "retrieval": score >= 0.1,
                "first_token_mass": 0.5,
                "mass_beyond": {"64": 0.25, "512": None, "4096": None},
            }
            for n, score in enumerate(scores)
        ]
        return {"label": label, "heads": heads, "summary": summarise_heads(heads)}

    after, before, both = head_sentences([model("fox", [0.05, 0.3, 0.0]), model("base", [0.2, 0.9, 0.01])])
    assert "fox: 1 retrieval heads (3.1); attention 25.0 % beyond 64" in after
    assert "base: 2 retrieval heads (3.1, 3.0)" in before
    assert both == "of 2 retrieval heads in base, 1 are retrieval heads in fox"


def test_refusals(pico_fox, pico_tokenizer, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    model, options = pico_fox(), {"tokenizer": pico_tokenizer, "progress": False}
    for given, message in (
        ({"maps": ["1"], "data": text}, "a head is named LAYER.HEAD"),
        ({"maps": ["1.9"], "data": text, "out": tmp_path / "out"}, "no head 1.9: layers are 0 to 1, heads 0 to 3"),
        ({"maps": ["1.1"], "data": text}, "name a directory"),
        ({"maps": ["1.1"]}, "give data"),
        ({"against": model}, "give data"),
        ({"prune_eps": 1e-3}, "give data"),
        ({"prune_eps": 1.5, "data": text}, "prune_eps must lie between 0 and 1"),
    ):
        with pytest.raises(ValueError, match=message):
            inspect(model, **{**options, **given})
    assert not (tmp_path / "out").exists()
