"""Checkpoints as they come: damaged, unsafe, renamed, quantised, pickled; and OUT in odd places."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import retrofox
import retrofox.conversion.directory
from retrofox.loading import atomic_directory as atomic_module
from retrofox.loading import shards
from retrofox.loading.atomic_directory import AtomicDirectory
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
    (sharded / INDEX).write_text(json.dumps(index))
    refused(sharded, "not a file beside it")
    (sharded / INDEX).write_text("{")
    refused(sharded, "not an index of shards")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"model_type": 5}', '{"model_type": null}'])
def test_configs_that_are_none(single, text):
    said = r"config\.json.* (is not valid JSON|where a JSON object belongs|has model_type|has no model_type)"
    (single / "config.json").write_text(text)
    refused(single, said)
    for opened in (retrofox.load, open_model):
        with pytest.raises(ValueError, match=said if text != "{}" else "plain model|no tokenizer|model_type None"):
            opened(single)


def test_weights_of_another_config(single):
    edit(single / "config.json", num_hidden_layers=3)
    refused(single, "holds the weights of 2 layers and its config.json asks for 3")
    edit(single / "config.json", num_hidden_layers=2, intermediate_size=24)
    refused(single, r"mlp.gate_proj.weight of shape \[48, 32\]; its config.json asks for \[24, 32\]")


def test_tensors_under_other_names(single, pico_llama):
    state = load_file(single / SINGLE_FILE)
    save_file({f"transformer.{name}": t for name, t in state.items()}, single / SINGLE_FILE)
    refused(single, "it has transformer.model.embed_tokens.weight instead")
    pico_llama().model.save_pretrained(single)  # without its head
    refused(single, "it has embed_tokens.weight instead")


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "fp8", "compressed-tensors"])
def test_quantised_models(single, method):
    edit(single / "config.json", quantization_config={"quant_method": method})
    refused(single, rf"is quantised \({method}\): convert the unquantised model")


def test_quantised_models_that_hide_it(single):
    (single / "quantize_config.json").write_text('{"bits": 4}')
    refused(single, "is quantised")
    (single / "quantize_config.json").unlink()
    state = load_file(single / SINGLE_FILE)
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file({**state, name: state[name].to(torch.float8_e4m3fn)}, single / SINGLE_FILE)
    refused(single, "as F8_E4M3, so it is quantised")


def test_an_adapter_beside_a_model(single):
    edit_me = single / "adapter_config.json"
    edit_me.write_text('{"base_model_name_or_path": "some/base"}')
    refused(single, "merge it into its base, some/base")


# .bin


class Payload:
    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


@pytest.fixture
def pickled(single) -> Path:
    torch.save(load_file(single / SINGLE_FILE), single / "pytorch_model.bin")
    (single / SINGLE_FILE).unlink()
    return single


def test_code_in_a_pickle_is_not_run(pickled, tmp_path):
    torch.save({"x": Payload(tmp_path / "ran")}, pickled / "pytorch_model.bin")
    refused(pickled, "could run code when it is opened, so it was not")
    (pickled / "pytorch_model.bin").write_bytes(pickle.dumps({"x": Payload(tmp_path / "ran")}, protocol=2))
    refused(pickled, "pytorch_model.bin")
    assert not (tmp_path / "ran").exists()


def test_damaged_and_foreign_pickles(pickled):
    file = pickled / "pytorch_model.bin"
    state = torch.load(file)
    file.write_bytes(file.read_bytes()[:5000])
    refused(pickled, "can't be read")
    torch.save({"model": state}, file)
    refused(pickled, "holds 'model', a dict")
    torch.save([1, 2], file)
    refused(pickled, "a list: only dense tensors")


@pytest.mark.parametrize("zipped", [True, False])
def test_pickles_old_and_new_keep_every_bit(pickled, tmp_path, zipped):
    state = {name: t.half() for name, t in torch.load(pickled / "pytorch_model.bin").items()}
    torch.save(state, pickled / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    retrofox.convert(pickled, tmp_path / "out", verify=False)
    written = load_file(tmp_path / "out" / SINGLE)
    assert set(written) == set(state)
    assert all(torch.equal(written[name], state[name]) and written[name].dtype == torch.float16 for name in state)


def test_a_pickle_larger_than_a_tensor_does_not_fill_the_memory(tmp_path):
    state = {f"x{n}": torch.full((4 << 20,), float(n)) for n in range(12)}  # 16 MiB each
    torch.save(state, tmp_path / "model.bin")
    script = """
import re, sys, threading
from pathlib import Path
from retrofox.conversion.tensors import from_bin

def own():
    return int(re.search(r"RssAnon:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10

before, peak, done = own(), [0], threading.Event()
def watch():
    while not done.wait(0.002):
        peak[0] = max(peak[0], own() - before)
thread = threading.Thread(target=watch)
thread.start()
from_bin(Path(sys.argv[1]), Path(sys.argv[2]), ())
done.set(), thread.join()
print(peak[0])
"""
    command = [sys.executable, "-c", script, str(tmp_path / "model.bin"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 64
    written = load_file(tmp_path / "out")
    assert all(torch.equal(written[name], state[name]) for name in state)


def test_sharded_pickles(pickled, tmp_path):
    state = torch.load(pickled / "pytorch_model.bin")
    (pickled / "pytorch_model.bin").unlink()
    names = sorted(state)
    parts = {"pytorch_model-00001-of-00002.bin": names[:9], "pytorch_model-00002-of-00002.bin": names[9:]}
    for file, own in parts.items():
        torch.save({name: state[name] for name in own}, pickled / file)
    index = {"weight_map": {name: file for file, own in parts.items() for name in own}}
    (pickled / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    retrofox.convert(pickled, tmp_path / "out", verify=False)
    weight_map = json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"]
    assert all(weight_map[n] == f"pytorch_model-0000{1 if n in names[:9] else 2}-of-00002.safetensors" for n in names)
    (pickled / "pytorch_model-00002-of-00002.bin").unlink()
    shutil.rmtree(tmp_path / "out")
    refused(pickled, "lacks pytorch_model-00002-of-00002.bin", FileNotFoundError)


@pytest.mark.parametrize("tied", [True, False])
def test_pickled_tensors_that_share_memory(pickled, tmp_path, tied):
    state = torch.load(pickled / "pytorch_model.bin")
    torch.save({**state, "lm_head.weight": state["model.embed_tokens.weight"]}, pickled / "pytorch_model.bin")
    edit(pickled / "config.json", tie_word_embeddings=tied)
    retrofox.convert(pickled, tmp_path / "out", verify=False)
    written = load_file(tmp_path / "out" / SINGLE)
    assert ("lm_head.weight" in written) == (not tied)
    model = retrofox.load(tmp_path / "out")
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


# OUT


def test_out_inside_the_source(single):
    with pytest.raises(ValueError, match="lies inside SOURCE"):
        retrofox.convert(single, single / "deep" / "out")
    with pytest.raises(ValueError, match="exists"):
        retrofox.convert(single, single)
    assert {file.name for file in single.iterdir()} == {"config.json", "generation_config.json", SINGLE_FILE}


def test_out_without_a_name_of_its_own(sharded, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for out in (".", ".."):
        with pytest.raises(ValueError, match="give OUT a name"):
            retrofox.convert(sharded, out, verify=False)
    assert list((tmp_path / "here").iterdir()) == []


def test_parents_made_for_nothing_go_again(single, tmp_path, monkeypatch):
    def stop(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(retrofox.conversion.directory, "write_remote_code", stop)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="out could not be written: No space left"):
        retrofox.convert(single, tmp_path / "a" / "b" / "out", verify=False)
    assert [file.name for file in tmp_path.iterdir()] == ["base"]


def test_a_place_that_can_not_be_written_to(single, tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: (_ for _ in ()).throw(OSError(30, "Read-only file system")))
    refused(single, "can't write .*: Read-only file system; choose another OUT")


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic_module.fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(38, "not implemented")))
    with AtomicDirectory(tmp_path / "out") as directory:
        directory.commit()
    assert (tmp_path / "out").is_dir()


def test_two_conversions_into_one_out(tmp_path):
    with AtomicDirectory(tmp_path / "out"), pytest.raises(ValueError, match="another conversion is writing"):
        AtomicDirectory(tmp_path / "out").__enter__()
    assert not list(tmp_path.iterdir())


def test_a_source_is_looked_at_without_torch():
    code = "import sys, retrofox.loading.source; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
