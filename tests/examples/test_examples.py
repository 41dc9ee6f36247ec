"""Every script in examples/ runs on a pico model and does what its docstring says."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import retrofox

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
SCRIPTS = (
    *("convert_live_model", "attention_in_your_layer", "train_on_your_files", "lora_and_merge"),
    *("sft_with_trl", "dpo_with_trl", "grpo_with_trl"),
)
# peft 0.21 and TRL 1.16 use names that transformers 5.23 deprecates
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "texts" / "fox.txt"
    file.parent.mkdir()
    file.write_text("".join(f"the fox forgets gate {i * i % 17} and so on, " for i in range(200)))
    return file


@pytest.fixture
def commanding(monkeypatch, run):
    """commanding(name) -> a script whose `python -m retrofox` runs in this process, and the commands that it ran."""

    def build(name: str) -> tuple[ModuleType, list[str]]:
        module, commands = script(name), []

        def run_here(command: list[str], check: bool) -> None:
            assert check
            assert command[:3] == [sys.executable, "-m", "retrofox"]
            code, _, err = run(*command[3:])
            assert code == 0, err
            commands.append(command[3])

        monkeypatch.setattr(module, "subprocess", SimpleNamespace(run=run_here))
        return module, commands

    return build


def test_every_example_is_tested_here():
    assert {file.stem for file in EXAMPLES.glob("*.py")} == {*SCRIPTS, "demo"}


def test_the_notebook_runs(pico_checkpoint, tmp_path, monkeypatch, capsys):
    (tmp_path / "data").symlink_to(EXAMPLES / "data")
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((EXAMPLES / "first_retrofit.ipynb").read_text(encoding="utf-8"))
    names: dict[str, object] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert not cell["outputs"]
            exec("".join(cell["source"]).replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(pico_checkpoint)), names)
    assert "the same loss after saving and loading: True" in capsys.readouterr().out


def test_a_live_model_is_converted_and_saved(pico_checkpoint, tmp_path, capsys):
    script("convert_live_model").main(["--model", str(pico_checkpoint), "--out", str(tmp_path / "out")])
    out = capsys.readouterr().out
    difference = float(out.split("by at most ")[1].split()[0])
    assert difference < 1e-3
    assert "4 tensors added, such as model.layers.0.self_attn.forget_gate" in out
    assert retrofox.load(tmp_path / "out").config.fox["rope"] == "interpolate"


def test_the_operator_learns_in_a_layer_of_ones_own(text, capsys):
    module = script("attention_in_your_layer")
    module.main(["--text", str(text), "--steps", "21"])
    losses = [float(line.split("loss ")[1].split()[0]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 2
    assert losses[1] < losses[0] - 1
    torch.manual_seed(0)
    layer, x = module.ForgettingLayer(32), torch.randn(1, 20, 32)
    packed = layer(x, torch.tensor([0, 8, 20], dtype=torch.int32))
    torch.testing.assert_close(packed[:, 8:], layer(x[:, 8:]))


def test_a_recipe_trains_on_ones_own_files(pico_checkpoint, text, tmp_path, commanding):
    arguments = ["--model", str(pico_checkpoint), "--train", str(text.parent), "--heldout", str(text)]
    out = tmp_path / "out"
    module, commands = commanding("train_on_your_files")
    module.main([*arguments, "--out", str(out), "--tokens", "256", "--length", "32"])
    assert commands == ["plan", "train", "eval"]
    lines = json.loads((out / "results" / "eval.json").read_text())["lines"]
    assert {"model", "open", "shuffled", "base"} == {line["key"] for line in lines}
    assert (out / "results" / "per_token_loss.png").is_file()


def test_lora_is_trained_and_merged(pico_fox_checkpoint, text, tmp_path, commanding):
    arguments = ["--model", str(pico_fox_checkpoint), "--train", str(text), "--rank", "2"]
    out = tmp_path / "out"
    module, commands = commanding("lora_and_merge")
    module.main([*arguments, "--out", str(out), "--tokens", "128", "--length", "32"])
    assert commands == ["train", "merge", "generate"]
    start, merged = retrofox.load(pico_fox_checkpoint), retrofox.load(out / "merged")
    for name in ("q_proj.weight", "forget_gate.bias"):
        key = f"model.layers.0.self_attn.{name}"
        assert not torch.equal(start.get_parameter(key), merged.get_parameter(key)), name


@pytest.fixture
def trl_script(monkeypatch, tmp_path, pico_fox_checkpoint):
    """trl_script(name, *arguments): two steps of examples/NAME_with_trl.py, and its trainer; every tensor moved."""
    trl = pytest.importorskip("trl")

    def run(name: str, *arguments: str) -> Any:
        module, trained = script(f"{name}_with_trl"), []

        class Watched(getattr(trl, f"{name.upper()}Trainer")):
            def train(self, *given):
                trained.append(self)
                self.first_batch = next(iter(self.get_train_dataloader()))
                return super().train(*given)

        monkeypatch.setattr(module, f"{name.upper()}Trainer", Watched)
        out = tmp_path / "tuned"
        given = ["--model", str(pico_fox_checkpoint), "--out", str(out), "--steps", "2"]
        module.main([*given, "--learning-rate", "1e-2", *arguments])
        start, tuned = retrofox.load(pico_fox_checkpoint), retrofox.load(out)
        assert tuned.config.model_type == "fox_llama"
        for key, before in start.named_parameters():
            assert not torch.equal(before, tuned.get_parameter(key)), key
        return trained[0]

    return run


def lines(file: Path, *rows: dict) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def test_sft_learns_the_assistants_tokens_alone(trl_script, tmp_path):
    turns = [{"role": "user", "content": "where?"}, {"role": "assistant", "content": "far away"}]
    trainer = trl_script("sft", "--data", lines(tmp_path / "chat.jsonl", *[{"messages": turns * 2}] * 4))
    batch = trainer.first_batch
    for row, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        assert trainer.processing_class.decode(row[labels != -100]) == "far away</s>" * 2


def test_dpo_starts_from_a_reference_that_is_the_model(trl_script, tmp_path):
    pairs = [{"prompt": "the fox", "chosen": f" forgets gate {i}", "rejected": " and so on and on"} for i in range(8)]
    trainer = trl_script("dpo", "--data", lines(tmp_path / "pairs.jsonl", *pairs))
    first, last = (entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    assert last < first == pytest.approx(math.log(2), abs=1e-4)


def test_grpo_draws_answers_and_learns_from_their_rewards(trl_script):
    trainer = trl_script("grpo", "--answers", "2", "--max-tokens", "4")
    told = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(told) == 2
    assert all(entry["reward_std"] > 0 for entry in told)
