"""Choosing the rotary pairs that layers keep."""

import json
import math
from typing import Any

import pytest
import torch

import retrofox
from retrofox.anatomy import attentions
from retrofox.calibration import capture
from retrofox.calibration import pairs as choosing
from retrofox.calibration.calibrate import apply_to, calibrate
from retrofox.calibration.pairs import OUTPUT_WEIGHT, choose_pairs
from retrofox.calibration.source import open_source
from retrofox.fox_spec import FoxSpec
from tests.calibration.picos import FAMILIES, SPEC, sharp

ALL = {"llama": 4, "qwen2": 4, "qwen3": 8, "phi3": 2, "mistral": 4, "gemma2": 4, "gemma3": 4}
"""Rotary pairs of a head in the pico models."""


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(61, (6, 48), generator=torch.Generator().manual_seed(1))


def samples(family, tokens, refit=True, blocks=1) -> tuple[Any, Any, Any]:
    """The attention of the first layer, what the original's got, and the sample pairs are judged by, or several."""
    source = open_source(sharp(family), SPEC, None, None)
    hidden, calls = capture.enter(source.model, tokens)
    layer = capture.decoder_layers(source.model)[0]
    _, captured = capture.run_original(layer, hidden, calls[0])
    attention = layer.self_attn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choosing, "BLOCKS", blocks)
        found = choosing.samples_of(attention, *captured[0], 1, refit)
    assert len(found) == blocks
    return attention, captured[0], found[0] if blocks == 1 else found


@pytest.mark.parametrize("family", FAMILIES)
def test_as_many_are_kept_as_have_a_short_wavelength(family, tokens):
    source = open_source(sharp(family), SPEC, None, None)
    before = [list(attention.rotary_fade.fade) for _, attention in attentions(source.model)]
    chosen = choose_pairs(source, tokens[:2])
    assert [list(attention.rotary_fade.fade) for _, attention in attentions(source.model)] == before
    assert chosen.keys() == {n for n, fade in enumerate(before) if 0 < sum(fade) < ALL[family]}
    for number, kept in chosen.items():
        assert len(set(kept)) == len(kept) == sum(before[number])
        assert list(kept) == sorted(kept)
        assert 0 <= kept[0] <= kept[-1] < ALL[family]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pair_that_stops_turning_changes_logits_as_an_unturned_pair_would(family, tokens):
    attention, (original, block), sample = samples(family, tokens, refit=False)
    rows = torch.linspace(0, 47, 48).long()
    for pair in range(ALL[family]):
        fade = [1.0] * ALL[family]
        fade[pair] = 0.0
        attention.rotary_fade.take(fade)
        still = capture.converted_operands(attention, block)
        keys = still.key.repeat_interleave(still.query.shape[0] // still.key.shape[0], 0)
        expected = still.query[:, rows] @ keys.transpose(1, 2) * still.scaling
        assert torch.allclose(sample.logits + sample.changes[pair], expected, atol=0.02, rtol=2e-3)
    assert sample.softcap == original.softcap


def test_a_pair_that_is_made_up_for_turns_by_its_mean_turn(tokens):
    attention, (original, block), sample = samples("llama", tokens)
    pair, head = 1, 2
    attention.rotary_fade.take([0.0] * 4)
    still = capture.converted_operands(attention, block)
    weights = (original.query[head] @ original.key[1].T * original.scaling).tril()
    weights = weights.masked_fill(torch.ones(48, 48).triu(1).bool(), -math.inf).softmax(-1)
    angle = (torch.arange(48)[:, None] - torch.arange(48)) * attention.rotary_fade.inv_freq[pair]
    mean = complex((weights * angle.cos()).sum() / 48, (weights * angle.sin()).sum() / 48)

    def numbers(states):
        return torch.complex(states[:, pair], states[:, pair + 4])

    turned = numbers(original.query[head])[:, None] * numbers(original.key[1]).conj()
    made_up = numbers(still.query[head])[:, None] * mean * numbers(still.key[1]).conj()
    expected = (made_up - turned).real * original.scaling
    assert torch.allclose(sample.changes[pair, head].float(), expected, atol=0.02, rtol=2e-3)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_the_cost_is_kl_and_output_error_written_out(family, tokens):
    _, (original, _), sample = samples(family, tokens)
    logits = sample.logits.clone()

    def attended(logits):
        if original.softcap is not None:
            logits = (logits / original.softcap).tanh() * original.softcap
        distance = torch.arange(48)[:, None] - torch.arange(48)
        hidden = (distance < 0) | (distance >= (original.window or 48))
        return logits.double().masked_fill(hidden, -math.inf).softmax(-1)

    before, after = attended(logits), attended(logits + sample.changes[0])
    kl = (torch.special.xlogy(before, before) - torch.special.xlogy(before, after)).sum(-1).mean(-1)
    value = original.value.repeat_interleave(2, 0).double()
    error = ((after - before) @ value).square().sum(-1).mean(-1) / value.square().sum(-1).mean(-1)
    expected = float((kl + OUTPUT_WEIGHT * error).mean())
    assert sample.cost([0]) - sample.cost([]) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("refit", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_parts_of_the_queries_say_what_all_of_them_say(family, tokens, refit):
    _, _, whole = samples(family, tokens, refit)
    _, _, parts = samples(family, tokens, refit, blocks=5)
    assert [part.attention.shape[1:] for part in parts] == [(10, 10), (10, 20), (10, 30), (9, 39), (9, 48)]
    for name in ("attention", "changes"):
        joined = [torch.nn.functional.pad(getattr(part, name), (0, 48 - part.hidden.shape[1])) for part in parts]
        expected = getattr(whole, name) * ~whole.hidden
        torch.testing.assert_close(torch.cat(joined, -2) * ~whole.hidden, expected, atol=2e-3, rtol=2e-3)
    for stopping in ([0], [1, 2]):
        costs = sum(part.cost(stopping) - part.cost([]) for part in parts)
        assert costs == pytest.approx(whole.cost(stopping) - whole.cost([]), rel=2e-3)


def test_the_pair_that_attention_does_not_use_goes_first(tokens):
    base = sharp()
    with torch.no_grad():
        for layer in base.model.layers:  # pair 0 of each head: channels 0 and 4 of 8
            for name in ("weight", "bias"):
                getattr(layer.self_attn.q_proj, name).view(4, 8, -1)[:, [0, 4]] = 0.0
    three = FoxSpec(rope="partial", max_wavelength=1000.0)
    source = open_source(base, three, None, None)
    assert all(sum(attention.rotary_fade.fade) == 3 for _, attention in attentions(source.model))
    assert choose_pairs(source, tokens[:2]) == {0: (1, 2, 3), 1: (1, 2, 3)}


def test_fewer_queries_are_looked_at_where_memory_is_short(tokens, monkeypatch):
    _, _, whole = samples("llama", tokens)
    monkeypatch.setattr(choosing, "ELEMENTS", 4 * 4 * 48 * 10)
    _, _, few = samples("llama", tokens)
    assert (whole.changes.shape, few.changes.shape) == ((4, 4, 48, 48), (4, 4, 10, 48))


def test_a_calibration_chooses_and_the_model_it_is_put_into_turns_them(tokens, tmp_path):
    base = sharp()
    result = calibrate(base, SPEC, tokens, out_dir=tmp_path / "chosen", steps=3, progress=False)
    assert result.layer_pairs == choose_pairs(open_source(base, SPEC, None, None), tokens[:2])
    assert result.report["layer_pairs"] == {str(n): list(kept) for n, kept in result.layer_pairs.items()}
    model = apply_to(retrofox.convert(base, fox=SPEC), result)
    for number, (_, attention) in enumerate(attentions(model)):
        assert attention.rotary_fade.fade == [float(pair in result.layer_pairs[number]) for pair in range(4)]
    model.save_pretrained(tmp_path / "saved")
    again = retrofox.load(tmp_path / "saved")
    assert torch.equal(again(tokens[:1]).logits, model(tokens[:1]).logits)
    fastest = calibrate(base, SPEC, tokens, out_dir=tmp_path / "not", steps=3, choose_pairs=False, progress=False)
    assert fastest.layer_pairs == {}
    with pytest.raises(ValueError, match="chose rotary pairs for rope partial, and this model has rope keep"):
        apply_to(retrofox.convert(base, fox=FoxSpec(rope="keep")), result)


def test_what_was_said_of_a_layer_is_kept(tokens, tmp_path):
    spec = FoxSpec(rope="partial", max_wavelength=20.0, layer_max_wavelength={0: 20.0})
    result = calibrate(sharp(), spec, tokens, out_dir=tmp_path / "a", steps=2, progress=False)
    assert result.layer_pairs.keys() == {1}
    named = FoxSpec(rope="partial", max_wavelength=20.0, layer_pairs={0: (1, 3)})
    assert calibrate(sharp(), named, tokens, out_dir=tmp_path / "b", steps=2, progress=False).layer_pairs == {}
    whole = FoxSpec(rope="keep")
    assert calibrate(sharp(), whole, tokens, out_dir=tmp_path / "c", steps=2, progress=False).layer_pairs == {}


def test_a_resumed_run_does_not_choose_again(tokens, tmp_path, monkeypatch):
    whole = calibrate(sharp(), SPEC, tokens, out_dir=tmp_path, steps=2, progress=False)
    monkeypatch.setattr("retrofox.calibration.calibrate.choose", None)
    assert calibrate(sharp(), SPEC, tokens, out_dir=tmp_path, steps=2, progress=False).layer_pairs == whole.layer_pairs


@pytest.mark.parametrize(
    ("pairs", "error"),
    [
        ({0: [4]}, "layer_pairs names pair 4 in layer 0, which has pairs 0 to 3"),
        ({2: [0]}, r"layer_pairs names layers \[2\]; the model has 0..1"),
        ({0: [-1]}, "layer_pairs takes a list of pairs, 0 or more each, per layer"),
        ({0: [0.5]}, "layer_pairs takes a list of pairs, 0 or more each, per layer"),
        ({0: 3}, "layer_pairs takes a list of pairs, 0 or more each, per layer"),
        ({"first": [1]}, "layer_pairs takes a list of pairs, 0 or more each, per layer"),
        ([1], "layer_pairs has the wrong type"),
    ],
)
def test_pairs_that_there_are_not_are_named(pairs, error):
    with pytest.raises(ValueError, match=error):
        retrofox.convert(sharp(), fox=FoxSpec(rope="partial", max_wavelength=20.0, layer_pairs=pairs))


def test_pairs_belong_to_rope_partial():
    with pytest.raises(ValueError, match="layer_pairs sets which pairs rope partial keeps, but rope drop"):
        FoxSpec(rope="drop", layer_pairs={0: (1,)})
    spec = FoxSpec.from_dict({"rope": "partial", "layer_pairs": {1: [3, 0, 3]}})
    assert spec.layer_pairs == {1: (0, 3)}
    assert FoxSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
