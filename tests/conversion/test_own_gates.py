"""Checkpoints that came with forget gates: the same logits here as in their own package, and back in fla's."""

import json

import pytest
import torch
from safetensors.torch import load_file

import retrofox
from retrofox.conversion.own_gates import came_with_gates
from retrofox.fox_spec import PRO_PARTS, FoxSpec
from retrofox.serving.refusals import refusal
from tests.conversion import forget_gate_models as theirs

NAMES = (*theirs.FLA, *theirs.AUTHORS)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


@pytest.fixture
def made(run, tmp_path):
    """made(name, *options) -> (the converted model in eval mode, the logits that its package gave at PLACES)."""

    def make(name: str, *options: str):
        expected = theirs.write(name, tmp_path / name)
        code, _, error = run("convert", tmp_path / name, tmp_path / "ours", *options)
        assert code == 0, error
        return retrofox.load(tmp_path / "ours").eval(), expected

    return make


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_their_package_read_at_once_and_token_by_token(made, name):
    model, expected = made(name)
    close(theirs.logits(model)[:, theirs.PLACES], expected)
    close(theirs.stepwise(model)[:, theirs.PLACES], expected)


@pytest.mark.filterwarnings("ignore")  # theirs, at import: no GPU
@pytest.mark.parametrize("name", NAMES)
def test_the_package_itself_gives_these_logits(made, name):
    pytest.importorskip("fla" if name in theirs.FLA else "forgetting_transformer")
    model, expected = made(name)
    live = theirs.build(name)
    close(theirs.logits(live)[:, theirs.PLACES], expected)
    for read in (theirs.logits, theirs.stepwise):
        close(read(model), read(live))


@pytest.mark.parametrize("name", ["fla-all", "authors-pro"])
def test_a_converted_one_forgets_trains_saves_and_is_served_like_any_other(made, tmp_path, name):
    model, _ = made(name, "fox.horizon=1.5")
    same = {
        cache: model.generate(theirs.TOKENS, max_new_tokens=8, do_sample=False, use_cache=cache)
        for cache in (True, False)
    }
    assert torch.equal(same[True], same[False])
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.01)
    losses = []
    for _ in range(2):
        losses.append(model(theirs.TOKENS, labels=theirs.TOKENS).loss)
        losses[-1].backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[1] < losses[0]
    model.eval().save_pretrained(tmp_path / "trained")
    assert torch.equal(theirs.logits(retrofox.load(tmp_path / "trained").eval()), theirs.logits(model))
    assert came_with_gates(model.config)  # so that it has no original to learn from
    spec = FoxSpec.from_dict(model.config.fox)
    why = refusal(model.config.model_type.removeprefix("fox_"), spec)
    assert why is None if name == "fla-all" else "k-shift and v-shift" in str(why)


@pytest.mark.parametrize(
    ("name", "change", "options", "said"),
    [
        ("authors-pro", {"ogate_act": "silu"}, [], "ogate_act 'silu'"),
        ("fla-plain", {"window_size": 64}, [], "window_size 64"),
        ("fla-plain", {"attnres_block_size": 4}, [], "attnres_block_size 4"),
        ("fla-plain", {"hidden_act": "powlu"}, [], "hidden_act 'powlu'"),
        ("fla-plain", {"num_heads": 4}, [], "forget_gate.bias has shape (2,), by its config.json (4,)"),
        ("fla-plain", {"use_output_gate": True}, [], "output_gate.weight has shape None"),
        ("fla-plain", {}, ["--sink-tokens", "1", "--rope", "keep"], "horizon alone"),
        ("fla-plain", {}, ["--link"], "--link"),
    ],
)
def test_what_can_not_be_computed_exactly_is_refused_by_name(run, tmp_path, name, change, options, said):
    theirs.write(name, tmp_path / "theirs")
    config = tmp_path / "theirs" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    code, _, error = run("convert", tmp_path / "theirs", tmp_path / "ours", *options)
    assert code == 2
    assert said in error
    assert error.strip().count("\n") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs"]


@pytest.mark.parametrize("name", list(theirs.FLA))
def test_to_fla_and_back_is_bit_equal(made, run, tmp_path, name):
    made(name)
    assert run("convert", tmp_path / "ours", tmp_path / "back", "--to", "fla")[0] == 0
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in (name, "back"))
    old, new = (json.loads((tmp_path / folder / "config.json").read_text()) for folder in (name, "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    old["num_kv_heads"] = old["num_kv_heads"] or old["num_heads"]
    assert {key: old[key] for key in old.keys() & new.keys()} == {key: new[key] for key in old.keys() & new.keys()}


@pytest.mark.filterwarnings("ignore")
def test_a_retrofitted_model_runs_in_fla(pico_fox, run, tmp_path):
    spec = {"rope": "drop", "sink_tokens": 0, "gate_heads": "kv", "pro": "output-gate"}
    model = pico_fox(config={"tie_word_embeddings": True}, **spec)
    model.save_pretrained(tmp_path / "ours")
    assert run("convert", tmp_path / "ours", tmp_path / "fla", "--to", "fla")[0] == 0
    assert run("convert", tmp_path / "fla", tmp_path / "again")[0] == 0
    close(theirs.logits(retrofox.load(tmp_path / "again").eval()), theirs.logits(model))
    pytest.importorskip("fla")
    live = theirs.fla().ForgettingTransformerForCausalLM.from_pretrained(
        tmp_path / "fla", fuse_norm=False, fuse_swiglu=False
    )
    close(theirs.logits(live.eval()), theirs.logits(model))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"sink_tokens": 1, "rope": "keep"}, ["rope keep", "sink_tokens 1"]),
        ({"horizon": 9.0, "log_n": 64}, ["horizon 9.0", "log_n 64"]),
        ({"gate": "bias"}, ["gate bias"]),
        ({"pro": PRO_PARTS}, ["pro output-norm", "pro k-shift", "pro v-shift", "eps other than 1e-05"]),
        ({"config": {"attention_bias": True, "hidden_act": "gelu"}}, ["a bias on o_proj", "hidden_act gelu"]),
        ({"family": "mistral", "config": {"sliding_window": 8}}, ["model_type fox_mistral", "a sliding window"]),
    ],
)
def test_what_fla_lacks_is_refused_by_name(pico_fox, run, tmp_path, spec, said):
    pico_fox(**{"rope": "drop", "sink_tokens": 0} | spec).save_pretrained(tmp_path / "ours")
    code, _, error = run("convert", tmp_path / "ours", tmp_path / "fla", "--to", "fla")
    assert code == 2
    assert all(each in error for each in said)
    assert not (tmp_path / "fla").exists()
