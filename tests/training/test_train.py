"""Training in one process: stages, roles, schedules, speed-ups that change nothing, refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import retrofox
from retrofox.config import ExtendStage
from retrofox.data.prepare import prepare_data
from retrofox.model.modeling_fox import CACHE
from retrofox.planning.steps import accumulation, count_steps
from retrofox.training import checkpoint
from retrofox.training.callbacks import Guard, half_life_statistics
from retrofox.training.data import StageData
from retrofox.training.log import JsonLog, log_line
from retrofox.training.measure import check_here
from retrofox.training.param_groups import parameter_groups, role_of, schedule, set_trainable
from retrofox.training.train import train
from retrofox.training.trainer import FoxTrainer

WORDS = ["the fox ", "forgets ", "a gate ", "and so on ", "far away "]


def make_stage(**values) -> Any:
    return ExtendStage.model_validate({"objective": "extend", "tokens": 1000, "sequence_length": 10, **values})


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(12):
        (folder / f"{number}.txt").write_text("".join(WORDS[(number * i + i * i) % 5] for i in range(20 + 13 * number)))
    return folder


@pytest.fixture
def make_recipe(make_recipe, texts):
    """With held-out text, over short documents."""
    data = {"train": [str(texts)], "eval": [str(texts)]}
    return lambda *stages, **keys: make_recipe(*stages, **{"data": data, **keys})


def lines(recipe):
    return [json.loads(line) for line in (Path(recipe.output) / "log.jsonl").read_text().splitlines()]


def test_a_run_learns_logs_and_leaves_a_loadable_model(make_recipe, capsys):
    recipe = make_recipe()
    result = train(recipe)
    log = lines(recipe)
    assert [line["step"] for line in log] == [1, 2, 3, 4]
    wanted = {"loss", "tokens", "tokens_per_second", "memory_gb", "eta_seconds", "grad_norm", "half_life_mean"}
    wanted |= {"half_life_p10", "half_life_p90", "gates_dead"}
    assert wanted <= set(log[0])
    told = capsys.readouterr().err
    assert "tok/s" in told
    assert " at 64, 0.14 epochs; " in told
    stage = result["stages"][0]
    assert stage["eval_after"] < stage["eval_before"]
    model = retrofox.load(result["model"])
    assert model(torch.tensor([[2, 3]]))[CACHE] is not None  # a call on its own keeps the cache
    start = retrofox.load(recipe.model)
    moved = {n for (n, a), b in zip(model.named_parameters(), start.parameters(), strict=True) if not torch.equal(a, b)}
    assert any("forget_gate.weight" in name for name in moved)
    assert any("q_proj" in name for name in moved)
    assert (Path(result["model"]) / "tokenizer.json").is_file()
    again = train(recipe)
    assert again == result
    assert "nothing left to do" in capsys.readouterr().err
    with pytest.raises(ValueError, match="is a model's directory"):
        train(recipe.model_copy(update={"output": result["model"]}))
    assert not (Path(result["model"]) / "recipe.yaml").exists()


def test_three_stages_move_what_they_should(make_recipe):
    common = {"tokens": 256, "sequence_length": 64, "batch_tokens": 128, "learning_rate": 3e-3}
    recipe = make_recipe(
        stages=[
            {"objective": "align", **common},
            {"objective": "distill", **common, "ce_weight": 0.5, "gradient_checkpointing": 2},
            {"objective": "extend", **common, "rates": {"attention": 0, "rest": 0}, "schedule": "wsd"},
        ]
    )
    result = train(recipe)
    out = Path(recipe.output)
    start, aligned = retrofox.load(recipe.model), retrofox.load(out / "stage-0-align" / "model")
    distilled, final = retrofox.load(out / "stage-1-distill" / "model"), retrofox.load(result["model"])

    def moved(before, after):
        pairs = zip(before.named_parameters(), after.parameters(), strict=True)
        return {role_of(name) for (name, a), b in pairs if not torch.equal(a, b)}

    assert moved(start, aligned) == {"gate_bias", "gate_weight"}
    assert moved(aligned, distilled) == {"gate_bias", "gate_weight", "attention", "rest"}
    assert moved(distilled, final) == {"gate_bias", "gate_weight"}
    assert {"kl", "cross_entropy"} <= set(lines(recipe)[2])
    assert [line["stage"] for line in lines(recipe)] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("objective", ["extend", "distill", "align"])
def test_accumulated_micro_batches_are_one_batch(make_recipe, tmp_path, objective):
    stage = {"objective": objective, "tokens": 256, "sequence_length": 64, "batch_tokens": 256}
    runs = []
    for micro_batch in (1, 4):
        output = str(tmp_path / f"micro-{micro_batch}")
        recipe = make_recipe(stages=[{**stage, "micro_batch": micro_batch}], output=output)
        train(recipe)
        runs.append(lines(recipe)[0])
    assert runs[0]["loss"] == pytest.approx(runs[1]["loss"], rel=1e-5)
    assert runs[0]["grad_norm"] == pytest.approx(runs[1]["grad_norm"], rel=1e-4)


def test_texts_both_trained_on_and_held_out_are_told(make_recipe, pico_tokenizer, caplog):
    data = make_recipe().data
    prepare_data(data.model_copy(update={"eval": []}), pico_tokenizer, progress=False)
    assert not caplog.records
    prepare_data(data, pico_tokenizer, progress=False)
    assert f"of texts that are trained on: {data.eval[0].path}" in caplog.text


def test_held_out_windows_are_the_same_for_any_number_of_processes(make_recipe, pico_tokenizer):
    recipe = make_recipe(log={"eval_tokens": 64 * 7})
    tokens = prepare_data(recipe.data, pico_tokenizer, progress=False)

    def scored(world: int) -> tuple[list[tuple], set[int]]:
        rows, passes = [], set()
        for rank in range(world):
            state = SimpleNamespace(num_processes=world, process_index=rank)
            stage = recipe.stages[0].model_copy(update={"micro_batch": 2})
            batches = list(StageData(tokens, recipe, stage, state).eval_batches())
            passes.add(len(batches))
            rows += [tuple(row.tolist()) for batch in batches for row in batch["targets"] if (row >= 0).any()]
        return sorted(rows), passes

    assert len(scored(1)[0]) == 7  # as many tokens as log.eval_tokens asks for
    for world in (2, 3, 5, 9):
        assert scored(world)[0] == scored(1)[0]
        assert len(scored(world)[1]) == 1


def test_divergence_stops_and_the_run_goes_on_as_advised(make_recipe):
    stage = {"objective": "extend", "tokens": 1024, "sequence_length": 64, "batch_tokens": 128, "clip": 0}
    wild = {**stage, "learning_rate": 1e4, "rates": {"gate_bias": 0, "gate_weight": 0}, "warmup_tokens": 128}
    tame = {**wild, "learning_rate": 1e-3, "clip": 1.0, "warmup_tokens": 256}
    first = Path(make_recipe().output) / "stage-0-extend" / "checkpoint-1"

    def recipe(values):
        return make_recipe(stages=[{**values, "spike_factor": 0.1}], checkpoint={"every_steps": 1, "keep": 9})

    with pytest.raises(ValueError, match="There is no checkpoint yet: run again after lowering learning_rate"):
        train(make_recipe(stages=[{**wild, "spike_factor": 1e-9}], log={"every": 1}, checkpoint={"every_steps": 9}))
    with pytest.raises(ValueError, match=r"checkpoint-1 stands \(delete it if"):
        train(recipe(wild))
    assert checkpoint.problem(first) is None
    for refused in ({**tame, "rates": {"attention": 0}}, {**tame, "betas": [0.5, 0.5]}):
        with pytest.raises(ValueError, match=r"holds another run: stages\.0\.(rates \(which|betas)"):
            train(recipe(refused))
    again = make_recipe(stages=[tame], checkpoint={"every_steps": 1, "keep": 9})
    assert check_here(again) == []
    assert train(again)["stages"][0]["resumed_at"] == 1
    rates = [schedule(again.stages[0], 128)(step) * 1e-3 for step in range(8)]
    assert [line["learning_rate"] for line in lines(again)[1:]] == pytest.approx(rates[1:])
    assert "learning_rate: 0.001" in (Path(again.output) / "recipe.yaml").read_text()
    with pytest.raises(ValueError, match=r"holds another run: stages\.0\.learning_rate, stages\.0\.rates differ"):
        train(make_recipe(stages=[{**tame, "learning_rate": 2e-3}]))


def test_guard_lets_ordinary_losses_pass(tmp_path):
    guard = Guard(3.0, tmp_path)
    for step, loss in enumerate((4.0, 3.8, 5.0, 3.7)):
        guard.check(loss, 1.0, step)
    assert guard.mean is not None
    assert guard.mean == pytest.approx(0.9 * (0.9 * (0.9 * 4.0 + 0.1 * 3.8) + 0.1 * 5.0) + 0.1 * 3.7)
    limit = 3.0 * guard.mean + 1.0
    with pytest.raises(ValueError, match="jumped"):
        guard.check(limit + 0.01, 1.0, 5)
    with pytest.raises(ValueError, match="not finite"):
        guard.check(math.nan, 1.0, 5)
    with pytest.raises(ValueError, match="not finite"):
        guard.check(3.0, math.inf, 5)


@pytest.mark.parametrize("every", [1, 8])
def test_steps_without_anything_to_learn_are_no_part_of_the_loss(every, make_recipe, tmp_path):
    talk = [{"role": "user", "content": "the fox " * 60}, {"role": "assistant", "content": "it forgets"}]
    file = tmp_path / "talks.jsonl"
    file.write_text("".join(json.dumps({"messages": talk}) + "\n" for _ in range(9)))
    data = {part: [{"path": str(file), "chat": True}] for part in ("train", "eval")}
    stage = {"objective": "extend", "tokens": 512, "sequence_length": 64, "learning_rate": 1e-4}
    log = {"every": every, "eval_tokens": 64}
    recipe = make_recipe(stages=[stage], data=data, log=log, checkpoint={"every_steps": 8})
    assert train(recipe)["stages"][0]["eval_after"] is None  # its window holds but the user's words
    losses = [line["loss"] for line in lines(recipe)]
    assert losses[0] == 0.0
    assert all(loss > 4.0 for loss in losses if loss)


def test_a_checkpoint_that_cannot_be_written_leaves_the_last_one(make_recipe, monkeypatch):
    recipe = make_recipe(checkpoint={"every_steps": 2})
    whole = checkpoint.commit

    def full_disk(directory, note):
        if note["step"] == 4:
            raise OSError(28, "No space left on device")
        whole(directory, note)

    monkeypatch.setattr(checkpoint, "commit", full_disk)
    with pytest.raises(ValueError, match=r"No space left on device.*checkpoint-2 is complete"):
        train(recipe)
    monkeypatch.undo()
    good, skipped = checkpoint.newest_good(Path(recipe.output) / "stage-0-extend")
    assert good is not None
    assert good.name == "checkpoint-2"
    assert len(skipped) == 1
    assert train(recipe)["stages"][0]["resumed_at"] == 2


def test_roles_and_groups(pico_fox):
    model = pico_fox(pro="all")
    stage = make_stage(learning_rate=1e-4, rates={"rest": 1e-5, "pro": 3e-4})
    assert role_of("base_model.model.model.layers.0.self_attn.forget_gate.modules_to_save.default.bias") == "gate_bias"
    set_trainable(model, stage)
    groups = parameter_groups(model, stage)
    roles = ["gate_bias", "gate_weight", "pro", "pro", "attention", "rest", "rest"]
    assert [group["role"] for group in groups] == roles
    assert [group["lr"] for group in groups] == [5e-4, 5e-4, 3e-4, 3e-4, 1e-4, 1e-5, 1e-5]
    assert [group["weight_decay"] for group in groups] == [0, 0, 0, 0.1, 0.1, 0, 0.1]
    decayed = parameter_groups(model, make_stage(weight_decay=0.2, gate_weight_decay=0.3))
    assert [group["weight_decay"] for group in decayed] == [0, 0.3, 0, 0.2, 0.2, 0, 0.2]
    assert sum(p.numel() for group in groups for p in group["params"]) == sum(p.numel() for p in model.parameters())


def test_schedules_in_tokens():
    def factors(steps, **values):
        factor = schedule(make_stage(tokens=1000, **values), 100)
        return [round(factor(step), 4) for step in steps]

    assert factors([0, 5, 9], schedule="linear") == [1.0, 0.5, 0.1]
    assert factors([0, 5], schedule="cosine", min_lr_ratio=0.5) == [1.0, 0.75]
    assert factors([0, 1, 3], schedule="constant", warmup_tokens=400) == [0.25, 0.5, 1.0]
    assert factors([0, 7, 8, 9], schedule="wsd") == [1.0, 1.0, 1.0, 0.5]
    assert factors([7, 8, 9], schedule="wsd", warmup_tokens=900) == [0.8889, 1.0, 1.0]  # nothing left but the decay
    assert count_steps(make_stage(tokens=1001), 100) == 11
    assert accumulation(make_stage(micro_batch=2), 200, 5) == 2
    with pytest.raises(ValueError, match="nearest: 200 or 300"):
        accumulation(make_stage(micro_batch=2), 240, 5)


def test_half_life_statistics():
    found = half_life_statistics(torch.tensor([-math.log(2) / 8, -math.log(2) / 128, -1e-9]), 1000)
    assert found["half_life_p10"] == pytest.approx(32, rel=1e-5)  # a fifth of the way from 8 to 128
    assert found["gates_dead"] == pytest.approx(1 / 3)
    decays = torch.tensor([-5e-5])  # a head is dead by what it decays over a row
    assert [half_life_statistics(decays, length)["gates_dead"] for length in (1, 1000)] == [1.0, 0.0]
    line = log_line({"loss": 3.0, "eta_seconds": 3661.0, **found}, 1, 2)
    assert line.endswith("gates that never forget: 33% | 1:01:01 left")


def test_json_log_drops_what_will_be_run_again_and_what_a_power_cut_tore(tmp_path):
    file = tmp_path / "log.jsonl"
    file.write_bytes(b'\xff\xfe garbage}\n[]\n{"stage": 0, "step": 1}\n{"stage": 0}\n')
    log = JsonLog(file, 0, 1)
    for step in (2, 3):
        log.write({"step": step})
    with open(file, "a") as torn:
        torn.write('{"stage": 0, "st')
    JsonLog(file, 0, 2).write({"step": 3, "again": True})
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {"stage": 0, "step": 1},
        {"stage": 0, "step": 2},
        {"stage": 0, "step": 3, "again": True},
    ]


def test_deterministic_reaches_the_operator(make_recipe, monkeypatch):
    from fox_kernels import determinism

    seen, plain = [], FoxTrainer.training_step

    def training_step(self, *args, **kwargs):
        seen.append((determinism.is_deterministic(), torch.are_deterministic_algorithms_enabled()))
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(FoxTrainer, "training_step", training_step)
    train(make_recipe(deterministic=True))
    train(make_recipe(deterministic=False, output=make_recipe().output + "2"))
    assert set(seen[: len(seen) // 2]) == {(True, True)}
    assert set(seen[len(seen) // 2 :]) == {(False, False)}
    assert determinism.is_deterministic()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_recipe_says_what_products_run_in_whatever_accelerate_was_told(make_recipe, monkeypatch, precision):
    seen, plain = set(), FoxTrainer.training_step

    def training_step(self, *args, **kwargs):
        seen.add(self.accelerator.mixed_precision)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(FoxTrainer, "training_step", training_step)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16" if precision == "fp32" else "no")
    train(make_recipe(precision=precision))
    assert seen == {"no" if precision == "fp32" else "bf16"}
