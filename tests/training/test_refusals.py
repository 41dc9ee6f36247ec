"""What a run refuses before it trains: foreign files in its way, stages that can't run, tokens without an embedding."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from transformers import GPT2Config, GPT2LMHeadModel

from retrofox.config import load_recipe
from retrofox.training.measure import check_here
from retrofox.training.train import train

STAGE = {"objective": "extend", "tokens": 128, "sequence_length": 64, "batch_tokens": 128, "learning_rate": 3e-3}


@pytest.fixture
def recipe(write_recipe) -> Path:
    return write_recipe({"tokens": 128}, {"tokens": 128})


def refusal(recipe: Path, *changes: str) -> str:
    """What `train` and `plan` both refuse a recipe with."""
    loaded = load_recipe(recipe, list(changes))
    assert check_here(loaded)
    with pytest.raises(ValueError, match=r".") as error:
        train(loaded)
    assert str(error.value) in check_here(loaded)
    return str(error.value)


def test_a_run_writes_over_nothing_that_is_not_its_own(recipe, tmp_path, pico_fox, pico_fox_checkpoint):
    for place in ("run/model", "run/converted"):
        theirs = tmp_path / place
        pico_fox().save_pretrained(theirs)
        before = {path: path.read_bytes() for path in theirs.rglob("*")}
        assert f"{theirs} is there, and not of a run" in refusal(recipe)
        assert "would write over its own model" in refusal(recipe, f"model={theirs}")
        assert {path: path.read_bytes() for path in theirs.rglob("*")} == before
        theirs.rename(tmp_path / theirs.name)
    before = sorted(pico_fox_checkpoint.iterdir())
    assert "lies inside the model" in refusal(recipe, f"output={pico_fox_checkpoint}")
    assert "lies inside the model" in refusal(recipe, f"output={pico_fox_checkpoint / 'run'}")
    assert sorted(pico_fox_checkpoint.iterdir()) == before


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("trainable=['*gaet*']", r"pattern '*gaet*' matches no parameter"),
        ("rates={gate_bias: 0, gate_weight: 0, pro: 0, attention: 0, rest: 0}", "nothing to train"),
        ("objective=align", "an earlier stage trains pretrained tensors"),
    ],
)
def test_a_later_stage_is_refused_before_the_first_one_trains(recipe, tmp_path, change, reason):
    changes = [f"stages.1.{change}"] + (["stages.1.teacher=shared"] if "align" in change else [])
    found = refusal(recipe, *changes)
    assert found.startswith("stages.1: ")
    assert reason in found
    assert not list((tmp_path / "run").glob("stage-*"))
    train(load_recipe(recipe))  # the corrected recipe goes on in the same OUTPUT


def test_an_adapter_is_not_a_model_to_train(recipe, tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    assert "holds a LoRA adapter (adapter_config.json): merge it" in refusal(recipe, f"model={tmp_path / 'adapter'}")


def test_special_tokens_that_no_text_holds_need_no_embedding(recipe, tmp_path, pico_tokenizer, pico_fox_checkpoint):
    """Gemma 3's smallest model embeds 262,144 tokens and its tokenizer has one more, for pictures."""
    tokenizer = type(pico_tokenizer).from_pretrained(pico_fox_checkpoint)
    fillers = [f"<filler {number}>" for number in range(len(tokenizer), 288)]
    tokenizer.add_tokens([*fillers, "<picture>"], special_tokens=True)
    tokenizer.save_pretrained(pico_fox_checkpoint)
    one = ["stages=[" + yaml.safe_dump(STAGE, default_flow_style=True).strip() + "]"]
    assert check_here(load_recipe(recipe, one)) == []
    train(load_recipe(recipe, one))
    (tmp_path / "text.txt").write_text("a fox <picture> and a gate " * 60)
    with pytest.raises(
        ValueError, match=r"text\.txt holds the token '<picture>', number 288, and the model embeds 288"
    ):
        train(load_recipe(recipe, [*one, "data.split_special_tokens=false", f"output={tmp_path / 'other'}"]))


def test_models_built_otherwise_are_refused_as_controls(recipe, tmp_path, pico_tokenizer):
    config = GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=288, bos_token_id=0, eos_token_id=1)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    pico_tokenizer.save_pretrained(tmp_path / "gpt2")
    assert "a gpt2 model has no decoder layers" in refusal(recipe, f"model={tmp_path / 'gpt2'}")
