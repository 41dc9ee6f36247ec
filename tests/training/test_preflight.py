"""What a recipe alone decides is refused by `plan --check` and `train` alike, before anything is written."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from retrofox.config import load_recipe
from retrofox.data.prepare import prepare
from retrofox.planning.memory import Setting, memory
from retrofox.planning.shape import shape_of
from retrofox.training.measure import check_here
from retrofox.training.train import train


@pytest.fixture
def recipe(write_recipe, tmp_path) -> Path:
    (tmp_path / "runs").mkdir()
    data = {"cache": str(tmp_path / "a" / "cache")}
    return write_recipe({"tokens": 256}, converted=False, output="runs/run", data=data)


def everything(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="fp16 runs here")
SKIPS = ["stages.0.max_position=4096"]
ZERO = "{gate_bias: 0, gate_weight: 0, pro: 0, attention: 0, rest: 0}"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (["lora={targets: [nope]}"], "lora.targets: ['nope'] are no linear layers"),
        (["stages.0.trainable=['*gaet*']"], "pattern '*gaet*' matches no parameter"),
        ([f"stages.0.rates={ZERO}"], "nothing to train"),
        (["fox=null", "stages.0.objective=align"], "give `fox:` to the recipe"),
        (["fox=null", "lora={rank: 2}"], "give the recipe a `fox:` section"),
        (
            ["stages.0.batch_tokens=192", "stages.0.micro_batch=2"],
            "stages.0: batch_tokens = 192 must be a multiple of sequence_length x micro_batch",
        ),
        (
            ["stages.0.sequence_length=10M", "stages.0.tokens=10M", "stages.0.batch_tokens=10M"],
            "stages.0: it needs",
        ),
        ([*SKIPS, "fox=null", "attention=eager"], "stages.0: max_position trains an unconverted model by SDPA"),
        ([*SKIPS, "fox={rope: drop}"], "stages.0: max_position: 4096 changes nothing in a model without RoPE"),
        (["data.train=[nowhere.txt]"], "no data at nowhere.txt"),
        (["data.tokenizer=nowhere/at/all"], "nowhere/at/all"),
        (["optim=adamw_nope"], "optim: adamw_nope can't be used"),
        pytest.param(["precision=fp16"], "precision fp16 needs a GPU", marks=WITHOUT_GPU),
        (["optim=sgd", "stages.0.betas=[0.5, 0.9]"], "betas [0.5, 0.9] have no effect with optim sgd: remove them"),
        (
            ["fox={gate: bias}", "stages.0.gate_weight_decay=0.1"],
            "gate_weight_decay is for gates, and this stage trains none",
        ),
        (
            ["fox={gate: fixed}", "stages.0.gate_delay_tokens=64"],
            "gate_delay_tokens is for gates, and this stage trains none",
        ),
    ],
)
def test_train_stops_at_what_plan_refuses_and_leaves_nothing(recipe, tmp_path, changes, reason):
    loaded, before = load_recipe(recipe, changes), everything(tmp_path)
    refusals = check_here(loaded)
    assert reason in refusals[0]
    assert "\n" not in refusals[0]
    with pytest.raises((ValueError, FileNotFoundError)) as stopped:
        train(loaded)
    assert str(stopped.value) == refusals[0]
    assert everything(tmp_path) == before


@pytest.mark.parametrize(
    ("fox", "refused"),
    [("{rope: keep}", True), ("{rope: drop, log_n: 16}", False)],  # log_n alone follows each token's own position
)
def test_skips_that_would_change_other_documents_are_refused(
    recipe, tmp_path, pico_llama, pico_tokenizer, fox, refused
):
    parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    pico_llama(rope_parameters=parameters).save_pretrained(tmp_path / "dynamic")
    pico_tokenizer.save_pretrained(tmp_path / "dynamic")
    refusals = check_here(load_recipe(recipe, [*SKIPS, f"model={tmp_path / 'dynamic'}", f"fox={fox}"]))
    assert [("would change all documents read beside one that skips" in text) for text in refusals] == [True] * refused


FSDP1, FSDP2 = {"ACCELERATE_USE_FSDP": "true"}, {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true"}
OFFLOAD = "stages.0.offload_optimizer=true"


@pytest.mark.parametrize(
    ("told", "changes", "reason"),
    [
        ({"PARALLELISM_CONFIG_SP_SIZE": "2"}, [], "accelerate's sequence parallelism (PARALLELISM_CONFIG_SP_SIZE=2)"),
        ({"PARALLELISM_CONFIG_CP_SIZE": "2"}, [], "accelerate's context parallelism"),
        ({"ACCELERATE_DYNAMO_BACKEND": "EAGER"}, [], "accelerate's dynamo_backend"),
        (FSDP1, [], "FSDP version 1 can't keep the forget gates"),
        ({**FSDP2, "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}, [], "set fsdp_cpu_ram_efficient_loading: false"),
        ({**DEEPSPEED, "ACCELERATE_MIXED_PRECISION": "bf16"}, [], "DeepSpeed's 16-bit engines round the forget gates"),
        (DEEPSPEED, ["precision=fp16"], "DeepSpeed's 16-bit engines round the forget gates"),
        (DEEPSPEED, ["stages.0.tiled_mlp=auto"], "tiled_mlp runs with DDP and FSDP2, not with DeepSpeed"),
        ({**DEEPSPEED, "WORLD_SIZE": "2"}, ["parallel.context=2"], "parallel.context runs with DDP and FSDP2"),
        (FSDP2, [OFFLOAD], "offload_optimizer is for whole weights"),
        (
            {},
            [OFFLOAD, "optim=adafactor"],
            "offload_optimizer moves the state of torch's own optimizers",
        ),
    ],
)
def test_a_launch_that_would_lose_gates_or_fail_later_is_refused(recipe, monkeypatch, told, changes, reason):
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert [text for text in check_here(load_recipe(recipe, changes)) if text.startswith(reason)]


@pytest.mark.parametrize(
    ("change", "package"),
    [
        ("log.report_to=[wandb]", "wandb"),
        ("lora={quantize: nf4}", "bitsandbytes"),
        ("data.eval=['hf:emozilla/pg19']", "datasets"),
    ],
)
def test_a_package_that_is_not_installed_is_named(recipe, monkeypatch, change, package):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda *name: None if name[0] == package else found(*name))
    (refusal,) = check_here(load_recipe(recipe, [change]))
    assert f"needs the package {package}: pip install" in refusal


@pytest.mark.parametrize(
    "fox",
    [
        "{rope: keep, gate: none}",
        "{rope: interpolate}",
        "{rope: partial, max_wavelength: 40}",
        "{rope: anneal, anneal_to: drop, anneal_tokens: 100}",
        "{rope: drop, log_n: 64}",
    ],
)
def test_positions_may_skip_where_anything_depends_on_them(recipe, fox):
    assert check_here(load_recipe(recipe, [*SKIPS, f"fox={fox}"])) == []


@pytest.mark.parametrize("broken", ["misspelt", "no text", "not UTF-8"])
@pytest.mark.parametrize("command", [train, prepare])
def test_texts_that_cannot_be_read_leave_no_output(recipe, tmp_path, command, broken):
    text = tmp_path / "text.txt"
    if broken == "misspelt":
        text.rename(tmp_path / "texts.txt")
    else:
        text.write_bytes(b" \n" if broken == "no text" else b"\xff\xfe\xfd" * 99)
    before = everything(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=r"text\.txt"):
        command(load_recipe(recipe))
    cache = tmp_path / "a" / "cache"
    assert [path for path in everything(tmp_path) if path not in (cache, *cache.rglob("*"), cache.parent)] == before


def test_shards_that_were_finished_stay_where_a_later_file_cannot_be_read(recipe, tmp_path):
    (tmp_path / "wrong.txt").write_bytes(b"\xff\xfe\xfd" * 99)
    changes = [f"data.train=['{tmp_path / 'text.txt'}', '{tmp_path / 'wrong.txt'}']"]
    with pytest.raises(ValueError, match=r"wrong\.txt: not UTF-8"):
        prepare(load_recipe(recipe, changes), progress=False)
    assert len(list((tmp_path / "a" / "cache").glob("*.tokens"))) == 1


def test_a_cpu_with_too_little_memory_is_refused_with_what_to_change(recipe, monkeypatch):
    wide = load_recipe(
        recipe, ["stages.0.sequence_length=4096", "stages.0.batch_tokens=8192", "stages.0.micro_batch=2"]
    )
    assert check_here(wide) == []
    shape = shape_of(json.loads((Path(wide.model) / "config.json").read_text()), wide.fox)
    needed = sum(memory(shape, wide, wide.stages[0], Setting(cuda=False)).values())
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=0.7 * needed))
    (found,) = check_here(wide)
    assert found.startswith("stages.0: it needs")
    assert found.endswith("set micro_batch: 1")


def test_a_tokenizer_with_more_words_than_the_model_embeds(recipe, tmp_path, pico_llama, pico_tokenizer):
    pico_llama(vocab_size=200).save_pretrained(tmp_path / "small")
    pico_tokenizer.save_pretrained(tmp_path / "small")
    loaded, before = load_recipe(recipe, [f"model={tmp_path / 'small'}"]), everything(tmp_path)
    (found,) = check_here(loaded)
    assert f"the tokenizer has {pico_tokenizer.vocab_size} tokens, the model embeds 200" in found
    with pytest.raises(ValueError, match=r"the model embeds 200: set data\.tokenizer"):
        train(loaded)
    assert everything(tmp_path) == before


def test_a_folder_that_was_there_loses_nothing_to_texts_that_cannot_be_read(recipe, tmp_path):
    cache = tmp_path / "a" / "cache"
    cache.mkdir(parents=True)
    (cache / "notes.json").write_text("years of work")
    (tmp_path / "text.txt").write_bytes(b"\xff\xfe\xfd" * 99)
    with pytest.raises(ValueError, match="not UTF-8"):
        prepare(load_recipe(recipe), progress=False)
    assert (cache / "notes.json").read_text() == "years of work"
