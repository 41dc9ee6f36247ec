"""Checkpoints and configs that make no model: one line each, exit code 2, nothing left behind."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import retrofox
from retrofox.hub import check_complete
from retrofox.loading.converted import require_finite
from retrofox.loading.shards import find

GATES = "model-retrofox.safetensors"
INDEX = "model.safetensors.index.json"
LOST = "model.layers.1.self_attn.forget_gate"


def one_line(error: str) -> str:
    lines = [line for line in error.splitlines() if line and "Loading weights" not in line]
    assert len(lines) == 1, error
    return lines[0]


def change_gates(directory: Path, change) -> None:
    tensors = load_file(directory / GATES)
    change(tensors)
    save_file(tensors, directory / GATES, metadata={"format": "pt"})
    index = json.loads((directory / INDEX).read_text())
    old = {name: file for name, file in index["weight_map"].items() if file != GATES}
    (directory / INDEX).write_text(json.dumps({**index, "weight_map": {**old, **dict.fromkeys(tensors, GATES)}}))


def without_a_gate(tensors) -> None:
    del tensors[f"{LOST}.weight"], tensors[f"{LOST}.bias"]


def with_nan(tensors) -> None:
    tensors[f"{LOST}.bias"][2] = float("nan")


@pytest.mark.parametrize(
    ("change", "message"),
    [(without_a_gate, rf"lacks 2 of (the|its) .*{LOST}"), (with_nan, rf"NaN or infinity in {LOST}.bias")],
)
def test_gates_that_are_missing_or_not_finite_are_refused_by_name(change, message, converted, run):
    change_gates(converted, change)
    with pytest.raises(ValueError, match=message):
        retrofox.load(converted)
    with pytest.raises(ValueError, match=message):
        check_complete(converted)
    code, _, error = run("generate", converted, "a", "--max-new-tokens", 1)
    assert code == 2
    assert LOST in one_line(error)


def test_a_fixed_gate_without_its_bias_is_refused(pico_checkpoint, tmp_path, remote_code):
    from transformers import AutoModelForCausalLM

    out = tmp_path / "fox"
    retrofox.convert(pico_checkpoint, out, fox=retrofox.FoxSpec(gate="fixed"), verify=False)
    change_gates(out, lambda tensors: tensors.pop(f"{LOST}.bias"))
    config = json.loads((out / "config.json").read_text())
    for load in (retrofox.load, lambda d: AutoModelForCausalLM.from_pretrained(d, trust_remote_code=True)):
        with pytest.raises(ValueError, match=rf"lacks 1 of (the|its) .*{LOST}.bias"):
            load(out)
    (out / "config.json").write_text(json.dumps({**config, "fox": {**config["fox"], "next_field": 3}}))
    with pytest.raises(ValueError, match="no such field, upgrade it"):  # not only of what retrofox.load reads first
        AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)


def test_a_base_with_tensors_that_its_model_has_no_use_for_is_converted_with_a_warning(
    pico_checkpoint, tmp_path, caplog
):
    tensors = load_file(pico_checkpoint / "model.safetensors")
    tensors["model.layers.0.spare.weight"] = torch.zeros(4)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    save_file(tensors, pico_checkpoint / "model.safetensors", metadata={"format": "pt"})
    retrofox.convert(pico_checkpoint, tmp_path / "out", verify=False)
    said = [record.message for record in caplog.records if "no use for" in record.message]
    assert len(said) == 1
    assert "holds 1 tensors" in said[0]
    assert "model.layers.0.spare.weight" in said[0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.embed_tokens.weight", "gives all tokens one score"),
        ("model.layers.0.mlp.down_proj.weight", "the base's own loss is nan"),
    ],
)
def test_weights_that_overflow_are_refused_by_the_proof(name, message, pico_checkpoint, tmp_path):
    tensors = load_file(pico_checkpoint / "model.safetensors")
    tensors[name].fill_(1e38)
    save_file(tensors, pico_checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        retrofox.convert(pico_checkpoint, tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


def as_bin(directory: Path, change=lambda tensors: tensors) -> None:
    """The weights of a directory in one .bin file, changed on the way."""
    found = find(directory)
    tensors = {name: load_file(found.files[file])[name] for name, file in found.weight_map.items()}
    for file in (*directory.glob("*.safetensors"), directory / INDEX):
        file.unlink(missing_ok=True)
    torch.save(change(tensors), directory / "pytorch_model.bin")


def without_the_norm(tensors):
    return {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}


class Malicious:
    def __reduce__(self):
        return (Path.touch, (Path("opened"),))


@pytest.mark.parametrize("base", [False, True])
def test_a_bin_file_that_could_run_code_is_one_line(base, converted, pico_checkpoint, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    directory = pico_checkpoint if base else converted
    as_bin(directory, lambda tensors: {**tensors, "model.norm.weight": Malicious()})
    code, _, error = run("generate", directory, "a", "--max-new-tokens", 1)
    assert code == 2
    assert "holds more than tensors" in one_line(error)
    if base:
        with pytest.raises(ValueError, match="could run code when it is opened, so it was not"):
            retrofox.convert(directory, tmp_path / "out", verify=False)
        assert not (tmp_path / "out").exists()
    assert not Path("opened").exists()


# At them torch raises EOFError, IndexError, struct.error, UnicodeDecodeError, KeyError and UnpicklingError.
@pytest.mark.parametrize("content", [b"", b"abc", b"J", b"X\1\0\0\0\xff", b"h\x05", b"no pickle"])
def test_a_bin_file_that_is_no_pickle_is_one_line(content, pico_checkpoint, run, tmp_path):
    as_bin(pico_checkpoint)
    (pico_checkpoint / "pytorch_model.bin").write_bytes(content)
    for command in (["convert", pico_checkpoint, tmp_path / "out"], ["generate", pico_checkpoint, "a"]):
        code, _, error = run(*command)
        assert code == 2, command
        assert str(pico_checkpoint) in one_line(error)
    assert not list(tmp_path.glob("*out*"))


def test_tensors_that_a_model_lacks_are_never_made_up(converted, pico_checkpoint, run, remote_code):
    from transformers import AutoModelForCausalLM

    for directory in (converted, pico_checkpoint):
        as_bin(directory, without_the_norm)
        code, _, error = run("generate", directory, "a", "--max-new-tokens", 1)
        assert code == 2
        assert "lacks 1 of its model's tensors, such as model.norm.weight" in error
    with pytest.raises(ValueError, match=r"lacks 1 of its model's tensors, such as model\.norm\.weight"):
        AutoModelForCausalLM.from_pretrained(converted, trust_remote_code=True)


@pytest.mark.parametrize("options", [[], ["--no-verify"], ["--dry-run"]])
@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.self_attn.o_proj.weight"])
def test_a_tensor_that_a_family_with_experts_lacks_is_named(name, options, pico_base, run, tmp_path):
    pico_base("qwen3_moe").save_pretrained(tmp_path / "base")
    file = tmp_path / "base" / "model.safetensors"
    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    code, _, error = run("convert", tmp_path / "base", tmp_path / "out", *options)
    assert code == 2
    said = one_line(error[error.index("error:") :])  # behind the bars of saving
    assert f"lacks 1 tensors that its config.json asks for, such as {name}" in said
    assert not (tmp_path / "out").exists()


def test_weights_in_a_bin_file_are_not_pushed(converted):
    check_complete(converted)
    as_bin(converted)
    with pytest.raises(ValueError, match=r"weights in a \.bin file|lacks"):
        check_complete(converted)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("config.json", {"fox": None}, "fox section must be a mapping"),
        ("config.json", {"fox": {"rope": "interpolate"}}, "lacks rope_"),
        ("config.json", {"fox": {"open_heads": [[7, 0]]}}, "the model has 2 kv heads in each of layers 0..1"),
        ("config.json", {"fox": {"next_field": 3}}, "again; what a later retrofox has written needs an upgrade"),
        ("config.json", {"fox": {"open_heads": [[0, 2]]}}, "the model has 2 kv heads in each of layers 0..1"),
        ("config.json", {"hidden_size": 31}, "can't be opened in transformers"),
        ("tokenizer.json", None, "the tokenizer of"),
        ("generation_config.json", None, "can't be opened in transformers"),
    ],
)
def test_a_file_of_a_model_that_is_damaged_is_one_line(name, values, message, converted, run):
    file = converted / name
    file.write_text("[]" if values is None else json.dumps({**json.loads(file.read_text()), **values}))
    code, _, error = run("generate", converted, "a", "--max-new-tokens", 1)
    assert code == 2
    assert message in one_line(error)


def test_a_run_given_in_place_of_its_model_is_told_where_the_model_is(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=f"give {re.escape(str(tmp_path / 'model'))}"):
        retrofox.load(tmp_path)


def test_quantised_tensors_are_not_searched_for_nan():
    class Quantised(torch.Tensor):
        pass

    broken = torch.full((2,), float("nan"))
    with pytest.raises(ValueError, match="model has NaN or infinity in w:"):
        require_finite("model", {"q": broken.as_subclass(Quantised), "w": broken})


def test_a_revision_of_a_directory_is_refused(pico_fox_checkpoint):
    with pytest.raises(ValueError, match="revision 'v2' belongs to a Hub id"):
        retrofox.load(pico_fox_checkpoint, revision="v2")
