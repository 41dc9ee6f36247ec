"""Checkpoints as they come: damaged, unsafe, renamed, quantised, pickled; and OUT in odd places."""

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import retrofox
import retrofox.conversion.directory
from retrofox.loading import shards
from retrofox.loading.atomic_directory import atomic_directory
from retrofox.loading.loaded_model import open_model
from retrofox.loading.shards import INDEX, SINGLE

SINGLE_FILE = "model.safetensors"


@pytest.fixture
def sharded(pico_llama, tmp_path) -> Path:
    model = pico_llama()
    model.to(torch.bfloat16).save_pretrained(tmp_path / "base", max_shard_size="20KB")
    return tmp_path / "base"


@pytest.fixture
def single(pico_llama, tmp_path) -> Path:
    pico_llama().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def refused(source: Path, match: str, error: type[Exception] = ValueError) -> None:
    before = sorted(source.parent.iterdir())
    with pytest.raises(error, match=match):
        retrofox.convert(source, source.parent / "out", verify=False)
    assert sorted(source.parent.iterdir()) == before


def edit(file: Path, **values: Any) -> None:
    content = json.loads(file.read_text())
    file.write_text(json.dumps({k: v for k, v in {**content, **values}.items() if v is not None}))


def test_of_two_sets_of_weights_the_one_that_transformers_loads_is_taken(sharded, pico_llama):
    whole = pico_llama()
    torch.nn.init.constant_(whole.model.norm.weight, 3.0)
    whole.save_pretrained(sharded.parent / "whole")
    shutil.copy(sharded.parent / "whole" / "model.safetensors", sharded)
    assert list(shards.find(sharded).files) == [SINGLE]
    assert AutoModelForCausalLM.from_pretrained(sharded).model.norm.weight.eq(3.0).all()
    (sharded / "model.safetensors").unlink()
    (sharded / "pytorch_model.bin").touch()
    assert len(shards.find(sharded).files) > 1


def test_damaged_shards(sharded):
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    whole = shard.read_bytes()
    for damaged in (whole[:-4], b"not a checkpoint at all", b""):
        shard.write_bytes(damaged)
        refused(sharded, f"{shard.name} is cut short or not a safetensors file")
    shard.unlink()
    refused(sharded, f"lacks {shard.name}, named in its index", FileNotFoundError)


def test_an_index_that_lies(sharded):
    index = json.loads((sharded / INDEX).read_text())
    other = next(file for file in index["weight_map"].values() if file != index["weight_map"]["model.norm.weight"])
    index["weight_map"]["model.norm.weight"] = other
    (sharded / INDEX).write_text(json.dumps(index))
    refused(sharded, "lacks model.norm.weight, which the index says it has")
    index["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors"
    (sharded.parent / "elsewhere.safetensors").touch()
    (sharded / INDEX).write_text(json.dumps(index))
    refused(sharded, "lacks elsewhere.safetensors", FileNotFoundError)
    for text in ("{", '{"weight_map": ["a.safetensors"]}', '{"weight_map": {"a": 3}}'):
        (sharded / INDEX).write_text(text)
        refused(sharded, "not an index of shards")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model_type": 5}', '{"model_type": null}'])
def test_configs_that_are_none(single, text):
    said = r"config\.json is no model's config|model_type None"
    (single / "config.json").write_text(text)
    refused(single, said)
    for opened in (retrofox.load, open_model):
        with pytest.raises(ValueError, match=f"{said}|no converted model"):
            opened(single)


def test_weights_of_another_config(single):
    edit(single / "config.json", num_hidden_layers=3)
    refused(single, r"lacks 9 tensors .* as model\.layers\.2\.")
    edit(single / "config.json", num_hidden_layers=2, intermediate_size=24)
    refused(single, r"mlp.gate_proj.weight as F32 of shape \[48, 32\]; its config.json asks for floats of .*\[24, 32\]")


def test_tensors_under_other_names(single, pico_llama):
    pico_llama().model.save_pretrained(single)  # without its head
    refused(single, "if it has them under other names, load it with AutoModelForCausalLM")


def test_weights_that_are_quantised_and_do_not_say_so(single):
    state = load_file(single / SINGLE_FILE)
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file({**state, name: state[name].to(torch.float8_e4m3fn)}, single / SINGLE_FILE)
    refused(single, "as F8_E4M3 .*or the model is quantised")


# .bin


@pytest.fixture
def pickled(single) -> Path:
    torch.save(load_file(single / SINGLE_FILE), single / "pytorch_model.bin")
    (single / SINGLE_FILE).unlink()
    return single


def test_sharded_pickles(pickled, tmp_path):
    state = torch.load(pickled / "pytorch_model.bin")
    (pickled / "pytorch_model.bin").unlink()
    names = sorted(state)
    parts = {"pytorch_model-00001-of-00002.bin": names[:9], "pytorch_model-00002-of-00002.bin": names[9:]}
    for file, own in parts.items():
        torch.save({name: state[name] for name in own}, pickled / file)
    index = {"metadata": {}, "weight_map": {name: file for file, own in parts.items() for name in own}}
    (pickled / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    retrofox.convert(pickled, tmp_path / "out", verify=False)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(written[name], state[name]) for name in names)
    (pickled / "pytorch_model-00002-of-00002.bin").unlink()
    shutil.rmtree(tmp_path / "out")
    refused(pickled, "lacks pytorch_model-00002-of-00002.bin", FileNotFoundError)


# OUT


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error: No space left on device")]
)
def test_a_full_disk_is_named_and_nothing_is_left(single, monkeypatch, error):
    monkeypatch.setattr("retrofox.conversion.directory.save_file", lambda *_, **__: (_ for _ in ()).throw(error))
    refused(single, "out could not be written: .*No space left on device; nothing was left there", OSError)


def test_two_conversions_into_one_out_do_not_mix(tmp_path, monkeypatch):
    first = atomic_directory(tmp_path / "out").__enter__()
    monkeypatch.setattr("os.getpid", lambda: 1)
    with atomic_directory(tmp_path / "out") as second:
        assert first != second
        (second / "file").touch()
    with pytest.raises(ValueError, match="exists"), atomic_directory(tmp_path / "out"):
        pass
    with pytest.raises(ValueError, match="exists"), atomic_directory(tmp_path / "other"):
        (tmp_path / "other" / "its").mkdir(parents=True)  # meanwhile
    assert not list(tmp_path.glob(".other*"))
