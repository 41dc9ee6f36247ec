"""Checkpoints that came with forget gates: the same logits here as in their own package, and back in fla's.

forget-gate-models.json holds config, shapes and logits of tiny models, as their packages computed them on a CPU:
flash-linear-attention 0.6.0 and zhixuan-lin/forgetting-transformer at 883f260, run by forget_gate_models.py of 6f57df0.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import retrofox
from retrofox.conversion.own_gates import came_with_gates
from retrofox.fox_spec import PRO_PARTS, FoxSpec
from retrofox.model.modeling_fox import CACHE
from retrofox.serving.refusals import refusal

MODELS = json.loads(Path(__file__).with_name("forget-gate-models.json").read_text())
TOKENS = torch.tensor([[3, 17, 5, 9, 30, 2, 2, 21, 8, 14, 27, 1], [11, 4, 4, 25, 6, 19, 0, 31, 7, 13, 22, 10]])
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
PLACES = [0, 1, 11]
"""Positions of TOKENS whose logits the file holds."""


def drawn(name: str, shape: list[int]) -> torch.Tensor:
    """The values of a tensor: the same for a name every time; norm gains lie between 0.5 and 1.5."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.rand(*shape, generator=generator) * 2 - 1
    return 1 + values / 2 if name.endswith("norm.weight") else values / (1 if len(shape) == 1 else 2)


def write(name: str, directory: Path) -> torch.Tensor:
    """Writes a model as its package saved it; returns its logits at PLACES."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(MODELS[name]["config"]))
    tensors = {key: drawn(key, shape) for key, shape in MODELS[name]["shapes"].items()}
    save_file(tensors, directory / "model.safetensors")
    return torch.tensor(MODELS[name]["logits"])


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """(2, 12, V) float32 of TOKENS, read at once."""
    return model(TOKENS, use_cache=False).logits


@torch.no_grad()
def stepwise(model: Any) -> torch.Tensor:
    """The same, token by token."""
    cache, found = None, []
    for token in TOKENS.split(1, 1):
        out = model(token, use_cache=True, **{CACHE: cache})
        cache = out[CACHE]
        found.append(out.logits)
    return torch.cat(found, 1)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


@pytest.fixture
def made(run, tmp_path):
    """made(name, *options) -> (the converted model in eval mode, the logits that its package gave at PLACES)."""

    def make(name: str, *options: str):
        expected = write(name, tmp_path / name)
        code, _, error = run("convert", tmp_path / name, tmp_path / "ours", *options)
        assert code == 0, error
        return retrofox.load(tmp_path / "ours").eval(), expected

    return make


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_their_package_read_at_once_and_token_by_token(made, name):
    model, expected = made(name)
    close(logits(model)[:, PLACES], expected)
    close(stepwise(model)[:, PLACES], expected)


@pytest.mark.parametrize("name", ["fla-all", "authors-pro"])
def test_a_converted_one_forgets_trains_saves_and_is_served_like_any_other(made, tmp_path, name):
    model, _ = made(name, "fox.horizon=1.5")
    same = {
        cache: model.generate(TOKENS, max_new_tokens=8, do_sample=False, use_cache=cache) for cache in (True, False)
    }
    assert torch.equal(same[True], same[False])
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.01)
    losses = []
    for _ in range(2):
        losses.append(model(TOKENS, labels=TOKENS).loss)
        losses[-1].backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[1] < losses[0]
    model.eval().save_pretrained(tmp_path / "trained")
    assert torch.equal(logits(retrofox.load(tmp_path / "trained").eval()), logits(model))
    assert came_with_gates(model.config)  # so that it has no original to learn from
    spec = FoxSpec.from_dict(model.config.fox)
    why = refusal(model.config.model_type.removeprefix("fox_"), spec)
    assert why is None if name == "fla-all" else "k-shift and v-shift" in str(why)


@pytest.mark.parametrize(
    ("name", "change", "options", "said"),
    [
        ("authors-pro", {"ogate_act": "silu"}, [], "ogate_act 'silu'"),
        ("authors-pro", {"ogate_act": "silu", "model_type": "forgetting_transformer"}, [], "ogate_act 'silu'"),
        ("authors-pro", {"num_kv_heads": 1}, [], "the two don't belong together"),
        ("fla-plain", {"window_size": 64}, [], "window_size 64"),
        ("fla-plain", {"attnres_block_size": 4}, [], "attnres_block_size 4"),
        ("fla-plain", {"hidden_act": "powlu"}, [], "hidden_act 'powlu'"),
        ("fla-plain", {"num_heads": 4}, [], "forget_gate.bias has shape (2,), by its config.json (4,)"),
        ("fla-plain", {"use_output_gate": True}, [], "output_gate.weight has shape None"),
        ("fla-all", {"qk_norm": False}, [], "k_norm_fox.gain has shape (16,), by its config.json None"),
        ("fla-all", {"num_hidden_layers": 1}, [], "by its config.json None"),
        ("fla-all", {"tie_word_embeddings": True}, [], "lm_head.weight is not the embedding"),
        ("fla-plain", {}, ["--sink-tokens", "1", "--rope", "keep"], "horizon alone"),
        ("fla-plain", {}, ["--rope", "interpolate", "--horizon", "8"], "horizon alone"),
        ("fla-plain", {}, ["fox.gate=data", "--dry-run"], "horizon alone"),
        ("fla-plain", {"quantization_config": {"quant_method": "fp8"}}, [], "is quantised (fp8)"),
    ],
)
def test_what_can_not_be_computed_exactly_is_refused_by_name(run, tmp_path, name, change, options, said):
    write(name, tmp_path / "theirs")
    config = tmp_path / "theirs" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    code, _, error = run("convert", tmp_path / "theirs", tmp_path / "ours", *options)
    assert code == 2
    assert said in error
    assert error.strip().count("\n") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs"]


def without_its_embedding(tensors):
    del tensors["model.embeddings.weight"]


def in_int8(tensors):
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        (without_its_embedding, [], "model.embed_tokens.weight has shape None"),
        (in_int8, [], "has lm_head.weight as torch.int8: convert the unquantised model"),
        (None, ["--dry-run"], "holds no weights"),
    ],
)
def test_other_tensors_than_its_package_saved_are_refused_by_name(run, tmp_path, change, options, said):
    write("fla-plain", tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    if change is not None:
        change(tensors)
        save_file(tensors, file)
    config = tmp_path / "theirs" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": change is not in_int8}))
    code, _, error = run("convert", tmp_path / "theirs", tmp_path / "ours", *options)
    assert code == 2
    assert said in error
    assert error.strip().count("\n") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_what_config_json_lacks_is_named(run, tmp_path):
    write("fla-plain", tmp_path / "theirs")
    config = tmp_path / "theirs" / "config.json"
    config.write_text(json.dumps({k: v for k, v in json.loads(config.read_text()).items() if k != "norm_eps"}))
    code, _, error = run("convert", tmp_path / "theirs", tmp_path / "ours")
    assert code == 2
    assert "has no norm_eps: take the one that its package saved" in error


@pytest.mark.parametrize("name", ["fla-plain", "authors-pro"])
def test_to_use_one_as_it_is_says_to_convert_it(run, tmp_path, name):
    write(name, tmp_path / "theirs")
    code, _, error = run("generate", tmp_path / "theirs", "a")
    assert code == 2
    assert "have forget gates already: `retrofox convert MODEL OUT`" in error


@pytest.mark.parametrize("name", ["fla-plain", "fla-all"])
def test_to_fla_and_back_is_bit_equal(made, run, tmp_path, name):
    made(name)
    assert run("convert", tmp_path / "ours", tmp_path / "back", "--to", "fla")[0] == 0
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in (name, "back"))
    old, new = (json.loads((tmp_path / folder / "config.json").read_text()) for folder in (name, "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    old["num_kv_heads"] = old["num_kv_heads"] or old["num_heads"]
    assert {key: old[key] for key in old.keys() & new.keys()} == {key: new[key] for key in old.keys() & new.keys()}


def test_a_retrofitted_model_goes_to_fla_and_back(pico_fox, run, tmp_path):
    spec = {"rope": "drop", "sink_tokens": 0, "gate_heads": "kv", "pro": "output-gate"}
    model = pico_fox(config={"tie_word_embeddings": True}, **spec)
    model.save_pretrained(tmp_path / "ours")
    assert run("convert", tmp_path / "ours", tmp_path / "fla", "--to", "fla")[0] == 0
    assert run("convert", tmp_path / "fla", tmp_path / "again")[0] == 0
    close(logits(retrofox.load(tmp_path / "again").eval()), logits(model))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"sink_tokens": 1, "rope": "keep"}, ["rope keep", "sink_tokens 1"]),
        ({"horizon": 9.0, "log_n": 64}, ["horizon 9.0", "log_n 64"]),
        ({"gate": "bias"}, ["gate bias"]),
        ({"config": {"rope_parameters": YARN}}, ["lacks: an attention scaling of its RoPE"]),
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


def test_adapters_and_quantised_models_are_refused_for_fla(pico_fox, run, tmp_path):
    from transformers import BitsAndBytesConfig

    wide = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    for name in ("ours", "adapter"):
        pico_fox(config=wide, rope="drop", sink_tokens=0).save_pretrained(tmp_path / name)
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    code, _, error = run("convert", tmp_path / "adapter", tmp_path / "fla", "--to", "fla")
    assert (code, "holds a LoRA adapter" in error) == (2, True)
    assert not (tmp_path / "fla").exists()
    pytest.importorskip("bitsandbytes")
    four_bits = BitsAndBytesConfig(load_in_4bit=True)
    retrofox.load(tmp_path / "ours", quantization_config=four_bits).save_pretrained(tmp_path / "packed")
    code, _, error = run("convert", tmp_path / "packed", tmp_path / "fla", "--to", "fla")
    assert (code, "lacks: quantised weights" in error) == (2, True)
    assert not (tmp_path / "fla").exists()
