"""Converting checkpoint directories: nothing loaded, nothing half-written, pretrained tensors untouched."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, normalizers, trainers
from tokenizers.models import BPE, WordLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import retrofox
from retrofox import FoxSpec
from retrofox.conversion.verify import compare
from retrofox.loading.shards import INDEX

TOKENS = torch.arange(2, 34)[None]


@pytest.fixture(scope="module")
def base(pico_llama) -> Any:
    return pico_llama(initializer_range=0.02)


@pytest.fixture
def source(base, tmp_path) -> Path:
    base.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "generation_config.json").write_text('{"max_length": 77}')
    (tmp_path / "base" / "chat_template.jinja").write_text("{{ messages }}")
    return tmp_path / "base"


def stored(directory: Path) -> dict[str, torch.Tensor]:
    index = json.loads((directory / INDEX).read_text())["weight_map"]
    files = {name: load_file(directory / name) for name in set(index.values())}
    return {name: files[file][name] for name, file in index.items()}


def test_pretrained_tensors_are_bit_equal_and_only_gates_are_added(source, tmp_path):
    retrofox.convert(source, tmp_path / "out", verify=False)
    before, after = load_file(source / "model.safetensors"), stored(tmp_path / "out")
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)
    added = set(after) - set(before)
    assert added
    assert all(".self_attn.forget_gate." in name and after[name].dtype == torch.float32 for name in added)


def test_config_tokenizer_files_and_code_come_along(source, tmp_path):
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "rag.jinja").write_text("{{ documents }}")
    for path in (source / "additional_chat_templates" / "rag.jinja", source / "additional_chat_templates", source):
        path.chmod(0o555)
    retrofox.convert(source, tmp_path / "out", verify=False)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "fox_llama"
    assert config["auto_map"]["AutoModelForCausalLM"] == "modeling_fox.FoxLlamaForCausalLM"
    assert FoxSpec.from_dict(config["fox"]).max_wavelength == 32  # a quarter of the trained length
    assert config["fox"]["base"] == str(source)
    assert (tmp_path / "out" / "generation_config.json").read_text() == '{"max_length": 77}'
    source.chmod(0o755)
    assert (tmp_path / "out" / "chat_template.jinja").is_file()
    template = tmp_path / "out" / "additional_chat_templates" / "rag.jinja"
    assert template.read_text() == "{{ documents }}"
    assert template.stat().st_mode & 0o777 == 0o644
    assert template.parent.stat().st_mode & 0o200
    for name in ("modeling_fox.py", "attention_torch.py", "README.md"):
        assert (tmp_path / "out" / name).is_file()
        assert not (tmp_path / "out" / name).is_symlink()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sharded_input_keeps_its_dtype(pico_llama, tmp_path, dtype):
    pico_llama().to(dtype=dtype).save_pretrained(tmp_path / "base", max_shard_size="20KB")
    assert (tmp_path / "base" / INDEX).is_file()
    retrofox.convert(tmp_path / "base", tmp_path / "out", verify=False)
    after = stored(tmp_path / "out")
    assert {t.dtype for n, t in after.items() if "forget_gate" not in n} == {dtype}
    model = retrofox.load(tmp_path / "out")
    assert model.dtype == dtype
    assert model.model.layers[0].self_attn.forget_gate.weight.dtype == torch.float32


def test_tied_embeddings_stay_tied(pico_llama, tmp_path):
    pico_llama(tie_word_embeddings=True).save_pretrained(tmp_path / "base")
    retrofox.convert(tmp_path / "base", tmp_path / "out", verify=False)
    model = retrofox.load(tmp_path / "out")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in stored(tmp_path / "out")


def test_files_have_the_permissions_of_the_umask(source, tmp_path):
    before = os.umask(0o027)
    try:
        retrofox.convert(source, tmp_path / "out", verify=False)
    finally:
        os.umask(before)
    assert {f.stat().st_mode & 0o777 for f in (tmp_path / "out").iterdir()} == {0o640}


def test_a_base_with_attention_dropout_trains_once_converted(source, tmp_path):
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.1}))
    report = retrofox.convert(source, tmp_path / "out", verify=False)
    assert report["plan"]["settings_replaced"] == {"attention_dropout": 0.0}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["attention_dropout"] == 0.0
    model = retrofox.load(tmp_path / "out").train()
    model(TOKENS, labels=TOKENS).loss.backward()


BROKEN_TOKENIZERS = {
    "of another version": ("tokenizer.json", '{"version": "9", "model": {"type": "Unheard"}}'),
    "its own code": ("tokenizer_config.json", '{"auto_map": {"AutoTokenizer": ["tokenization_own.Own", null]}}'),
}


@pytest.mark.parametrize("how", BROKEN_TOKENIZERS)
def test_a_tokenizer_that_does_not_open_comes_along_and_stops_nothing(base, tmp_path, caplog, how):
    base.save_pretrained(tmp_path / "base")
    name, text = BROKEN_TOKENIZERS[how]
    (tmp_path / "base" / name).write_text(text)
    (tmp_path / "base" / "tokenization_own.py").write_text("raise SystemExit")
    (tmp_path / "base" / "modeling_own.py").write_text("raise SystemExit")
    report = retrofox.convert(tmp_path / "base", tmp_path / "out", fox=FoxSpec(pro=("qk-norm",)), verify=False)
    assert "going on without it" in caplog.text
    assert report["plan"]["tensors_added"] == 8
    parity = compare(tmp_path / "base", tmp_path / "out")
    assert parity["equal"]
    assert parity["text"] == "drawn tokens, for want of a tokenizer"
    assert (tmp_path / "out" / name).read_text() == text
    assert (tmp_path / "out" / "tokenization_own.py").is_file()
    assert not (tmp_path / "out" / "modeling_own.py").exists()


def refused(match: str, source, out: Path, error: type[Exception] = ValueError, **options) -> None:
    with pytest.raises(error, match=match):
        retrofox.convert(source, out, **options)
    assert not out.exists()
    assert not list(out.parent.glob(".*partial"))


def test_a_tokenizer_whose_class_comes_from_the_model_type_reads_as_before(pico_base, tmp_path):
    tokenizer = Tokenizer(BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    trainer = trainers.BpeTrainer(vocab_size=40, special_tokens=["<unk>", "<s>", "</s>"])
    tokenizer.train_from_iterator(["the old house stood"], trainer)
    base = tmp_path / "base"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>").save_pretrained(base)
    pico_base("phi3", pad_token_id=1).save_pretrained(base)
    file = base / "tokenizer_config.json"
    declared = json.loads(file.read_text()) | {"tokenizer_class": "LlamaTokenizerFast"}  # transformers knows better
    file.write_text(json.dumps(declared))
    retrofox.convert(base, tmp_path / "out", fox={"rope": "keep"}, verify=False)
    ours, theirs = (AutoTokenizer.from_pretrained(place)("the old house") for place in (tmp_path / "out", base))
    assert ours["input_ids"] == theirs["input_ids"]


def test_a_tokenizer_that_can_not_be_kept_is_named(saved, base, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("retrofox.loading.tokenizers._read_otherwise", lambda *_: True)
    retrofox.convert(saved(base, tmp_path / "base"), tmp_path / "out", fox={"rope": "keep"}, verify=False)
    assert f"this tokenizer reads text otherwise: take that of {tmp_path / 'base'}" in caplog.text


def test_refusals_leave_nothing_behind(source, tmp_path):
    out = tmp_path / "out"
    refused("no such directory", tmp_path / "missing", out, FileNotFoundError)
    refused("no such file", tmp_path / "missing.gguf", out, FileNotFoundError)
    (tmp_path / "empty").mkdir()
    refused("no config.json", tmp_path / "empty", out, FileNotFoundError)
    (tmp_path / "empty" / "adapter_config.json").write_text("{}")
    refused("LoRA adapter", tmp_path / "empty", out)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": "gpt2"}))
    refused("'gpt2' is not supported; families known: llama", source, out)
    (source / "config.json").write_text(json.dumps({**config, "quantization_config": {"bits": 4}}))
    refused("quantised", source, out)
    (source / "config.json").write_text(json.dumps(config))
    retrofox.convert(source, tmp_path / "converted", verify=False)
    refused("already converted", tmp_path / "converted", out)
    (source / "model.safetensors").unlink()
    refused("holds no weights", source, out, FileNotFoundError)


def test_a_failed_proof_leaves_nothing(source, tmp_path, monkeypatch):
    import retrofox.conversion.convert

    def spoiled(directory, found, plan, partial, *rest):
        how = original(directory, found, plan, partial, *rest)
        name = "model-00001-of-00001.safetensors"
        state = load_file(partial / name)
        state["model.norm.weight"] = state["model.norm.weight"] * 1.01
        save_file(state, partial / name, metadata={"format": "pt"})
        return how

    original = retrofox.conversion.convert.write_directory
    monkeypatch.setattr(retrofox.conversion.convert, "write_directory", spoiled)
    refused("parity proof failed", source, tmp_path / "out")


@pytest.mark.parametrize(
    "asked",
    [
        {"_attn_implementation": "eager"},
        {"_attn_implementation": "flash_attention_2"},
        {"attn_implementation": "flash_attention_2"},
        {"output_attentions": True},
    ],
    ids=str,
)
def test_a_base_that_asks_for_an_attention_of_its_own_is_converted_and_proven(source, tmp_path, asked):
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, **asked}))
    retrofox.convert(source, tmp_path / "out", verify=False)
    assert compare(source, tmp_path / "out")["equal"]
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not written.get("output_attentions")
    assert not {"_attn_implementation", "attn_implementation"} & written.keys()


def test_a_proof_that_is_killed_says_what_may_have_been_wrong(source, tmp_path, monkeypatch):
    killed = subprocess.CompletedProcess([], -9, "", "")
    monkeypatch.setattr("retrofox.support.processes.run_python", lambda *_: killed)
    refused("holds the base.*--no-verify.*killed by signal 9", source, tmp_path / "out")


@pytest.mark.parametrize("words", [WordLevel({"[UNK]": 0}, unk_token="[UNK]"), BPE({"ф": 0}, [])], ids=["one", "none"])
def test_the_proof_draws_tokens_where_a_tokenizer_knows_nothing_of_its_text(source, tmp_path, words):
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(source)
    parity = retrofox.convert(source, tmp_path / "out", fox=FoxSpec(pro=("qk-norm",)))["parity"]
    assert parity["text"] == "drawn tokens, for want of a tokenizer"
    assert math.isfinite(parity["loss_base"])
    assert json.loads((tmp_path / "out" / "retrofox.json").read_text())["parity"] == parity


def test_the_proof_runs_where_a_module_of_the_users_hides_one_of_pythons(
    source, tmp_path, monkeypatch, fresh_processes
):
    (tmp_path / "random.py").write_text("raise SystemExit('the wrong module')")
    monkeypatch.chdir(tmp_path)
    assert retrofox.convert("base", "out")["parity"]["equal"]


def test_files_are_utf8_whatever_the_locale(source, tmp_path):
    config = json.loads((source / "config.json").read_text())
    text = json.dumps({**config, "note": "größer"}, ensure_ascii=False)
    (source / "config.json").write_text(text, encoding="utf-8")
    command = [sys.executable, "-X", "utf8=0", "-m", "retrofox", "convert", source, tmp_path / "out", "--no-verify"]
    environment = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([*map(str, command)], env=environment, check=True, stdout=subprocess.DEVNULL)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["note"] == "größer"


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_interruption_leaves_no_half_written_out(source, tmp_path, how, launch):
    out = tmp_path / "out"
    interrupted = "import os, signal\nimport retrofox.conversion.directory as written\n"
    interrupted += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    interrupted += f"written.write_remote_code = lambda d: os.kill(os.getpid(), {int(how)})\n"
    interrupted += f"import retrofox; retrofox.convert({str(source)!r}, {str(out)!r}, verify=False)\n"
    assert launch(interrupted).returncode != 0
    assert not out.exists()
    assert bool(list(out.parent.glob(".out.*.partial"))) == (how == signal.SIGKILL)
    retrofox.convert(source, out, verify=False)
    assert retrofox.load(out).config.model_type == "fox_llama"
    assert not list(out.parent.glob(".out.*.partial"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_convert_says_that_nothing_was_written(source, tmp_path, monkeypatch, run, number):
    monkeypatch.setattr("retrofox.conversion.convert.write", lambda *_, **__: os.kill(os.getpid(), number))
    code, _, err = run("convert", source, tmp_path / "out")
    assert code == 128 + number
    assert err.strip() == f"signal {int(number)}: nothing was written: run it again to go on"
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out.*"))
