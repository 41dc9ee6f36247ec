"""The recipe: strict, with hints, and the same after a round trip."""

import os
import re
from pathlib import Path

import pytest
import yaml

from retrofox.config import ExtendStage, Recipe, dump, load_recipe, schema, validate
from retrofox.config.yaml_text import read_yaml
from retrofox.fox_spec import FoxSpec
from retrofox.support.counts import parse_count

MINIMAL = """
model: base
output: out
data: {train: [books.txt]}
stages:
  - {objective: extend, tokens: 1M, sequence_length: 64, batch_tokens: 256, learning_rate: 6e-4}
"""
RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


@pytest.fixture
def recipe_file(tmp_path):
    file = tmp_path / "recipe.yaml"
    file.write_text(MINIMAL)
    return file


def test_minimal_recipe_fills_in_defaults(recipe_file):
    recipe = load_recipe(recipe_file)
    stage = recipe.stages[0]
    assert recipe.fox is None
    assert (stage.tokens, stage.learning_rate) == (1_000_000, 6e-4)
    assert stage.rate("gate_bias") == pytest.approx(3e-3)
    assert stage.rate("attention") == 6e-4


def test_dump_round_trips_and_is_plain_yaml(recipe_file):
    recipe = load_recipe(recipe_file, ["fox.rope=partial", "fox.half_life=[256, 65536]", "lora.rank=4"])
    assert validate(yaml.safe_load(dump(recipe))) == recipe
    assert recipe.fox is not None
    assert recipe.fox.half_life == (256.0, 65536.0)


@pytest.mark.parametrize("output", ["1e3", "6E-4", ".5e1", "null", "on", "0x1f", "1_0", "ü: x"])
def test_text_that_looks_like_another_value_stays_text(recipe_file, output):
    recipe = load_recipe(recipe_file, [f"output={output!r}"])
    recipe_file.write_text(dump(recipe), encoding="utf-8")
    assert load_recipe(recipe_file) == recipe


def test_a_recipe_may_come_through_a_pipe(recipe_file):
    end, begin = os.pipe()
    os.write(begin, MINIMAL.encode())
    os.close(begin)
    assert load_recipe(f"/dev/fd/{end}") == load_recipe(recipe_file)
    os.close(end)
    with pytest.raises(FileNotFoundError, match="no recipe at"):
        load_recipe(recipe_file.parent)


def test_overrides_reach_lists_and_create_sections(recipe_file):
    recipe = load_recipe(
        recipe_file, ["stages.0.tokens=2M", "checkpoint.keep=5", "data.train.0=other.txt", "stages.0.rates.rest=0"]
    )
    assert recipe.stages[0].tokens == 2_000_000
    assert recipe.checkpoint.keep == 5
    assert recipe.data.train[0].path == "other.txt"
    assert recipe.stages[0].rate("rest") == 0


@pytest.mark.parametrize(
    ("override", "needles"),
    [
        ("stages.0.lerning_rate=1", ["stages.0.lerning_rate", "did you mean 'learning_rate'"]),
        ("stages.0.rates.gates=1", ["stages.0.rates.gates", "gate_bias"]),
        ("modle=x", ["modle", "did you mean 'model'"]),
        ("data.train.0.pth=x", ["which has no 'pth'", "data.train.0"]),
        ("fox.rop=drop", ["fox", "did you mean 'rope'"]),
        ("fox=3", ["fox: the fox section must be a mapping", "got a int"]),
        ("stages.0={objective: align, tokens: 9, sequence_length: 9, rates: {rest: 1e-3}}", ["rates.rest must be 0"]),
        ("stages.0.tokens=many", ["stages.0.tokens", "'many'", "K, M, B, T: powers of 1000; Ki, Mi, Gi: of 1024"]),
        ("stages.0.batch_tokens=100", ["multiple of sequence_length", "64 or 128"]),
        ("stages.0.temperature=2", ["temperature: unknown key, given 2 (only with objective distill)."]),
        ("data.eval=[a, {path: b, weight: 3}]", ["data: weights are for texts to train on"]),
        ("stages.0.offload_activations=true", ["set gradient_checkpointing: full"]),
        ("stages.0={objective: align, tokens: 9, sequence_length: 3, offload_activations: true}", ["offload_activ"]),
        (
            "stages.0={objective: distill, tokens: 9, sequence_length: 3, ce_weight: 1, temperature: 3}",
            ["ce_weight 1 leaves temperature without effect: drop one of them; got 3"],
        ),
        ("stages.0.max_position=64", ["max_position must exceed sequence_length (64), got 64"]),
        (
            "stages.0={objective: extend, tokens: 9, sequence_length: 3, schedule: constant, min_lr_ratio: 0.1}",
            ["constant stays at 1: remove it, got 0.1"],
        ),
        ("stages.0.warmup_tokens=1M", ["warmup_tokens must be less than tokens"]),
        ("stages.1.tokens=", ["stages is a list of 1, counted from 0, which has no '1'"]),
        ("fox={max_half_life: soon}", ["max_half_life must be a number of tokens", "'soon'"]),
        ("seed", ["a.b=c"]),
        ("seed=[", ["not valid YAML"]),
    ],
)
def test_bad_overrides_say_what_was_given_and_what_is_allowed(recipe_file, override, needles):
    with pytest.raises(ValueError, match=r".") as error:
        load_recipe(recipe_file, [override])
    for needle in needles:
        assert needle in str(error.value)


def extends(recipe: Recipe) -> ExtendStage:
    stage = recipe.stages[0]
    assert isinstance(stage, ExtendStage)
    return stage


@pytest.mark.parametrize("objective", ["align", "distill"])
def test_only_extend_takes_positions_that_skip(recipe_file, objective):
    stage = f"stages.0={{objective: {objective}, tokens: 9, sequence_length: 3, max_position: 9}}"
    with pytest.raises(ValueError, match=r"max_position: unknown key, given 9 \(only with objective extend\)"):
        load_recipe(recipe_file, [stage])
    assert extends(load_recipe(recipe_file, [stage.replace(objective, "extend")])).max_position == 9


def test_file_is_named_in_the_error(recipe_file, tmp_path):
    recipe_file.write_text(MINIMAL + "sede: 3\n")
    with pytest.raises(ValueError, match=r"recipe\.yaml: sede: unknown key, given 3 \(did you mean 'seed'\?\)\. Known"):
        load_recipe(recipe_file)
    recipe_file.write_text(MINIMAL + "seed: 1\nseed: 2\n")
    with pytest.raises(ValueError, match="key 'seed' given twice"):
        load_recipe(recipe_file)
    recipe_file.write_bytes(b"model: \xff")
    with pytest.raises(ValueError, match=r"recipe\.yaml can.t be read \(it is not UTF-8 text"):
        load_recipe(recipe_file)
    recipe_file.write_text("- a\n")
    with pytest.raises(ValueError, match="mapping"):
        load_recipe(recipe_file)
    with pytest.raises(FileNotFoundError, match="no recipe at"):
        load_recipe(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    "key", ["r", "lora_alpha", "target_modules", "lora_dropout", "use_dora", "modules_to_save", "bias", "use_rslora"]
)
def test_every_key_of_a_peft_config_has_a_hint(key, recipe_file):
    with pytest.raises(ValueError, match=rf"lora\.{key}: unknown key, given 1 \(.+\)\. Known"):
        load_recipe(recipe_file, [f"lora.{key}=1"])


def test_stages_may_share_what_they_have_in_common(recipe_file):
    recipe_file.write_text(MINIMAL.replace("- {", "- &first {") + "  - {<<: *first, tokens: 3M}\n")
    first, second = load_recipe(recipe_file).stages
    assert second.tokens == 3_000_000
    assert second.model_copy(update={"tokens": first.tokens}) == first
    recipe_file.write_text(MINIMAL.replace("- {", "- &first {") + "  - *first\n")
    first, second = load_recipe(recipe_file, ["stages.1.tokens=2M", "stages.0.rates.rest=0"]).stages
    assert (first.tokens, second.tokens) == (1_000_000, 2_000_000)
    assert (first.rate("rest"), second.rate("rest")) == (0, 6e-4)


def test_home_is_meant_by_a_tilde(recipe_file, monkeypatch):
    monkeypatch.setenv("HOME", "/home/fox")
    recipe = load_recipe(recipe_file, ["model=~/base", "output=~/out", "data.tokenizer=~/words"])
    assert (recipe.model, recipe.output) == ("/home/fox/base", "/home/fox/out")
    assert recipe.data.tokenizer == "/home/fox/words"


def test_schema_takes_what_recipes_say():
    """Counts may be "20M", sources paths: an editor must not underline them."""
    definitions = schema()["$defs"]
    whole, text = definitions["ExtendStage"]["properties"]["tokens"]["anyOf"]
    assert (whole["type"], text["type"]) == ("integer", "string")
    assert all(re.search(text["pattern"], count) for count in ("20M", "512Ki", "1.5Gi"))
    assert re.search(definitions["FoxSpec"]["properties"]["max_half_life"]["anyOf"][1]["pattern"], "256Mi")
    assert {"type": "string"} in definitions["DataConfig"]["properties"]["train"]["items"]["anyOf"]


def test_counts_with_suffixes():
    texts = {"64k": 64_000, "20M": 20_000_000, "1.5B": 1_500_000_000, "6e6": 6_000_000, "1_000": 1000}
    texts |= {"512Ki": 512 * 2**10, "256Mi": 256 * 2**20, "1.5 Gi": 3 * 2**29, "0.5Ki": 512}
    texts |= {text: text for text in ("20Ti", "5 i", "many", "-3")}
    assert {text: parse_count(text) for text in texts} == texts
    assert read_yaml("a: 6e-4", "x") == {"a": 6e-4}


def test_a_preset_in_a_recipe_is_written_out_in_full(recipe_file):
    recipe = load_recipe(recipe_file, ["fox={preset: fox-pro, sink_tokens: 2, half_life: [2, 1Ki]}"])
    written = yaml.safe_load(dump(recipe))["fox"]
    assert written["preset"] == "fox-pro"
    assert (written["rope"], written["gate"], written["sink_tokens"]) == ("drop", "data", 2)
    assert written["pro"] == ["qk-norm", "output-norm", "output-gate", "k-shift", "v-shift"]
    assert written["half_life"] == [2, 1024]
    recipe_file.write_text(dump(recipe), encoding="utf-8")
    assert dump(load_recipe(recipe_file)) == dump(recipe)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_shipped_recipes_parse_are_short_and_say_what_was_measured_on_what(path):
    recipe = load_recipe(path)
    text = path.read_text()
    assert isinstance(recipe, Recipe)
    assert len(text.splitlines()) <= 60
    assert text.startswith("#")
    for word in ("hardware", "tokens", "time", "result"):
        assert word in text.lower()
    assert recipe.data.eval
    for source in (*recipe.data.train, *recipe.data.eval):
        assert re.fullmatch(r"hf:(emozilla/pg19|monology/pile-uncopyrighted):\w+\[:\d+\]", source.path)
    assert ("not run here" in text) != ("corpus:   the figures above are of a private mixture" in text)


@pytest.mark.parametrize(
    "fox",
    [
        {"rope": "keep", "max_wavelength": 100},
        {"rope": "partial", "rope_factor": 4.0},
        {"gate": "none", "half_life": [2, 3]},
        {"gate": "none", "sink_tokens": 4},
        {"gate": "none", "gate_heads": "kv"},
        {"gate": "none", "horizon": 16.0},
        {"init": "open", "half_life": [2, 3]},
        {"preset": "alibi", "half_life": [8, 64]},
    ],
    ids=str,
)
def test_fields_without_effect_are_refused(fox):
    with pytest.raises(ValueError, match=r"fox: .* without effect: drop one of them"):
        validate({**read_yaml(MINIMAL, "x"), "fox": fox})


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ({"fox": {"base": "another"}}, "base: conversion fills it in"),
        ({"data": {"train": ["a/"], "eval": [{"path": "b/", "questions": 0.5}]}}, "set fact_share"),
        ({"data": {"train": ["a/"], "questions": 0.5}}, "questions are a share of the facts: set fact_share"),
        ({"data": {"train": [{"path": "a/", "questions": 0.5}, {"path": "b/", "fact_share": 0.5}]}}, "set fact_share"),
        ({"data": {"train": [{"path": "a/", "chat": True}], "fact_share": 0.5}}, "all sources are chat: remove"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4, "beta_fats": 3}}, "yarn has no beta_fats; .* beta_fast"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4, "beta_fast": 3}}, "has no beta_fast; .*: none"),
    ],
)
def test_what_a_recipe_can_not_mean_is_refused(section, reason):
    with pytest.raises(ValueError, match=reason):
        validate({**read_yaml(MINIMAL, "x"), **section})


def test_the_default_treats_rope_and_sinks_as_the_default_recipe_does():
    recipe = load_recipe(next(path for path in RECIPES if path.stem == "smollm2-stretch")).fox
    assert recipe is not None
    default, said = FoxSpec().resolved(8192), recipe.resolved(8192)
    assert [(s.rope, s.rope_factor, s.rope_length, s.gate, s.sink_tokens) for s in (default, said)] == [
        ("interpolate", 8, 8192, "data", 1)
    ] * 2
    assert FoxSpec.from_dict({"preset": "fox-stretch"}).resolved(8192).half_life == (4096, 1 << 20)
    assert FoxSpec(init="measured").resolved(8192).half_life == (16, 1024)


@pytest.mark.parametrize(
    "text", ["a: [1, 2", "a: 1\na: 2", "a: *b", "? [a, b]\n: c", "a: " + "[" * 5000, "a: " + "9" * 5000], ids=range(6)
)
def test_a_yaml_error_is_one_line_that_names_the_file(text):
    with pytest.raises(ValueError, match=r"^r.yaml: not valid YAML: ") as error:
        read_yaml(text, "r.yaml")
    assert "\n" not in str(error.value)


def test_facts_of_the_data_hold_for_every_source_that_has_no_share_of_its_own(recipe_file):
    """So a recipe keeps them when its texts are replaced by one's own."""
    shares = ["data.fact_share=0.7", "data.questions=0.5", "data.eval=[held-out/]"]
    own = "data.train=[my-texts/, {path: plain/, fact_share: 0}, {path: b/, fact_share: 0.2, questions: 0.1}]"
    data = load_recipe(recipe_file, [*shares, own]).data
    assert [(s.fact_share, s.questions) for s in data.read_as()] == [(0.7, 0.5), (0.0, 0.5), (0.2, 0.1)]
    assert [(s.fact_share, s.questions) for s in data.eval] == [(None, None)]
