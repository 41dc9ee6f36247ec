"""The plan of a run from its recipe and a config.json."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from retrofox.config import dump
from retrofox.fox_spec import FoxSpec
from retrofox.planning.hardware import Hardware, hardware
from retrofox.planning.known import LLAMA_1B, LLAMA_8B, SMOLLM2_135M
from retrofox.planning.live_share import live_at_start, live_shares
from retrofox.planning.plan import longest_row, plan
from retrofox.planning.report import print_plan
from retrofox.planning.shape import shape_of

H100 = hardware("h100")
FULL = {"gradient_checkpointing": "full"}


def total(report) -> float:
    return sum(report["stages"][0]["memory_gb"].values())


def test_it_says_what_a_run_takes(recipe_of):
    report = plan(recipe_of(SMOLLM2_135M, {"tokens": 1_040_000}), H100, price=2.5)
    stage = report["stages"][0]
    assert report["parameters"] == 134_515_008 + report["parameters_added"]
    assert report["parameters_added"] == 30 * 9 * (576 + 1)
    assert sum(group["parameters"] for group in stage["groups"]) == report["parameters"]
    assert (stage["steps"], stage["tokens"], stage["fits"], stage["change"]) == (32, 1 << 20, True, None)
    assert 0 < stage["hours"][0] < stage["hours"][1]
    assert report["dollars"] == [2.5 * hours for hours in report["hours"]]
    assert report["refusals"] == []


def test_the_largest_model_takes_a_second_and_no_torch(recipe_of, tmp_path):
    (tmp_path / "recipe.yaml").write_text(dump(recipe_of(LLAMA_8B)))
    code = (
        "import sys; from retrofox.cli.app import app\n"
        "try: app(['plan', sys.argv[1], '--gpu', 'h100', '--json'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "recipe.yaml"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["parameters"] > 8e9
    assert time.perf_counter() - started < 20  # 0.5 s where the machine has nothing else to do


@pytest.mark.parametrize(
    ("room", "values", "change"),
    [
        (40, {"stage": {"micro_batch": 2}}, "set micro_batch: 1"),
        (24, {"stage": {"micro_batch": 2, "sequence_length": 16384, **FULL}}, "set tiled_mlp: auto"),
        (12, {"stage": {"micro_batch": 2}}, "set lora: {rank: 16} and gradient_checkpointing: full"),
        (4.8, {"stage": FULL}, "set lora: {rank: 16, quantize: nf4}"),
        (20, {"stage": {"sequence_length": "1Mi", "batch_tokens": "1Mi"}, "lora": {"rank": 16}}, "set sequence_length"),
        (4.8, {"stage": FULL, "lora": {"rank": 16}}, "set lora.quantize: nf4"),
        (2.5, {"stage": FULL}, "set sequence_length"),
        (0.5, {"stage": FULL, "lora": {"rank": 16}}, "take a larger GPU"),
    ],
)
def test_what_does_not_fit_is_told_the_cheapest_change(recipe_of, room, values, change):
    report = plan(recipe_of(**values), Hardware("small", 1e9 * room, None))
    assert not report["stages"][0]["fits"]
    assert report["stages"][0]["change"].startswith(change)


def test_a_model_too_large_for_one_gpu_is_split(recipe_of):
    recipe = recipe_of(LLAMA_8B, {"batch_tokens": 65536, **FULL})
    assert plan(recipe, hardware("a100-40"))["stages"][0]["change"].startswith("set lora: {rank: 16}")
    report = plan(recipe, H100, gpus=8)
    assert (report["sharding"], report["stages"][0]["fits"]) == ("fsdp2", True)
    assert plan(recipe, H100, gpus=8, sharding="ddp")["stages"][0]["change"] == "set --sharding fsdp2"


@pytest.mark.parametrize(
    ("switches", "lora", "room"),
    [
        (FULL, None, 80),
        ({"tiled_mlp": "auto"}, {"rank": 16}, 24),
    ],  # a tile of 16384 tokens alone wouldn't fit the latter
)
def test_the_longest_row_is_the_last_that_fits(recipe_of, switches, lora, room):
    recipe, card = recipe_of(stage=switches, lora=lora), Hardware("card", 1e9 * room, None)
    shape, stage = shape_of(LLAMA_1B, recipe.fox), recipe.stages[0]
    found = longest_row(shape, recipe, stage, card)
    sizes = []
    for length in (found, found + 256):
        longer = recipe_of(stage={**switches, "sequence_length": length, "batch_tokens": None}, lora=lora)
        sizes.append(total(plan(longer, card)))
    assert sizes[0] <= room < sizes[1]
    assert found > 32768


def test_shipped_recipes_that_fit_are_named(recipe_of):
    small = plan(recipe_of(), hardware("4090"))["recipes_that_fit"]
    large = plan(recipe_of(), H100, gpus=8)["recipes_that_fit"]
    assert "smollm2-lora" in small
    assert set(small) < set(large)
    assert "llama-3.1-8b" in set(large) - set(small)


def test_a_disk_that_is_too_small_is_refused_only_where_the_run_would_be(recipe_of, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=1000))
    assert plan(recipe_of(), H100)["refusals"] == []
    (refusal,) = plan(recipe_of(), H100._replace(host=1e12))["refusals"]
    assert "free and a checkpoint takes 14.8 GB" in refusal


def test_a_disk_that_is_too_small_for_the_whole_run_is_said(recipe_of, monkeypatch, capsys):
    for free, said in ((20e9, True), (1e12, False)):
        monkeypatch.setattr("shutil.disk_usage", lambda place, free=free: SimpleNamespace(free=free))
        print_plan(plan(recipe_of(), H100))
        assert ("free here: too little" in capsys.readouterr().out) == said


BUDGET = {"budget": {"share": 0.1}}
YARN = {"rope_type": "yarn", "factor": 4}
FOX_1B = {**LLAMA_1B, "model_type": "fox_llama", "fox": FoxSpec().to_dict()}


@pytest.mark.parametrize(
    ("config", "values", "said"),
    [
        (FOX_1B, {}, "fox is for unconverted models"),
        ({**LLAMA_1B, "quantization_config": {"quant_method": "gptq"}}, {}, "is quantised (gptq)"),
        ({**FOX_1B, "quantization_config": {"bits": 8}}, {"fox": None, "lora": {"rank": 16}}, None),
        ({**FOX_1B, "quantization_config": {"bits": 8}}, {"fox": None}, "its weights can't be trained: add `lora:`"),
        (LLAMA_1B, {"fox": None, "rope_scaling": YARN}, "RoPE is scaled already (rope_type llama3)"),
        (SMOLLM2_135M, {"fox": None, "rope_scaling": YARN}, None),
        (SMOLLM2_135M, {"stage": BUDGET, "fox": {"gate": "fixed"}}, "this stage trains none"),
        (SMOLLM2_135M, {"stage": BUDGET, "fox": {"gate": "none"}}, "this stage trains none"),
        (SMOLLM2_135M, {"stage": BUDGET, "fox": {"init": "measured", "open_heads": 9}}, "leaves 10% of the heads open"),
        (SMOLLM2_135M, {"stage": BUDGET, "fox": {"init": "measured", "open_heads": 8}}, None),
    ],
)
def test_what_train_refuses_of_the_config_is_refused(recipe_of, config, values, said):
    refusals = plan(recipe_of(config, **values), H100)["refusals"]
    assert refusals == [] if said is None else said in refusals[0]


@pytest.mark.parametrize(
    ("gpus", "sharding", "said"),
    [
        (2, "fsdp2", []),
        (3, "fsdp2", ["parallel.context: 2 processes share a row, and there are 3"]),
        (2, "zero3", ["parallel.context and tiled_mlp run with DDP and FSDP2, not with DeepSpeed"]),
    ],
)
def test_processes_that_train_would_refuse_are_refused(recipe_of, gpus, sharding, said):
    refusals = plan(recipe_of(LLAMA_1B, parallel={"context": 2}), H100, gpus, sharding)["refusals"]
    assert len(refusals) == len(said)
    assert all(text.startswith(start) for text, start in zip(refusals, said, strict=True))


def test_open_heads_that_the_model_lacks_are_refused(recipe_of):
    with pytest.raises(ValueError, match=r"has 3 kv heads in each of layers 0\.\.29"):
        plan(recipe_of(SMOLLM2_135M, fox={"open_heads": [[30, 0]]}), H100)


def test_a_converted_model_has_its_added_parameters_counted(recipe_of):
    config = {**SMOLLM2_135M, "model_type": "fox_llama", "fox": FoxSpec().to_dict()}
    report = plan(recipe_of(config, fox=None), H100)
    assert (report["parameters_added"], report["refusals"]) == (30 * 9 * (576 + 1), [])


def test_disk_is_what_all_stages_leave(recipe_of):
    once = {"objective": "extend", "tokens": 32768, "sequence_length": 8192, "batch_tokens": 32768}
    recipe = recipe_of(checkpoint={"every_steps": 2, "keep": 2}, precision="fp32")
    report = plan(recipe.model_copy(update={"stages": [recipe.stages[0], recipe_of(stage=once).stages[0]]}), H100)
    parameters = report["parameters"] / 1e9
    disk = report["disk_gb"]
    assert disk["one_checkpoint"] == pytest.approx((4 + 8) * parameters)
    kept = 2 + 1 + 1  # and the one being written
    assert disk["total"] == pytest.approx((kept * (4 + 8) + 4 + 2 * 4) * parameters)  # converted, and two models
    adapted = plan(recipe_of(lora={"rank": 2}, optim="sgd"), H100)
    trained = sum(group["parameters"] for group in adapted["stages"][0]["groups"]) / 1e9
    assert adapted["disk_gb"]["one_checkpoint"] == pytest.approx(4 * trained)


@pytest.mark.parametrize("as_json", [False, True])
def test_the_command_prints_it_and_fails_where_it_refuses(recipe_of, run, tmp_path, as_json):
    (tmp_path / "recipe.yaml").write_text(dump(recipe_of()))
    options = ["--gpu", "h100", "--price", "2.5", *(["--json"] if as_json else [])]
    code, shown, _ = run("plan", tmp_path / "recipe.yaml", *options)
    assert code == 0
    assert "dollars" in shown if as_json else "price: $" in shown
    assert ("live_at_start" if as_json else "keys alive at the start, operations/cache: 8k ") in shown
    code, shown, _ = run("plan", tmp_path / "recipe.yaml", "--gpus", "3", *options)
    assert code == 2
    assert "batch_tokens" in (json.loads(shown)["refusals"][0] if as_json else shown)


def test_operations_are_a_mean_and_the_cache_keeps_the_largest_share_of_a_group():
    found = live_shares([[16 / 8192, 16 / 16384], [1e-9, 0.0]], 16.0, kv_heads=1)
    assert found["live_operations_8k"] == pytest.approx(1.0)
    assert found["live_cache_32k"] == pytest.approx((0.5 + 1) / 2)
    assert found["live_operations_32k"] == pytest.approx((0.4375 + 0.75 + 1 + 1) / 4)


def test_live_shares_before_training_are_those_of_the_half_lives():
    """Which heads are open, near or far makes no difference; of 4 kv heads one is open."""
    ends = {"half_life": (16.0, 512.0), "horizon": 8.0}
    measured = FoxSpec(init="measured", open_heads=1, **ends).resolved(8192)
    spans = [8 / math.log(2) * life / 8192 for life in (16, (16 * 512) ** 0.5, 512)]
    found = live_at_start(measured, 8192, layers=2, heads=4, kv_heads=2)
    assert found["live_cache_8k"] == pytest.approx((sum(spans) + 1) / 4)
    assert found["live_operations_8k"] == pytest.approx((sum(2 * s - s * s for s in spans) + 1) / 4)
    bound = FoxSpec(init="measured", open_heads=1, max_half_life=64, **ends).resolved(8192)
    assert live_at_start(bound, 8192, 2, 4, 2)["live_cache_8k"] < found["live_cache_8k"]
    named = FoxSpec(open_heads=((1, 0),), **ends).resolved(8192)  # four query heads a layer, the longest in kv head 1
    spans = [8 / math.log(2) * 16 * 2 ** (5 * n / 3) / 8192 for n in (1, 3, 3)]
    assert live_at_start(named, 8192, 2, 4, 2)["live_cache_8k"] == pytest.approx((sum(spans) + 1) / 4)
