"""Code beside a model or a tokenizer: not run, and not asked about."""

import io
import json
from pathlib import Path

import pytest

CODE = """
from pathlib import Path
Path({marker!r}).write_text("ran")
from transformers import LlamaConfig, LlamaForCausalLM
class OddConfig(LlamaConfig):
    model_type = "odd_llama"
class OddForCausalLM(LlamaForCausalLM):
    config_class = OddConfig
"""


@pytest.fixture
def odd(pico_checkpoint, tmp_path) -> Path:
    """A model whose type transformers doesn't know, with code that leaves a marker."""
    file = pico_checkpoint / "config.json"
    code = {"AutoConfig": "odd.OddConfig", "AutoModelForCausalLM": "odd.OddForCausalLM"}
    file.write_text(json.dumps({**json.loads(file.read_text()), "model_type": "odd_llama", "auto_map": code}))
    (pico_checkpoint / "odd.py").write_text(CODE.format(marker=str(tmp_path / "marker")))
    return pico_checkpoint


@pytest.fixture
def text(tmp_path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("the fox forgets the gate. " * 20)
    return file


def commands(model: Path, text: Path) -> dict[str, list]:
    return {
        "eval": ["eval", model, "--data", text, "--length", 16],
        "generate": ["generate", model, "a", "--max-new-tokens", 1],
        "needle": ["needle", model, "--data", text, "--lengths", 320, "--depths", 1, "--trials", 1],
        "chat": ["chat", model],
        "inspect": ["inspect", model],
        "convert": ["convert", model, text.parent / "out"],
    }


@pytest.mark.parametrize("command", ["eval", "generate", "needle", "chat", "inspect", "convert"])
def test_a_models_own_code_is_neither_run_nor_asked_about(command, odd, text, run, monkeypatch, tmp_path, remote_code):
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks"))
    code, out, error = run(*commands(odd, text)[command])
    assert code == 2
    assert not (tmp_path / "marker").exists()
    assert "[y/N]" not in out + error
    said = error.strip().splitlines()
    assert len(said) == 1, error
    assert said[0].startswith("error:")
    assert ("no converted model" if command == "inspect" else "odd_llama") in said[0]


@pytest.mark.parametrize("command", ["plan", "train"])
@pytest.mark.parametrize("more", [{}, {"rope_theta": 50000.0}, {"fox": {}}])
def test_a_recipes_model_runs_no_code_and_leaves_nothing(
    command, more, odd, text, run, monkeypatch, tmp_path, remote_code
):
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    stage = {"objective": "extend", "tokens": 64, "sequence_length": 16}
    recipe = {"model": str(odd), "output": str(tmp_path / "run"), "stages": [stage], **more}
    recipe["data"] = {"train": [str(text)], "cache": str(tmp_path / "cache")}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    before = sorted(tmp_path.rglob("*"))
    code, out, error = run(command, tmp_path / "recipe.yaml")
    assert code == 2
    assert "odd_llama" in out + error
    assert "[y/N]" not in out + error
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("command", ["eval", "generate", "needle"])
def test_a_tokenizer_that_needs_its_own_code_is_one_line(command, pico_checkpoint, text, run, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks"))
    file = pico_checkpoint / "tokenizer_config.json"
    own = {"tokenizer_class": "Odd", "auto_map": {"AutoTokenizer": ["tokens_odd.Odd", None]}}
    file.write_text(json.dumps({**json.loads(file.read_text()), **own}))
    (pico_checkpoint / "tokens_odd.py").write_text(CODE.format(marker=str(tmp_path / "marker")))
    code, _, error = run(*commands(pico_checkpoint, text)[command])
    assert code == 2
    (line,) = error.strip().splitlines()
    assert f"the tokenizer of {pico_checkpoint} can't be opened: " in line
    assert not (tmp_path / "marker").exists()
