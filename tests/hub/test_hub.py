"""Hub ids as sources and as targets, against a Hub made of a dictionary; and no Hub at all."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file

import retrofox
from retrofox.conversion.merge import probe_logits
from retrofox.hub import check_complete, push
from retrofox.loading.adapter import peft_is_behind
from retrofox.loading.source import hub_errors, read_config
from tests.hub.conftest import asked_private

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of the Hub's client, by its httpx


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def test_a_hub_id_is_fetched_once_converted_measured_and_proven(run, online, pico_checkpoint, tmp_path, monkeypatch):
    from huggingface_hub import constants

    files = contents(pico_checkpoint)
    first = online.commit("org/model", {**files, "pytorch_model.bin": b"not fetched", "original/x.pth": b"nor this"})
    online.commit("org/model", {"config.json": b"{}"})  # a newer commit that is not the one asked for
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("a fox forgets what it need not keep, and keeps what it must not forget. " * 300)
    options = ["--revision", first, "--init", "measured", "--texts", text, "--json"]
    code, printed, error = run("convert", "org/model", out, *options)
    assert code == 0, error
    report = json.loads(printed)
    assert report["parity"]["equal"]
    assert report["plan"]["spec"]["base"] == "org/model"
    assert report["plan"]["spec"]["base_revision"] == first
    config = json.loads((out / "config.json").read_text())
    assert (config["fox"]["base"], config["fox"]["base_revision"]) == ("org/model", first)
    assert "base_model: org/model" in (out / "README.md").read_text()
    assert not [asked for asked in online.asked if "pytorch_model.bin" in asked or "original" in asked]
    downloads = [asked for asked in online.asked if asked.startswith("GET") and asked.endswith("model.safetensors")]
    assert len(downloads) == 1

    # offline, from the cache
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    options = ["--revision", first, "--no-verify", "--json"]
    code, printed, error = run("convert", "org/model", tmp_path / "two", *options)
    assert code == 0, error
    assert json.loads(printed)["plan"]["spec"]["base_revision"] == first


def test_what_is_refused_is_refused_before_weights_are_fetched(run, online, pico_checkpoint, tmp_path):
    config = json.loads((pico_checkpoint / "config.json").read_text())
    quantised = json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}).encode()
    online.commit("org/model", {**contents(pico_checkpoint), "config.json": quantised})
    code, _, error = run("convert", "org/model", tmp_path / "out")
    assert code == 2
    assert "quantised (gptq)" in error
    assert not [asked for asked in online.asked if "safetensors" in asked]
    code, _, error = run("convert", "org/modle", tmp_path / "out")
    assert code == 2
    assert "no such directory here" in error
    assert "hf auth login" in error
    assert not (tmp_path / "out").exists()


def test_without_a_hub_the_answer_comes_at_once(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    started = time.perf_counter()
    with pytest.raises(FileNotFoundError, match=r"no such directory here, and no config.json .*can't be reached"):
        read_config("some-org/some-model")
    assert time.perf_counter() - started < 5
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match=r"no such directory here, .*HF_HUB_OFFLINE is set"):
        read_config("some-org/some-model")
    with pytest.raises(FileNotFoundError, match="no such directory, and not a Hub id"):
        read_config("a/b/c")


AT_HOME = (
    "report/report.html",
    *("optimizer.pt", "scaler.pkl", "checkpoint-5/model.safetensors", "checkpoint-5/trainer_state.json"),
    *("__pycache__/modeling_fox.cpython-311.pyc", "runs/events.out.tfevents.1.host", ".cache/x.json"),
)
"""What a training leaves beside a model."""


def test_a_pushed_checkpoint_is_all_there(run, online, converted):
    hub, names = online, {file.name for file in converted.iterdir()}
    for name in AT_HOME:
        (converted / name).parent.mkdir(parents=True, exist_ok=True)
        (converted / name).write_bytes(b"at home")
    code, printed, error = run("push", converted, "me/fox", "--private")
    assert code == 0, error
    assert [asked_private(made) for made in hub.created] == [True]
    assert hub.private == {"me/fox"}
    report = json.loads(printed)
    _, files = hub.at("me/fox", report["commit"])
    assert set(report["files"]) == set(files)
    assert set(files) == names
    card = files.pop("README.md").decode()
    assert 'from_pretrained("me/fox"' in card
    assert "vllm serve me/fox" in card
    assert "THIS_REPOSITORY" not in card
    assert all((converted / name).read_bytes() == content for name, content in files.items())
    push(converted, "me/fox")
    assert not asked_private(hub.created[1])


def test_weights_of_an_earlier_upload_go_when_others_come(online, converted, pico_fox_checkpoint, tmp_path):
    """A trained model has one file, a conversion an index: transformers would go on loading the former."""
    from huggingface_hub import snapshot_download

    before = {"notes.txt": b"mine", "pytorch_model.bin": b"old", "adapter_config.json": b"{}", "model.gguf": b"other"}
    online.commit("me/fox", before)
    for number, directory in enumerate((pico_fox_checkpoint, converted)):
        push(directory, "me/fox")
        there = snapshot_download("me/fox", cache_dir=tmp_path / str(number))
        assert torch.equal(*(probe_logits(retrofox.load(place)) for place in (directory, there)))
        names = set(online.at("me/fox", "main")[1])
        weights = {file.name for file in directory.glob("model[-.]*")}
        assert {name for name in names if name.startswith(("model-", "model."))} == {*weights, "model.gguf"}
        assert not names & {"pytorch_model.bin", "adapter_config.json"}
        assert "notes.txt" in names


def test_a_push_that_the_hub_refuses_changes_nothing_there(online, converted, run):
    before = online.commit("me/fox", {"README.md": b"older"})
    online.refuse = {"/commit/": 403}
    code, _, error = run("push", converted, "me/fox")
    assert code == 2
    assert "403" in error
    assert "Traceback" not in error
    assert online.repos == {"me/fox": {before: {"README.md": b"older"}}}


def test_a_push_without_a_network_is_an_error_of_one_line(converted, run, monkeypatch):
    (of_the_client,) = (error for error in hub_errors() if not issubclass(error, OSError))
    monkeypatch.setattr("huggingface_hub.hf_api.HfApi.create_repo", Mock(side_effect=of_the_client("no such host")))
    code, _, error = run("push", converted, "me/fox")
    assert code == 2
    assert "can't be reached: no such host" in error


def test_private_refuses_a_repository_that_is_public(online, converted):
    before = online.commit("me/fox", {"README.md": b"public"})
    with pytest.raises(ValueError, match="me/fox is public and --private was asked for: nothing was uploaded"):
        push(converted, "me/fox", private=True)
    with pytest.raises(ValueError, match="Repo id must"):
        push(converted, "me/a fox", dry_run=True)
    with pytest.raises(ValueError, match="'fox' is not the name of a Hub repository"):
        push(converted, "fox")
    assert list(online.repos["me/fox"]) == [before]


def test_the_licence_of_a_base_on_disk_is_inherited(pico_checkpoint, tmp_path):
    (pico_checkpoint / "README.md").write_text(CARD.format("other\nlicense_name: tulip"))
    out = tmp_path / "fox"
    retrofox.convert(pico_checkpoint, out, verify=False)
    card = (out / "README.md").read_text()
    assert "license_name: tulip\n" in card
    assert "license_link: https://example.org/licence\n" in card
    found = push(out, "me/fox", dry_run=True)["licence"]
    assert found == {"license": "other", "license_name": "tulip", "license_link": "https://example.org/licence"}
    (out / "README.md").write_text("no metadata")
    assert push(out, "me/fox", dry_run=True)["licence"].startswith("none found here: add `license:`")


def test_a_card_without_a_licence_gets_the_bases_from_the_hub(online, converted, pico_checkpoint):
    online.commit("org/base", {**contents(pico_checkpoint), "README.md": CARD.format("apache-2.0").encode()})
    config = json.loads((converted / "config.json").read_text())
    config["fox"]["base"] = "org/base"
    (converted / "config.json").write_text(json.dumps(config))
    (converted / "README.md").unlink()  # as a trained model has none
    report = push(converted, "me/fox")
    assert report["licence"]["license"] == "apache-2.0"
    assert b"license: apache-2.0" in online.at("me/fox", "main")[1]["README.md"]


CARD = "---\nlicense: {}\nlicense_link: https://example.org/licence\n---\n# Base\n"


def test_recipe_and_loss_go_with_a_trained_model(pico_fox_checkpoint, online, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    pico_fox_checkpoint.rename(run / "model")
    (run / "recipe.yaml").write_text("retrofox: 0.1.0\nrecipe:\n  model: org/base\n  seed: 7\n")
    stages = [(2_000_000, 3.5, 3.0), (1_000_000, 2.9, 2.5)]
    report = [dict(zip(("tokens", "loss_first", "loss_last"), stage, strict=True)) for stage in stages]
    (run / "result.json").write_text(json.dumps({"stages": report}))
    push(run / "model", "me/fox")
    card = online.at("me/fox", "main")[1]["README.md"].decode()
    assert "seed: 7" in card
    assert "3.0M tokens; in the last stage loss 2.900 at first and 2.500 at last." in card
    (run / "model").rename(run / "converted")  # what the run began with
    push(run / "converted", "me/before")
    assert b"## Training" not in online.at("me/before", "main")[1]["README.md"]


@pytest.fixture
def adapter(pico_fox_checkpoint, tmp_path) -> Path:
    """A LoRA adapter of a converted pico model, as peft saves it."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["forget_gate"], task_type="CAUSAL_LM")
    with peft_is_behind():
        model = get_peft_model(retrofox.load(pico_fox_checkpoint), config)
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_an_adapter_is_pushed_with_the_name_of_its_base(online, adapter, pico_fox_checkpoint):
    with pytest.raises(ValueError, match=r"names its base by a path of this machine, .*--base ORG/BASE"):
        push(adapter, "me/adapter", dry_run=True)
    with pytest.raises(ValueError, match="is no adapter"):
        push(pico_fox_checkpoint, "me/base", base="me/base", dry_run=True)
    push(adapter, "me/adapter", base="me/base")
    files = online.at("me/adapter", "main")[1]
    assert json.loads(files["adapter_config.json"])["base_model_name_or_path"] == "me/base"
    card = files["README.md"].decode()
    assert "base_model: me/base" in card
    assert "library_name: peft" in card
    assert 'snapshot_download("me/adapter")' in card
    weights = adapter / "adapter_model.safetensors"
    assert files["adapter_model.safetensors"] == weights.read_bytes()
    plain = {name: value for name, value in load_file(weights).items() if "forget_gate" not in name}
    save_file(plain, weights)
    with pytest.raises(ValueError, match="an adapter without gates, not trained by retrofox"):
        push(adapter, "me/adapter", base="me/base", dry_run=True)
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(ValueError, match="download it again"):
        push(adapter, "me/adapter", base="me/base", dry_run=True)


def test_a_model_saved_before_is_pushed_as_it_is(online, saved_before):
    before = saved_before("default")
    _, files = online.at("me/before", push(before, "me/before")["commit"])
    assert {"config.json", "model.safetensors", "modeling_fox.py", "README.md"} <= set(files)
    assert all((before / name).read_bytes() == content for name, content in files.items() if name != "README.md")


def test_the_cards_lines_run_and_ask_no_question(converted, tmp_path):
    text = (converted / "README.md").read_text().replace("THIS_REPOSITORY", str(converted))
    lines = text.split("```python\n")[1].split("```")[0]
    program = (
        f"import builtins\nbuiltins.input = lambda *_: exit('it asks')\n{lines}\n"
        "print(model(**tokenizer('a', return_tensors='pt')).logits.shape)"
    )
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "torch.Size" in done.stdout
    assert "fox_llama" not in done.stderr


def test_incomplete_checkpoints_are_not_pushed(converted, pico_checkpoint, tmp_path):
    for directory, error, match in (
        (pico_checkpoint, ValueError, "is no converted model: make one by `retrofox convert`"),
        (tmp_path / "missing", FileNotFoundError, "no such directory"),
    ):
        with pytest.raises(error, match=match):
            check_complete(directory)
    check_complete(converted)
    code = (converted / "modeling_fox.py").read_bytes()
    (converted / "modeling_fox.py").unlink()
    with pytest.raises(ValueError, match=r"lacks its code \(.*modeling_fox.py"):
        check_complete(converted)
    (converted / "modeling_fox.py").write_bytes(code)
    file = next(converted.glob("*.safetensors"))
    whole, weights = file.read_bytes(), load_file(file)
    name = next(name for name in weights if name.endswith(("proj.weight", "norm.weight", "embed_tokens.weight")))
    save_file({**weights, name: torch.full_like(weights[name], float("nan"))}, file, {"format": "pt"})
    with pytest.raises(ValueError, match=rf"NaN or infinity in {re.escape(name)}"):
        check_complete(converted)
    file.write_bytes(whole)
    config = json.loads((converted / "config.json").read_text())
    for fox in (None, {"ropee": "drop"}):
        (converted / "config.json").write_text(json.dumps({**config, "fox": fox}))
        with pytest.raises(ValueError, match=r"must be a mapping|got 'ropee' .did you mean 'rope'"):
            check_complete(converted)
