"""Gate inspection: half-lives as they are by definition, kinds of heads, files, refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from retrofox.anatomy import attentions
from retrofox.evaluation.gates import inspect

TEXT = "the fox forgets the gate and the gate forgets the fox, often. " * 5


@pytest.fixture(scope="module")
def make_fox(pico_fox):
    """A converted pico model of trained length 256, gates as the spec asks."""

    def build(**spec) -> Any:
        config = {"max_position_embeddings": 256}
        return pico_fox(
            stirred=False, config=config, **({} if spec.get("gate") == "none" else {"half_life": (4.0, 1000.0)}), **spec
        )

    return build


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> list[str]:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return [str(path)]


def test_half_lives_of_the_parameters_are_the_ladder_the_spec_asked_for(make_fox, pico_tokenizer):
    result = inspect(make_fox(), tokenizer=pico_tokenizer)
    expected = [4.0 * 250.0 ** (h / 3) for h in range(4)] * 2
    assert [head["half_life"] for head in result["heads"]] == pytest.approx(expected, rel=1e-4)
    assert [head["kind"] for head in result["heads"][:4]] == ["local", "medium", "medium", "global"]
    assert result["summary"] == {"heads": 8, "local": 2, "medium": 4, "global": 2, "dead": 0}


def test_measured_half_lives_are_ln2_over_the_mean_decay_of_the_gates(make_fox, pico_tokenizer, text):
    model = make_fox()
    torch.manual_seed(1)
    gates: list[Any] = [attention.forget_gate for _, attention in attentions(model)]
    for gate in gates:
        gate.weight.data.normal_(0, 0.3)
    result = inspect(model, text, 64, tokenizer=pico_tokenizer, progress=False)
    for gate in gates:
        gate.record = True
    ids = torch.tensor([pico_tokenizer(TEXT)["input_ids"][:64]])
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    for layer, gate in enumerate(gates):
        decay = -gate.last_log_f[0].double().numpy()
        heads = [head for head in result["heads"] if head["layer"] == layer]
        assert [h["half_life"] for h in heads] == pytest.approx((math.log(2) / decay.mean(0)).tolist(), rel=1e-5)
    assert result["tokens"] == 64


def test_dead_gates_are_found(make_fox, pico_tokenizer, text):
    model = make_fox()
    gate: Any = next(attentions(model))[1].forget_gate
    gate.bias.data = torch.tensor([200.0, 20.0, -20.0, 3.0])  # exactly open, open in effect, shut, working
    for data in (None, text):
        heads = inspect(model, data, 64, tokenizer=pico_tokenizer, progress=False)["heads"][:4]
        assert [head["dead"] for head in heads] == [True, True, False, False]
        assert [head["kind"] for head in heads] == ["global", "global", "local", "local"]
        assert heads[0]["half_life"] is None or heads[0]["half_life"] > 1e30


def test_data_independent_and_absent_gates_are_inspected_too(make_fox, pico_tokenizer, text):
    model = make_fox(gate="fixed")
    measured, told = (
        inspect(model, data, 64, tokenizer=pico_tokenizer, progress=False)["heads"] for data in (text, None)
    )
    assert [head["half_life"] for head in measured] == pytest.approx([head["half_life"] for head in told])
    none = inspect(make_fox(gate="none", rope="partial"), text, 64, tokenizer=pico_tokenizer, progress=False)
    assert none["heads"] == []
    assert none["layers"] == 2


def test_table_and_files(make_fox, pico_tokenizer, text, tmp_path, capsys):
    result = inspect(make_fox(), text, 64, tmp_path, horizon=1.0, tokenizer=pico_tokenizer, progress=False)
    out = capsys.readouterr().out
    assert "8 heads: 2 local" in out
    assert "Live share at a horizon of 1 nats" in out
    [row] = result["live_share"]["lengths"]
    assert (row["length"], result["live_share"]["horizon"]) == (64, 1.0)
    assert 0 < row["ops"] < 1
    assert row["measured_decode_ms"] > 0
    assert json.loads((tmp_path / "gates.json").read_text()) == json.loads(json.dumps(result))
    assert Path(result["files"]["png"]).read_bytes().startswith(b"\x89PNG")


def test_a_checkpoint_without_a_tokenizer_shows_its_parameters(make_fox, text, tmp_path):
    make_fox().save_pretrained(tmp_path)
    assert len(inspect(tmp_path)["heads"]) == 8
    with pytest.raises(ValueError, match="has no tokenizer"):
        inspect(tmp_path, text)


def test_each_text_is_read_once_and_no_hook_stays(make_fox, pico_tokenizer, text, monkeypatch):
    monkeypatch.setattr("retrofox.evaluation.gates.decoding_ms", lambda *_: 1.0)
    model, runs = make_fox(), []
    counter = model.model.register_forward_hook(lambda *_: runs.append(1))
    inspect(model, text * 2, 64, tokenizer=pico_tokenizer, progress=False)
    counter.remove()
    assert len(runs) == 2
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("where", ["self_attn.forget_gate.bias", "input_layernorm.weight"])
def test_gates_that_are_no_numbers_are_named(make_fox, pico_tokenizer, text, tmp_path, where):
    model = make_fox()
    with torch.no_grad():
        model.get_parameter(f"model.layers.1.{where}")[1] = float("nan")
    with pytest.raises(ValueError, match=r"gates of .* are not finite, such as layer 1 head"):
        inspect(model, text, 64, tmp_path / "out", tokenizer=pico_tokenizer, progress=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (None, {"length": 1}, "length must be at least 2"),
        (None, {"horizon": 8.0}, r"measured on texts \(give --data, too\); got 8.0"),
        (["nowhere.txt"], {"horizon": -1.0}, r"horizon is above 0 nats.* got -1.0"),
    ],
)
def test_refusals(make_fox, pico_tokenizer, data, options, message):
    with pytest.raises(ValueError, match=message):
        inspect(make_fox(), data, tokenizer=pico_tokenizer, **options)


def test_an_unconverted_model_is_refused_before_its_weights_are_read(pico_llama, pico_tokenizer, tmp_path):
    pico_llama().config.save_pretrained(tmp_path)
    for plain in (pico_llama(), tmp_path):
        with pytest.raises(ValueError, match="no converted model with forget gates: run `retrofox convert"):
            inspect(plain, tokenizer=pico_tokenizer)
