"""The plan: what it counts is what there is, and every refusal is in it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from retrofox.config import dump, load_recipe, stage_of, validate
from retrofox.planning.plan import plan
from retrofox.surgery import make_plan
from retrofox.training.flops import flops_per_token
from retrofox.training.groups import set_trainable
from retrofox.training.memory import memory
from retrofox.training.model import load_any
from retrofox.training.objectives import OBJECTIVES
from retrofox.training.output import claim_output

RECIPES = Path(__file__).parents[2] / "recipes"
NO_WAIT = {"wait_for_everyone": lambda: None}


@pytest.fixture
def make_recipe(pico_checkpoint, tmp_path):
    (tmp_path / "books.txt").write_text("the fox forgets the gate")

    def build(**values):
        stage = {"objective": "extend", "tokens": 1000, "sequence_length": 64, "batch_tokens": 128, "micro_batch": 2}
        return validate(
            {
                "model": str(pico_checkpoint),
                "fox": {"half_life": [2, 200], "max_wavelength": 40},
                "output": str(tmp_path / "out"),
                "data": {"train": [str(tmp_path / "books.txt")]},
                "stages": [stage],
                "precision": "fp32",
                **values,
            }
        )

    return build


def test_counts_are_the_models(make_recipe, pico_fox):
    report = plan(make_recipe())
    model = pico_fox()
    assert report["parameters"] == sum(p.numel() for p in model.parameters())
    assert report["parameters_added"] == 2 * 4 * (32 + 1)
    stage = report["stages"][0]
    assert sum(group["parameters"] for group in stage["groups"]) == report["parameters"]
    assert (stage["steps"], stage["tokens"], stage["tokens_asked"]) == (8, 1024, 1000)
    assert stage["fits"]
    assert stage["longest_sequence"] > 64
    assert report["refusals"] == []
    assert report["disk_gb"]["total"] > 0


def test_several_devices_are_planned_in_one_process_and_printed_once(make_recipe, monkeypatch, capsys):
    one = plan(make_recipe())["stages"][0]["memory_gb"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    report = plan(make_recipe(), show=True)
    assert len(report["refusals"]) == 1
    assert report["refusals"][0].startswith("stages.0: batch_tokens = 128 must be a multiple of")
    assert report["devices"] == 2
    assert "2 x " in capsys.readouterr().out
    with pytest.raises(ValueError, match="WORLD_SIZE=2 in one process: measuring takes as many"):
        plan(make_recipe(), measure=True)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    for stage, weights in (("2", one["weights"]), ("3", one["weights"] / 2)):
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", stage)
        assert plan(make_recipe(), show=True)["stages"][0]["memory_gb"]["weights"] == pytest.approx(weights)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("objective", ["extend", "align"])
@pytest.mark.parametrize(("rows", "tokens"), [(2, 64), (8, 16), (1, 512)])  # as probed, shorter and longer
def test_activations_are_what_autograd_keeps(make_recipe, pico_fox, objective, rows, tokens):
    """The original is a second model here, whose passes keep nothing."""
    stage = {"objective": objective, "tokens": 1024, "sequence_length": tokens, "rates": {"attention": 1e-3}}
    recipe = make_recipe(stages=[{**stage, "micro_batch": rows}])
    model, kept, cpu = pico_fox().train(), {}, torch.device("cpu")
    names = set_trainable(model, recipe.stages[0])
    assert any("q_proj" in name for name in names)
    original = [] if objective == "extend" else [pico_fox().requires_grad_(False)]

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    ids = torch.randint(0, 280, (rows, tokens))
    positions = (torch.arange(tokens) % (tokens // 2)).expand(rows, -1)  # two documents to a row
    starts = torch.arange(0, rows * tokens + 1, tokens // 2, dtype=torch.int32)
    batch = {"input_ids": ids, "position_ids": positions, "cu_seqlens": starts, "targets": ids}
    run = OBJECTIVES[objective](model, recipe.stages[0], cpu, *original)
    weights = {p.untyped_storage().data_ptr() for one in (model, *original) for p in one.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss, _ = run(model, batch)
    found = sum(size for pointer, size in kept.items() if pointer not in weights)
    del loss
    planned = memory(recipe, recipe.stages[0], model, 1, False, cpu, objective != "extend")
    assert planned["activations"] == pytest.approx(found, rel=0.06)
    assert (planned["logits"] == 0) == (objective == "align")
    assert planned["teacher"] == (0 if objective == "extend" else 4 * sum(p.numel() for p in model.parameters()))


def test_recomputation_and_freezing_save_memory(make_recipe):
    def total(key, **stage):
        base = {"objective": "extend", "tokens": 1000, "sequence_length": 64, "batch_tokens": 128, "micro_batch": 2}
        return plan(make_recipe(stages=[{**base, **stage}]))["stages"][0]["memory_gb"][key]

    assert total("activations", gradient_checkpointing="full") < total("activations")
    assert total("optimizer", rates={"rest": 0}) < total("optimizer")
    assert total("logits", objective="align") == 0


def test_adapters_are_planned_as_adapters(make_recipe):
    report = plan(make_recipe(lora={"rank": 2}))
    stage = report["stages"][0]
    full = plan(make_recipe())["stages"][0]
    trained = sum(group["parameters"] for group in stage["groups"])
    rank_two = 2 * 2 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48))  # two layers: q, o; k, v; the MLP
    assert trained == rank_two + report["parameters_added"]
    assert stage["memory_gb"]["optimizer"] < full["memory_gb"]["optimizer"]
    assert stage["adapter_parameters"] == rank_two
    assert stage["frozen_parameters"] == report["parameters"] - report["parameters_added"]


def test_flops_follow_the_textbook(pico_llama, make_recipe):
    stage = make_recipe().stages[0]
    model = pico_llama()
    matrices = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    attention = 2 * 2 * 32 * 64  # two layers, four heads of width 8, rows of 64
    assert flops_per_token(model, stage) == 6 * matrices + 3 * attention
    short = {"tokens": stage.tokens, "sequence_length": stage.sequence_length}
    distill = stage_of({"objective": "distill", **short})
    assert flops_per_token(model, distill) == 8 * matrices + 4 * attention
    model.requires_grad_(False)
    assert flops_per_token(model, stage) == 4 * matrices + 3 * attention
    inside = 2 * (2 * 32 * 32 + 2 * 32 * 16)  # q and o, k and v
    align = stage_of({"objective": "align", **short})
    assert flops_per_token(model, align) == 2 * matrices + 4 * inside + 4 * attention


def test_gradients_take_the_place_of_activations_only_in_steps_of_one_micro_batch(make_recipe, pico_fox):
    stage = {"objective": "extend", "tokens": 1024, "sequence_length": 8, "micro_batch": 1}
    model, cpu = pico_fox(), torch.device("cpu")
    trained = sum(parameter.numel() for parameter in model.parameters())

    def planned(batch_tokens: int, devices: int = 1, sharded: bool = False) -> dict[str, float]:
        recipe = make_recipe(stages=[{**stage, "batch_tokens": batch_tokens}])
        return memory(recipe, recipe.stages[0], model, devices, sharded, cpu)

    one = planned(8)
    assert 0 < one["activations"] < 4 * trained
    assert one["gradients"] == pytest.approx(4 * trained - one["activations"])
    assert planned(16)["gradients"] == 4 * trained
    assert planned(32, devices=2)["gradients"] == 8 * trained  # and DDP's buckets
    assert planned(32, devices=2, sharded=True)["gradients"] == 2 * trained


def test_refusals_are_collected(make_recipe):
    stage = {"objective": "extend", "tokens": 1000, "sequence_length": 64, "batch_tokens": 192, "micro_batch": 2}
    found = plan(make_recipe(stages=[stage], precision="fp16"))["refusals"]
    assert any("multiple of sequence_length x micro_batch" in text for text in found)
    if not torch.cuda.is_available():
        assert any("fp16" in text for text in found)
    assert any("give the recipe a `fox:`" in text for text in plan(make_recipe(fox=None, lora={"rank": 2}))["refusals"])
    align = [{"objective": "align", "tokens": 100, "sequence_length": 64}]
    assert any("give `fox:`" in text for text in plan(make_recipe(fox=None, stages=align))["refusals"])


def test_what_a_machine_lacks_is_refused(make_recipe, tmp_path, monkeypatch):
    def refusal(**values):
        (found,) = plan(make_recipe(**values))["refusals"]
        return found

    assert "lora.targets: ['nope'] are no linear layers" in refusal(lora={"targets": ["nope"]})
    assert "can't be loaded" in refusal(data={"train": [f"hf:{tmp_path / 'nowhere'}"]})
    absent = {"fox": None, "attention": "flash_attention_3"}
    assert "stages.0: attention: flash_attention_3 can't run here" in refusal(**absent)
    with pytest.raises(ValueError, match="attention: flash_attention_3 can't run here"):
        load_any(make_recipe(**absent), Path(make_recipe().model), torch.float32)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert "FSDP version 1 can't keep the forget gates" in refusal()
    monkeypatch.setenv("FSDP_VERSION", "2")
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    assert "leave the forget gates uninitialised" in refusal()


def test_disk_is_what_all_stages_leave(make_recipe):
    stage = {"objective": "extend", "tokens": 1000, "sequence_length": 64, "batch_tokens": 128, "micro_batch": 2}
    once = {**stage, "tokens": 128}

    def disk(**values):
        report = plan(make_recipe(**values))
        trained = sum(group["parameters"] for group in report["stages"][0]["groups"])
        return report["disk_gb"], report["parameters"] / 1e9, trained / 1e9

    # 8 steps, of which 2 checkpoints stay; one step with one; the one being written
    found, parameters, trained = disk(stages=[stage, once], checkpoint={"every_steps": 2, "keep": 2})
    assert trained == parameters
    assert found["one_checkpoint"] == pytest.approx((4 + 8) * parameters)
    assert found["checkpoints"] == pytest.approx((2 + 1 + 1) * (4 + 8) * parameters)
    assert found["models"] == pytest.approx(2 * 4 * parameters)
    found, parameters, trained = disk(lora={"rank": 2}, precision="bf16", optim="sgd")
    assert trained < parameters
    assert found["one_checkpoint"] == found["models"] == pytest.approx(4 * trained)


def test_measured_steps_are_real(make_recipe, capsys):
    measured = plan(make_recipe(), measure=True, show=True)["stages"][0]
    shown = capsys.readouterr().out
    assert "measured" in shown
    assert "gate_bias" in shown
    assert measured["measured"]["tokens_per_second"] > 0
    assert measured["hours"] == pytest.approx(1024 / measured["measured"]["tokens_per_second"] / 3600)


def test_what_training_would_find_missing_is_refused(make_recipe, tmp_path, monkeypatch):
    def refusals(**values):
        return plan(make_recipe(**values))["refusals"]

    data = {"train": [str(tmp_path / "nowhere.txt")], "eval": [str(tmp_path / "*.none")], "tokenizer": str(tmp_path)}
    found = refusals(data=data)
    assert [text.split(":")[0] for text in found[:2]] == [
        f"no data at {tmp_path / 'nowhere.txt'}",
        f"no file matches {tmp_path / '*.none'}",
    ]
    assert len(found) == 3
    assert "tokenizer" in found[2]
    (found,) = refusals(output=str(tmp_path / "books.txt" / "run"))
    assert "can't write to" in found
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "empty.jsonl").touch()
    for empty in ("empty.txt", "folder"):
        (found,) = refusals(data={"train": [str(tmp_path / "books.txt"), str(tmp_path / empty)]})
        assert found == f"{tmp_path / empty}: no text in it, it is empty: give texts"
    claim_output(tmp_path / "out", make_recipe(), SimpleNamespace(num_processes=1, is_main_process=True, **NO_WAIT))
    assert refusals(seed=1) == []
    (tmp_path / "out" / "stage-0-extend" / "checkpoint-1").mkdir(parents=True)
    assert refusals() == []
    (found,) = refusals(seed=1)
    assert "holds another run: seed differ" in found
    monkeypatch.setattr("retrofox.planning.plan.free_bytes", lambda out: 1000.0)
    (found,) = refusals()
    assert "free and a checkpoint takes" in found


@pytest.mark.parametrize("name", sorted(file.stem for file in RECIPES.glob("*.yaml")))
def test_shipped_recipes_are_refused_for_nothing_but_what_is_not_here(pico_checkpoint, tmp_path, monkeypatch, name):
    """With a model in place of the Hub's: sets of the Hub aren't looked for, LongCrawl64 is a folder to fetch."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("retrofox.planning.plan.free_bytes", lambda out: 1 << 50)
    report = plan(load_recipe(RECIPES / f"{name}.yaml", [f"model={pico_checkpoint}"]))
    missing = [f"no directory longcrawl64/{part}.zarr" for part in ("train", "heldout")]
    wanted = missing if name == "longcrawl64-fox" else []
    assert [refusal.partition(":")[0] for refusal in report["refusals"]] == wanted
    assert all(stage["steps"] > 0 for stage in report["stages"])
    assert report["stages"]


LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA: dict[str, Any] = {
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
SHAPES = {
    "llama-3.2-1b": LlamaConfig(
        **LLAMA, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, head_dim=64,
        tie_word_embeddings=True,
        rope_parameters={**LLAMA3, "rope_theta": 500000.0, "factor": 32.0},
    ),
    "llama-3.1-8b": LlamaConfig(
        **LLAMA, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, head_dim=128,
        rope_parameters={**LLAMA3, "rope_theta": 500000.0, "factor": 8.0},
    ),
    "qwen3-8b": Qwen3Config(
        vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40960,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_recipes_for_large_models_state_what_their_shape_plans(name):
    recipe = load_recipe(RECIPES / f"{name}.yaml")
    assert recipe.fox is not None
    found = make_plan(SHAPES[name], recipe.fox)
    base = sum(math.prod(shape) for tensor, shape in found.base_tensors.items() if tensor not in found.tied)
    assert f"{base + found.parameters:,} parameters" in (RECIPES / f"{name}.yaml").read_text()
    assert set(found.kept_pairs) < set(range(1, found.pairs))


@pytest.mark.slow  # seven minutes and more on an older AMD processor
@pytest.mark.timeout(3000)
def test_a_recipe_for_a_large_model_states_the_memory_that_is_planned_today(pico_tokenizer, tmp_path, monkeypatch):
    """The smallest of them, since probes of the others take ten times as long."""
    SHAPES["llama-3.2-1b"].save_pretrained(tmp_path)
    pico_tokenizer.save_pretrained(tmp_path)
    for key, value in {"WORLD_SIZE": "8", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}.items():
        monkeypatch.setenv(key, value)
    for place in ("retrofox.training.preflight", "retrofox.planning.plan"):
        monkeypatch.setattr(f"{place}.device_memory", lambda device: 1e12)
    path = RECIPES / "llama-3.2-1b.yaml"
    report = plan(load_recipe(path, [f"model={tmp_path}", f"output={tmp_path}/out"]))
    planned = {part: size for part, size in report["stages"][0]["memory_gb"].items() if part not in EXTRA}
    text = path.read_text()
    stated = {part: float(size) for part, size in re.findall(f"({'|'.join(planned)}) ([0-9.]+)", text)}
    assert stated == pytest.approx(planned, abs=0.06)
    (whole,) = re.findall("a GPU holds ([0-9.]+) GB", text)
    assert float(whole) == pytest.approx(sum(planned.values()), abs=0.06)
    assert f"disk {report['disk_gb']['total']:.0f} GB at most" in text


EXTRA = ("teacher", "workspace")
"""There is no teacher in these recipes, and a GPU's workspace is not that of a CPU."""
SMALL_SHAPES = {
    "SmolLM2-135M": (49152, 576, 1536, 30, 9, 3, True),
    "Llama-3.2-1B": (128256, 2048, 8192, 16, 32, 8, True),
}


@pytest.mark.parametrize(("name", "parameters"), [("SmolLM2-135M", 134_515_008), ("Llama-3.2-1B", 1_235_814_400)])
def test_real_shapes_fit_where_their_parts_do(name, parameters, pico_tokenizer, tmp_path, monkeypatch):
    """Shapes on the meta device, on machines of a stated size: what is counted is 4 bytes a weight, 8 of moments."""
    vocabulary, width, inner, layers, heads, kv_heads, tied = SMALL_SHAPES[name]
    shape = {"vocab_size": vocabulary, "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 64}
    LlamaConfig(**shape, **heads_of, tie_word_embeddings=tied).save_pretrained(tmp_path / "shape")  # type: ignore[arg-type]
    pico_tokenizer.save_pretrained(tmp_path / "shape")
    (tmp_path / "books.txt").write_text("the fox forgets the gate")
    monkeypatch.setattr("retrofox.training.memory_probe.PROBE_ROWS", {"cpu": (16, 32, 48), "cuda": (512, 2048, 4096)})

    def planned(gigabytes: float, **values) -> dict:
        for place in ("retrofox.training.preflight", "retrofox.planning.plan"):
            monkeypatch.setattr(f"{place}.device_memory", lambda device: gigabytes * 1e9)
        values = {"model": str(tmp_path / "shape"), "fox": {}, "output": str(tmp_path / "out"), **values}
        data = {"train": [str(tmp_path / "books.txt")]}
        stage = {"objective": "extend", "tokens": 8192, "sequence_length": 4096, "gradient_checkpointing": "full"}
        return plan(validate({**values, "data": data, "stages": [stage], "precision": "fp32"}))

    report = planned(1000)
    gates = layers * heads * (width + 1)
    assert report["parameters"] == parameters + gates
    (stage,) = report["stages"]
    assert stage["memory_gb"]["weights"] == pytest.approx(4e-9 * (parameters + gates), rel=1e-3)
    assert stage["memory_gb"]["optimizer"] == pytest.approx(8e-9 * (parameters + gates), rel=1e-3)
    hidden = 4e-9 * 4096 * width
    assert stage["memory_gb"]["activations"] > layers * hidden  # what recomputation starts from
    needed = sum(stage["memory_gb"].values())
    assert planned(1.05 * needed)["stages"][0]["fits"]
    assert planned(1.05 * needed)["refusals"] == []
    small = planned(0.95 * needed)
    assert not small["stages"][0]["fits"]
    assert "stages.0: it needs" in small["refusals"][0]
    adapters = planned(0.95 * needed, lora={"rank": 8})["stages"][0]
    assert adapters["fits"]
    assert adapters["memory_gb"]["optimizer"] < 0.1 * stage["memory_gb"]["optimizer"]


def test_a_stage_that_does_not_fit_is_told_what_would(make_recipe, monkeypatch, capsys):
    stage = {"objective": "extend", "tokens": 8192, "sequence_length": 4096, "micro_batch": 2}
    needed = sum(1e9 * part for part in plan(make_recipe(stages=[stage]))["stages"][0]["memory_gb"].values())
    for share, switches, said in (
        (0.7, {"micro_batch": 1}, "DOES NOT FIT: set micro_batch: 1"),
        (1e-6, None, "DOES NOT FIT, with any switch: lower sequence_length"),
    ):
        for place in ("retrofox.training.preflight", "retrofox.planning.plan"):
            monkeypatch.setattr(f"{place}.device_memory", lambda device, share=share: share * needed)
        report = plan(make_recipe(stages=[stage]), show=True)
        assert report["stages"][0]["switches"] == switches
        assert not report["stages"][0]["fits"]
        printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
        assert said in printed
        (refusal,) = report["refusals"]
        assert ("set micro_batch: 1, or lower" if switches else "no switch makes it fit: lower") in refusal


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_fails_where_the_run_would_be_refused(make_recipe, run, tmp_path, as_json):
    (tmp_path / "recipe.yaml").write_text(dump(make_recipe()))
    options = ["--json"] if as_json else []
    code, shown, _ = run("plan", tmp_path / "recipe.yaml", *options)
    assert (code, "refused:" in shown) == (0, False)
    code, shown, _ = run("plan", tmp_path / "recipe.yaml", "data.train=[nowhere/]", *options)
    assert code == 2
    assert "nowhere" in (json.loads(shown)["refusals"][0] if as_json else shown)
    assert '"stages"' in shown if as_json else "stage 0: extend" in shown
