"""SIGTERM and Ctrl-C in every part of a run: it leaves with 128 + signal, and run again it ends bit for bit alike."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
import yaml

import retrofox.training.train
from retrofox.config import load_recipe
from retrofox.data.encode import Encoder
from retrofox.data.prepare import prepare
from retrofox.support.interruptions import Interruptions
from retrofox.training import checkpoint
from retrofox.training.train import train
from retrofox.training.trainer import FoxTrainer


@pytest.fixture(scope="module")
def whole(tmp_path_factory, pico_fox, saved) -> Path:
    """A recipe of two stages of 2 steps of 2 micro-batches, with held-out text; run once, without interruption."""
    folder = tmp_path_factory.mktemp("whole")
    for part, word in (("train", "fox"), ("held-out", "sow")):
        text = "".join(f"the {word} forgets {i * i % 17} and so on, " for i in range(90))
        (folder / f"{part}.txt").write_text(text)
    saved(pico_fox(), folder / "model")
    stage = {"objective": "extend", "tokens": 256, "sequence_length": 64, "batch_tokens": 128}
    values = {
        "model": str(folder / "model"),
        "output": str(folder / "run"),
        "data": {
            "train": [str(folder / "train.txt")],
            "eval": [str(folder / "held-out.txt")],
            "cache": str(folder / "cache"),
        },
        "stages": [stage, stage],
        "precision": "fp32",
        "log": {"every": 1},
        "dataloader_workers": 0,
    }
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(values))
    train(load_recipe(file))
    return file


PARTS = {
    # what is running when the signal comes, the how manieth call of it, what is said to stand
    "conversion": (retrofox.training.train, "resolve_source", 1, "nothing was trained yet"),
    "tokenising": (Encoder, "__call__", 2, "nothing was trained yet"),
    "loss before": (FoxTrainer, "held_out_loss", 1, "nothing was trained yet"),
    "last step": (FoxTrainer, "training_step", 3, "saved at step 2"),
    "last save": (FoxTrainer, "_save_checkpoint", 1, "saved at step 2"),
    "loss after": (FoxTrainer, "held_out_loss", 2, "saved at step 2"),
    "export between stages": (retrofox.training.train, "export", 1, "stage 0 is complete"),
    "last export": (retrofox.training.train, "export", 2, "stage 1 is complete"),
}


def send_in(patch, owner, name: str, call: int, number: int) -> None:
    """Lets the call'th call of owner.name begin with a signal."""
    plain, calls = getattr(owner, name), []

    def interrupted(*arguments, **options):
        calls.append(name)
        if len(calls) == call:
            os.kill(os.getpid(), number)
        return plain(*arguments, **options)

    patch.setattr(owner, name, interrupted)


@pytest.mark.parametrize("part", PARTS)
def test_a_signal_in_any_part_leaves_what_goes_on_bit_for_bit(
    whole, tmp_path, monkeypatch, capfd, curve, weights, part
):
    owner, name, call, stands = PARTS[part]
    number = signal.SIGINT if part in ("loss before", "last export") else signal.SIGTERM
    recipe = load_recipe(whole, [f"output={tmp_path / 'run'}", f"data.cache={tmp_path / 'cache'}"])
    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        send_in(patch, owner, name, call, number)
        with pytest.raises(SystemExit) as left:
            train(recipe)
    assert left.value.code == 128 + number
    assert f"signal {int(number)}: {stands}" in capfd.readouterr().err
    assert signal.getsignal(number) is before
    assert not list((tmp_path / "cache").glob(".*.tmp"))
    assert not (tmp_path / "run" / ".lock").exists()
    result = train(recipe)
    assert (tmp_path / "run" / "result.json").is_file()
    assert [stage["steps"] for stage in result["stages"]] == [2, 2]
    assert curve(tmp_path / "run", "stage") == curve(whole.parent / "run", "stage")
    assert weights(tmp_path / "run") == weights(whole.parent / "run")


def test_a_resumed_run_logs_and_saves_as_often_as_it_is_told_now(whole, tmp_path, monkeypatch, curve):
    stage = "{objective: extend, tokens: 1280, sequence_length: 64, batch_tokens: 128}"
    changes = [f"stages=[{stage}]", f"output={tmp_path / 'run'}"]
    with monkeypatch.context() as patch:
        send_in(patch, FoxTrainer, "training_step", 3, signal.SIGTERM)
        with pytest.raises(SystemExit):
            train(load_recipe(whole, [*changes, "log.every=1", "checkpoint.every_steps=1"]))
    train(load_recipe(whole, [*changes, "log.every=4", "checkpoint={every_steps: 7, keep: 9}"]))
    assert [step for step, *_ in curve(tmp_path / "run")] == [1, 2, 4, 7, 8, 10]
    saved = checkpoint.checkpoints(tmp_path / "run" / "stage-0-extend")
    assert [path.name for path in saved] == ["checkpoint-1", "checkpoint-2", "checkpoint-7", "checkpoint-10"]


def test_prepare_leaves_with_143_and_goes_on(whole, tmp_path, monkeypatch, capfd):
    recipe = load_recipe(whole, [f"data.cache={tmp_path / 'cache'}"])
    with monkeypatch.context() as patch:
        send_in(patch, Encoder, "__call__", 2, signal.SIGTERM)
        with pytest.raises(SystemExit) as left:
            prepare(recipe, progress=False)
    assert left.value.code == 143
    assert "finished token shards are kept" in capfd.readouterr().err
    assert not list((tmp_path / "cache").glob(".*.tmp"))
    assert prepare(recipe, progress=False)["train"]["shards_reused"] == 1


def test_a_second_ctrl_c_stops_at_once_and_other_signals_wait():
    with Interruptions("it stands") as interruptions, interruptions.held():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert interruptions.caught == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    with Interruptions("it stands") as interruptions:
        with pytest.raises(SystemExit):
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # a group's second copy must not break what unwinds
        interruptions.leave()


def test_an_error_that_a_library_makes_of_the_exit_changes_no_exit_code():
    def run() -> None:
        with Interruptions("it stands", quiet=True):
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                torch.zeros(1).view(2)

    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 143
