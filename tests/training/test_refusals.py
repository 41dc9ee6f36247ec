"""What `train` refuses before it trains, as `plan --check` lists it; real steps for `plan --measure`."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from retrofox.config import load_recipe
from retrofox.training.measure import check_here, measure_here
from retrofox.training.train import train

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture
def recipe(write_recipe, tmp_path) -> Path:
    """Of two stages and an unconverted model; its cache and its output have folders of their own."""
    (tmp_path / "runs").mkdir()
    data = {"cache": str(tmp_path / "a" / "cache")}
    return write_recipe({"tokens": 128}, {"tokens": 128}, converted=False, output="runs/run", data=data)


def everything(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def refusal(recipe: Path, *changes: str) -> str:
    """The first thing that `train` and `plan` both refuse a recipe with."""
    loaded = load_recipe(recipe, list(changes))
    refusals = check_here(loaded)
    with pytest.raises((ValueError, FileNotFoundError)) as stopped:
        train(loaded)
    assert str(stopped.value) == refusals[0]
    return refusals[0]


SKIPS = ["stages.0.max_position=4096"]
BUDGET = "stages.1.budget={share: 0.2}"
ZERO = "{gate_bias: 0, gate_weight: 0, pro: 0, attention: 0, rest: 0}"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (["lora={targets: [nope]}"], "lora.targets: ['nope'] are no linear layers"),
        ([f"stages.0.rates={ZERO}"], "nothing to train"),
        (["fox=null", "stages.0.objective=align"], "give `fox:` to the recipe"),
        (["fox=null", "lora={rank: 2}"], "give the recipe a `fox:` section"),
        (
            ["stages.0.batch_tokens=192", "stages.0.micro_batch=2"],
            "stages.0: batch_tokens = 192 must be a multiple of sequence_length x micro_batch",
        ),
        ([*SKIPS, "fox=null", "attention=eager"], "stages.0: max_position trains an unconverted model by SDPA"),
        (["data.train=[nowhere.txt]"], "no data at nowhere.txt"),
        (["data.tokenizer=nowhere/at/all"], "nowhere/at/all"),
        (["data.train=['hf:/nowhere/at/all']"], "can't be loaded"),
        (["fox=null", "attention=flash_attention_3"], "stages.0: attention: flash_attention_3 can't run here"),
        ([f"stages.1.rates={ZERO}"], "stages.1: nothing to train"),
        ([BUDGET, "fox.open_heads=[[0,0],[0,1],[1,0]]"], "stages.1: fox.open_heads leaves 75% of the heads open"),
        ([BUDGET, "stages.1.rates={gate_bias: 0, gate_weight: 0}"], "budget is for gates, and this stage trains none"),
        ([BUDGET, "fox={init: open}"], "stages.1: budget: gates of init open have no gradient"),
        (["optim=galore_adamw"], "optim: galore_adamw makes its own parameter groups"),
        (["optim=grokadamw"], "optim: grokadamw: Please install grokadamw"),
        (["optim=adamw_nope"], "adamw_nope is not a valid OptimizerNames"),
    ],
)
def test_train_stops_at_what_plan_refuses_and_leaves_nothing(recipe, tmp_path, changes, reason):
    before = everything(tmp_path)
    found = refusal(recipe, *changes)
    assert reason in found
    assert "\n" not in found
    assert everything(tmp_path) == before


@pytest.mark.parametrize(
    ("fox", "reason"),
    [
        ("{rope: keep}", "would change all documents read beside one that skips"),
        ("{rope: drop}", "max_position trains RoPE at distances, and this model has no RoPE"),
        ("{rope: drop, log_n: 64}", None),
    ],
)
def test_skips_without_effect_or_that_would_change_other_documents_are_refused(
    recipe, tmp_path, pico_llama, saved, fox, reason
):
    parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = saved(pico_llama(rope_parameters=parameters), tmp_path / "dynamic")
    refusals = check_here(load_recipe(recipe, [*SKIPS, f"model={model}", f"fox={fox}"]))
    assert [reason is not None and reason in text for text in refusals] == [True] * (reason is not None)


FSDP1, FSDP2 = {"ACCELERATE_USE_FSDP": "true"}, {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
DEEPSPEED = {"ACCELERATE_USE_DEEPSPEED": "true"}


@pytest.mark.parametrize(
    ("told", "changes", "reason"),
    [
        ({"PARALLELISM_CONFIG_SP_SIZE": "2"}, [], "accelerate's sequence parallelism (PARALLELISM_CONFIG_SP_SIZE=2)"),
        ({"PARALLELISM_CONFIG_CP_SIZE": "2"}, [], "accelerate's context parallelism"),
        (FSDP1, [], "FSDP version 1 can't keep the forget gates"),
        ({**FSDP2, "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}, [], "set fsdp_cpu_ram_efficient_loading: false"),
        ({**DEEPSPEED, "ACCELERATE_MIXED_PRECISION": "bf16"}, [], "DeepSpeed's 16-bit engines round the forget gates"),
        (DEEPSPEED, ["stages.0.tiled_mlp=auto"], "parallel.context and tiled_mlp run with DDP"),
        ({**DEEPSPEED, "WORLD_SIZE": "2"}, ["parallel.context=2"], "parallel.context and tiled_mlp run with DDP"),
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


@pytest.mark.parametrize("broken", [b" \n", b"\xff\xfe\xfd" * 99])
def test_texts_that_cannot_be_read_leave_no_output(recipe, tmp_path, broken):
    (tmp_path / "text.txt").write_bytes(broken)
    with pytest.raises(ValueError, match=r"text\.txt"):
        train(load_recipe(recipe))
    assert not (tmp_path / "runs" / "run").exists()


def test_a_run_writes_over_nothing_that_is_not_its_own(write_recipe, tmp_path, pico_fox, pico_fox_checkpoint):
    recipe = write_recipe({"tokens": 128})
    for place in ("run/model", "run/converted"):
        theirs = tmp_path / place
        pico_fox().save_pretrained(theirs)
        before = {path: path.read_bytes() for path in theirs.rglob("*")}
        assert "run has a model, and not of a run" in refusal(recipe)
        assert "the model to train, and the run would write over it" in refusal(recipe, f"model={theirs}")
        assert {path: path.read_bytes() for path in theirs.rglob("*")} == before
        theirs.rename(tmp_path / theirs.name)
    (tmp_path / "file").touch()
    assert "the run (`output`) can't go to" in refusal(recipe, f"output={tmp_path / 'file' / 'run'}")
    assert "token shards (`data.cache`) can't go to" in refusal(recipe, f"data.cache={tmp_path / 'file'}")
    before = sorted(pico_fox_checkpoint.iterdir())
    assert "is a model's directory" in refusal(recipe, f"output={pico_fox_checkpoint}")
    assert "lies inside the model" in refusal(recipe, f"output={pico_fox_checkpoint / 'run'}")
    (tmp_path / "config.json").write_text('{"model_type": "of a project, not of a model"}')
    assert check_here(load_recipe(recipe)) == []
    assert sorted(pico_fox_checkpoint.iterdir()) == before
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("A text of its own. " * 99)
    inside = [f"data.train=[{tmp_path / 'texts'}]", f"output={tmp_path / 'texts' / 'run'}"]
    for texts in ("texts", "texts/**", "texts/**/*.json*"):
        inside[0] = f"data.train=['{tmp_path / texts}']"
        assert "run lies inside" in refusal(recipe, *inside)
        assert "data.cache" in refusal(recipe, inside[0], f"data.cache={tmp_path / 'texts' / 'shards'}")
    beside = [f"data.train=['{tmp_path / 'texts' / '**' / '*.txt'}']", inside[1]]
    assert check_here(load_recipe(recipe, beside)) == []
    hidden = [f"output={tmp_path / '_runs' / 'run'}", f"data.cache={tmp_path / '.cache' / 'shards'}"]
    assert check_here(load_recipe(recipe, [f"data.train=['{tmp_path}']", *hidden])) == []


def test_special_tokens_that_no_text_holds_need_no_embedding(
    write_recipe, tmp_path, pico_tokenizer, pico_fox_checkpoint
):
    """Gemma 3's smallest model embeds 262,144 tokens and its tokenizer has one more, for pictures."""
    tokenizer = type(pico_tokenizer).from_pretrained(pico_fox_checkpoint)
    fillers = [f"<filler {number}>" for number in range(len(tokenizer), 288)]
    tokenizer.add_tokens([*fillers, "<picture>"], special_tokens=True)
    tokenizer.save_pretrained(pico_fox_checkpoint)
    recipe = write_recipe({"tokens": 128})
    train(load_recipe(recipe))
    (tmp_path / "text.txt").write_text("a fox <picture> and a gate " * 60)
    with pytest.raises(
        ValueError, match=r"text\.txt holds the token '<picture>', number 288, and the model embeds 288"
    ):
        train(load_recipe(recipe, ["data.split_special_tokens=false", f"output={tmp_path / 'other'}"]))


def test_models_of_other_kinds_are_refused(recipe, tmp_path, saved):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    assert "holds a LoRA adapter (adapter_config.json): merge it" in refusal(recipe, f"model={tmp_path / 'adapter'}")
    config = GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=288, bos_token_id=0, eos_token_id=1)
    model = saved(GPT2LMHeadModel(config), tmp_path / "gpt2")
    assert "a gpt2 model has no decoder layers" in refusal(recipe, "fox=null", f"model={model}")


@pytest.mark.parametrize("name", sorted(file.stem for file in RECIPES.glob("*.yaml")))
def test_shipped_recipes_are_not_refused(pico_checkpoint, tmp_path, monkeypatch, name):
    """With a model of four heads in place of the Hub's: sets of the Hub aren't looked for."""
    monkeypatch.chdir(tmp_path)
    values = [f"model={pico_checkpoint}"]
    if "open_heads" in (RECIPES / f"{name}.yaml").read_text():
        values.append("fox.open_heads=0")
    assert check_here(load_recipe(RECIPES / f"{name}.yaml", values)) == []


def test_measured_steps_are_real(write_recipe, run):
    code, shown, _ = run("plan", write_recipe(), "--measure", "--json", "--price", 2)
    assert code == 0
    report = json.loads(shown)
    stage = report["stages"][0]
    assert stage["measured"]["tokens_per_second"] > 0
    assert stage["hours"][0] == pytest.approx(512 / stage["measured"]["tokens_per_second"] / 3600)
    assert report["hours"] == stage["hours"]
    assert report["dollars"] == [2 * hours for hours in stage["hours"]]


@pytest.mark.parametrize("change", [["--gpus", "2"], ["parallel.context=2", "--gpus", "2"]])
def test_what_would_not_run_here_as_planned_is_not_measured(write_recipe, run, change, monkeypatch):
    monkeypatch.setattr("retrofox.training.measure.check_here", lambda recipe: [])
    code, _, error = run("plan", write_recipe(), "--measure", *change)
    assert code == 2
    assert "on as many devices as processes, here 1: leave out --gpus, set parallel.context=1" in " ".join(
        error.split()
    )


def test_the_command_shows_what_is_checked_here(write_recipe, run):
    recipe = write_recipe()
    assert run("plan", recipe, "data.train=[nowhere/]")[0] == 0
    code, shown, _ = run("plan", recipe, "data.train=[nowhere/]", "--check")
    assert code == 2
    assert "nowhere" in shown


def test_several_devices_are_measured_by_several_processes(make_recipe, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE=2 in one process: measuring takes as many"):
        measure_here(make_recipe(), {})
