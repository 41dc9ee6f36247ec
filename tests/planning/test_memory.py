"""Planned memory beside what GPUs measured: within a tenth of every training run in benchmarks/.

No training run is the step of context_parallel.json, which has no optimizer; weights that stay gathered
(benchmarks/fsdp.py) are not counted. The 58.2 GB of retrofit/arms.json's "control" are of masks; SDPA is called by
document since.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from retrofox.config import load_recipe, validate
from retrofox.config.shipped import HOME
from retrofox.planning.hardware import Hardware
from retrofox.planning.known import LLAMA_1B, LLAMA_8B, QWEN3_8B, SMOLLM2_135M
from retrofox.planning.memory import cpu_memory, memory
from retrofox.planning.shape import Shape, shape_of

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SHAPES = {"smollm2": SMOLLM2_135M, "llama-3.2-1b": LLAMA_1B, "llama-3.1-8b-lora": LLAMA_8B, "qwen3-8b-lora": QWEN3_8B}
ONE = Hardware("a GPU", 80e9, None)


def read(name: str) -> dict:
    return json.loads((BENCHMARKS / name).read_text())


def planned(shape: str, stage: dict, on: Hardware = ONE, converted: bool = True, layers: int | None = None) -> float:
    """Gigabytes of an extend stage; shapes that end in -lora have adapters of rank 16."""
    config = SHAPES[shape] | ({"num_hidden_layers": layers} if layers else {})
    fox = {"half_life": [256, 65536]} if converted else None
    values = {"model": "unused", "output": "unused", "data": {"train": ["unused"]}, "fox": fox}
    lora = {"rank": 16} if shape.endswith("lora") else None
    stage = {"objective": "extend", "tokens": 1 << 30, **stage}
    recipe = validate({**values, "lora": lora, "stages": [stage]})
    return sum(memory(shape_of(config, recipe.fox), recipe, recipe.stages[0], on).values()) / 1e9


def copies(shape: Shape, tokens: int, layers: int) -> float:
    """Gigabytes of bfloat16 copies of adapters' inputs, one for each matrix, that runs before commit fe835a8 kept."""
    return 2e-9 * tokens * layers * sum(inputs for inputs, _ in shape.matrices.values())


def long_rows() -> list[dict]:
    """The newest row of each kind: an earlier one of 524288 tokens lacks the optimizer's state, 9.9 GB."""
    found = read("long-training.json")
    newest = {}
    for run in (found, *found["earlier"]):
        for row in run["rows"]:
            if "peak_memory_gb" in row:
                newest.setdefault((row["shape"], row["layers"], row["length"]), row)
    return list(newest.values())


@pytest.mark.parametrize("row", long_rows(), ids=lambda row: f"{row['shape']}-{row['layers']}-{row['length']}")
def test_long_rows(row):
    found = planned(row["shape"], {**row["switches"], "sequence_length": row["length"]}, layers=row["layers"])
    assert found == pytest.approx(row["peak_memory_gb"], rel=0.1)


GPUS = {"alone": ONE, "ddp": ONE._replace(gpus=2), "step": ONE._replace(gpus=2, sharding="fsdp2")}


@pytest.mark.parametrize(
    "row",
    [row for row in read("fsdp.json")["rows"] if row["variant"] in GPUS],
    ids=lambda row: f"{row['shape']}-{row['window']}-{row['variant']}",
)
def test_two_gpus(row):
    tokens = read("fsdp.json")["tokens"]
    stage = {"sequence_length": row["window"], "micro_batch": tokens // row["window"]}
    assert planned(row["shape"], stage, GPUS[row["variant"]]) == pytest.approx(row["peak_memory_gb"], rel=0.1)


@pytest.mark.parametrize(
    "row",
    read("shapes.json")["rows"],
    ids=lambda row: f"{row['shape']}-{row['length']}-{'converted' if row['converted'] else 'base'}",
)
def test_one_gpu(row):
    stage = {"sequence_length": row["length"], "micro_batch": row["rows"]}
    stage["gradient_checkpointing"] = row["recomputation"]
    old = row["shape"] == "qwen3-8b"
    found = planned(row["shape"] + old * "-lora", stage, converted=row["converted"])
    found += old * copies(shape_of(QWEN3_8B), row["length"], layers=1)  # of the layer that is being recomputed
    assert found == pytest.approx(row["peak_memory_gb"], rel=0.1)


@pytest.mark.parametrize("converted", [True, False])
def test_a_step_of_two_micro_batches(converted):
    found = read("train-step.json")["profile"]["converted" if converted else "unconverted"]
    stage = {"sequence_length": 4096, "micro_batch": 8, "batch_tokens": 65536}
    assert planned("smollm2", stage, converted=converted) == pytest.approx(found["peak_memory_gb"], rel=0.1)


ARMS = {"lora-12M": "lora", "no-gates": "control", "no-rope-40M": "no-rope"}
ARMS |= {"stretch": "stretch", "yarn8-8M": "yarn8"}


@pytest.mark.parametrize(("arm", "name"), ARMS.items())
def test_whole_runs_of_shipped_recipes(arm, name):
    recipe = load_recipe(HOME / f"smollm2-{name}.yaml")
    shape = shape_of(SMOLLM2_135M, recipe.fox)
    found = max(sum(memory(shape, recipe, stage, ONE).values()) for stage in recipe.stages) / 1e9
    assert found == pytest.approx(read("retrofit/arms.json")["arms"][arm]["memory_gb"], rel=0.1)


@pytest.mark.parametrize("row", read("train_memory.json")["stages"], ids=lambda row: f"{row['recipe']}-{row['stage']}")
def test_stages_of_earlier_recipes(row):
    fox, lora = {"rope": "drop", "half_life": [8, 8192]}, row.get("lora")
    values = {"model": "unused", "output": "unused", "data": {"train": ["unused"]}}
    recipe = validate({**values, "fox": fox, "lora": lora, "stages": [{"tokens": 1 << 20, **row["settings"]}]})
    shape = shape_of(SMOLLM2_135M, recipe.fox)
    found = sum(memory(shape, recipe, recipe.stages[0], ONE).values()) / 1e9
    if lora:
        found += copies(shape, 2 * 16384, shape.layers)
    assert found == pytest.approx(row["measured_gb"], rel=0.1)


def parts(recipe, on: Hardware = ONE) -> dict[str, float]:
    return memory(shape_of(LLAMA_1B, recipe.fox), recipe, recipe.stages[0], on)


def test_recomputation_freezing_and_adapters_save_memory(recipe_of):
    plain = parts(recipe_of())
    assert parts(recipe_of(stage={"gradient_checkpointing": "full"}))["activations"] < plain["activations"]
    assert parts(recipe_of(stage={"rates": {"rest": 0}}))["optimizer"] < plain["optimizer"]
    assert parts(recipe_of(lora={"rank": 16}))["weights"] < 0.6 * plain["weights"]
    assert parts(recipe_of(lora={"rank": 16, "quantize": "nf4"}))["weights"] < 0.4 * plain["weights"]
    assert parts(recipe_of(stage={"objective": "align"}))["logits"] == 0


def test_a_second_model_teaches_where_the_weights_move(recipe_of):
    distill = {"objective": "distill"}
    assert parts(recipe_of(stage=distill))["teacher"] == 2 * shape_of(LLAMA_1B).parameters
    assert parts(recipe_of(stage=distill, lora={"rank": 16}))["teacher"] == 0


def test_part_of_a_row_takes_part_of_its_memory(recipe_of):
    stage = {"batch_tokens": None, "sequence_length": 65536}
    alone, shared = (parts(recipe_of(stage=stage, parallel={"context": n}), ONE._replace(gpus=2)) for n in (1, 2))
    assert shared["activations"] == pytest.approx(alone["activations"] / 2)
    assert shared["weights"] == alone["weights"]


def test_offloads_move_to_the_cpu(recipe_of):
    switches = {"gradient_checkpointing": "full", "offload_activations": True}
    recipe = recipe_of(stage=switches, optim="paged_adamw_32bit")
    shape = shape_of(LLAMA_1B, recipe.fox)
    moved = cpu_memory(shape, recipe, recipe.stages[0], ONE)
    assert moved == {"activations": 14 * 2 * 8192 * 2048, "optimizer": 8 * shape.parameters}
    assert cpu_memory(shape, recipe, recipe.stages[0], ONE._replace(gpu=False)) == {}
