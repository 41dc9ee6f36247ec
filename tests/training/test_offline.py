"""Distillation from logits on disk: the codec, the lumped KL, what `retrofox teacher` writes, what train reads."""

from __future__ import annotations

import itertools
import json
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.numpy import load_file, save_file

import retrofox.training.offline.write as write_module
import retrofox.training.teacher as teacher_module
from retrofox.config import load_recipe
from retrofox.data.packed import PackedDataset
from retrofox.data.shards import Manifest
from retrofox.planning.plan import plan
from retrofox.training.offline.codec import (
    id_type,
    log_probabilities,
    pack,
    quantised,
    top_k_and_rest,
    unpack,
    unsigned,
)
from retrofox.training.offline.objective import lumped_kl
from retrofox.training.offline.shards import TeacherLogits
from retrofox.training.offline.write import write_teacher
from retrofox.training.train import train

FULL = 288  # the pico vocabulary


def lumped(log_p: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities (N, k + 1) of ids and the sum of all others, in float64."""
    p = log_p.double().exp()
    chosen = p.gather(1, ids)
    return torch.cat((chosen, p.scatter(1, ids, 0).sum(-1, keepdim=True)), 1).log()


@pytest.mark.parametrize(("vocabulary", "top_k"), [(288, 1), (288, 64), (288, 288), (70000, 16)])
def test_a_window_comes_back_from_its_bytes(vocabulary, top_k):
    logits = 3 * torch.randn(50, vocabulary, generator=torch.Generator().manual_seed(0))
    logits[0, 5] = 200.0  # all others together have e^-190
    ids, log_p = top_k_and_rest(logits, top_k)
    wanted = lumped(torch.log_softmax(logits.double(), -1), ids)
    torch.testing.assert_close(log_p.double(), wanted, rtol=1e-5, atol=1e-5)
    packed = pack(ids.numpy().astype(id_type(vocabulary)), quantised(log_p).numpy())
    found_ids, codes = unpack(packed, 50, top_k, id_type(vocabulary))
    assert torch.equal(unsigned(found_ids), ids)
    read = log_probabilities(codes)
    there = wanted > -250
    assert float((read - wanted)[there].abs().max()) < 0.004
    assert bool((read[wanted == -torch.inf] == -torch.inf).all())
    torch.testing.assert_close(read.exp().sum(-1), torch.ones(50))
    with pytest.raises(ValueError, match=r"."):
        unpack(packed[:-9], 50, top_k, id_type(vocabulary))


@pytest.mark.parametrize("top_k", [3, FULL])
def test_lumped_kl_is_the_kl_of_lumped_distributions_with_its_gradient(top_k):
    torch.manual_seed(0)
    teacher, student = 3 * torch.randn(2, 20, FULL)
    ids, log_p = top_k_and_rest(teacher, top_k)
    z = student.clone().requires_grad_()
    kl = lumped_kl(z, ids, log_p)
    kl.sum().backward()
    again = student.double().requires_grad_()
    if top_k == FULL:
        log_q, p = torch.log_softmax(again, -1), torch.softmax(teacher.double(), -1)
        wanted = (p * (p.log() - log_q)).sum(-1)
    else:
        log_q = lumped(torch.log_softmax(again, -1), ids)
        p = log_p.double().exp()
        wanted = (p * (log_p.double() - log_q)).sum(-1)
    wanted.sum().backward()
    torch.testing.assert_close(kl.double(), wanted, rtol=1e-5, atol=1e-5)
    assert z.grad is not None
    assert again.grad is not None
    torch.testing.assert_close(z.grad.double(), again.grad, rtol=1e-4, atol=1e-6)


def test_a_rest_too_small_for_float32_keeps_its_logarithm():
    z = torch.tensor([[60.0, 0.0, 0.0]])
    ids, log_p = top_k_and_rest(z, 1)
    assert float(log_p[0, 1]) == pytest.approx(np.log(2) - 60, rel=1e-6)  # 1 - p would be 0, and its logarithm -inf
    assert float(lumped_kl(torch.tensor([[50.0, 0.0, 0.0]]), ids, log_p)) == pytest.approx(0, abs=1e-20)


def test_what_is_left_out_is_little_once_a_model_has_learned(pico_llama, pico_tokenizer):
    """A lower bound, and within 1 % at k = 64 for distributions as training makes them, not random ones."""
    text = "".join(f"the fox forgets gate {i * i % 97} and so on, " for i in range(400))
    ids = torch.tensor(pico_tokenizer(text)["input_ids"])[: 40 * 64].view(40, 64)
    model, log_p = pico_llama(initializer_range=0.05), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(60):
        batch = ids[torch.arange(8 * step, 8 * step + 8) % 40]
        if step in (40, 59):
            with torch.no_grad():
                log_p.append(torch.log_softmax(model(ids[:8]).logits.flatten(0, 1), -1))
        loss = F.cross_entropy(model(batch).logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    student, teacher = log_p
    full = float((teacher.exp() * (teacher - student)).sum(-1).mean())
    found = {}
    for top_k in (1, 4, 16, 64, FULL):
        chosen, kept = top_k_and_rest(teacher, top_k)
        found[top_k] = float(lumped_kl(student, chosen, kept).mean())
    assert full > 0.01
    assert sorted(found.values()) == list(found.values())  # more tokens, more of the KL
    assert 0.99 * full < found[64] <= full * (1 + 1e-5)
    assert found[FULL] == pytest.approx(full, rel=1e-4)
    assert found[1] < 0.99 * full


@pytest.fixture
def recipe(tmp_path, pico_fox_checkpoint, monkeypatch) -> Path:
    """One distill stage of a converted model: 6 steps over packed documents, with accumulation; shards of 4 windows."""
    monkeypatch.setattr(write_module, "SHARD_TOKENS", 256)
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(30):
        text = "".join(f"the fox forgets gate {number * i % 17} and so on, " for i in range(1 + number % 7))
        (folder / f"{number}.txt").write_text(text)
    stage = {"objective": "distill", "tokens": 768, "sequence_length": 64, "batch_tokens": 128, "learning_rate": 3e-3}
    values = {
        "model": str(pico_fox_checkpoint),
        "output": str(tmp_path / "run"),
        "data": {"train": [str(folder)], "cache": str(tmp_path / "cache"), "workers": 1},
        "stages": [{**stage, "ce_weight": 0.25, "teacher_logits": str(tmp_path / "logits")}],
        "precision": "fp32",
        "log": {"every": 1},
        "checkpoint": {"every_steps": 4},
        "dataloader_workers": 0,
    }
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def shards(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.glob("shard-*"))}


def log(out: Path) -> list[tuple]:
    """(step, loss, KL, cross-entropy, gradient norm) of every step."""
    lines = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    return [tuple(line[key] for key in ("step", "loss", "kl", "cross_entropy", "grad_norm")) for line in lines]


def test_a_writer_goes_on_behind_the_last_whole_shard(recipe, tmp_path, monkeypatch, capsys):
    whole, folder = tmp_path / "whole", tmp_path / "logits"
    (report,) = write_teacher(load_recipe(recipe), out=whole).values()
    assert report["shards"] == len(shards(whole)) == 3
    assert report["tokens"] == 768
    assert report["bytes"] < 768 * 64 * 4
    real, calls = write_module.write_shard, []

    def killed(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise SystemExit(130)
        real(*arguments)

    monkeypatch.setattr(write_module, "write_shard", killed)
    with pytest.raises(SystemExit):
        write_teacher(load_recipe(recipe))
    assert len(shards(folder)) == 2
    (folder / "shard-000001.safetensors").write_bytes(shards(folder)["shard-000001.safetensors"][:-7])  # a damaged disk
    before = (folder / "shard-000000.safetensors").stat().st_mtime_ns
    monkeypatch.setattr(write_module, "write_shard", real)
    capsys.readouterr()
    write_teacher(load_recipe(recipe))
    assert "1 of 3 shards are in" in capsys.readouterr().err
    assert (folder / "shard-000000.safetensors").stat().st_mtime_ns == before
    assert shards(folder) == shards(whole)
    note = json.loads((folder / "teacher.json").read_text())
    assert note["top_k"] == 64
    assert note["written"]["windows"] == 12
    monkeypatch.setattr(write_module.Original, "load", None)  # nothing is left to run it for
    assert write_teacher(load_recipe(recipe))[str(folder)]["bytes"] == report["bytes"]


def test_a_disk_that_fills_up_is_told_of_in_one_line(recipe, tmp_path, run):
    write_teacher(load_recipe(recipe), out=tmp_path / "whole")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16384, before[1]))  # bytes of a file: the note has room, no shard has
    try:
        code, out, err = run("teacher", recipe)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (code, out) == (2, "")
    assert f"error: teacher logits can't be written to {tmp_path / 'logits'}: " in err
    assert "Free space there and run it again: whole shards are kept" in err
    assert [file.name for file in (tmp_path / "logits").iterdir()] == ["teacher.json"]
    write_teacher(load_recipe(recipe))
    assert shards(tmp_path / "logits") == shards(tmp_path / "whole")


def test_a_writer_whose_other_process_dies_says_so(recipe, launch):
    program = """
import os, signal, sys
from retrofox.cli.app import main
from retrofox.training.offline import run, write
write.SHARD_TOKENS, sys.argv[:1] = 256, ["retrofox", "teacher"]
if os.environ["RANK"] == "1": run.Running.distributions = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
main()
"""
    done = launch(program, recipe, processes=2)
    told = [line for line in done.stderr.splitlines() if "rror: " in line]  # a traceback's, too
    assert [line[:22] for line in told] == ["error: process 1 (pid "], done.stderr


def test_a_longer_run_adds_to_the_logits_of_a_shorter_one(recipe, tmp_path):
    write_teacher(load_recipe(recipe, ["stages.0.tokens=384"]))
    first = shards(tmp_path / "logits")
    write_teacher(load_recipe(recipe))
    write_teacher(load_recipe(recipe), out=tmp_path / "whole")
    now = shards(tmp_path / "logits")
    assert now == shards(tmp_path / "whole")
    assert [now[name] for name in list(first)[:1]] == list(first.values())[:1]
    write_teacher(load_recipe(recipe, ["stages.0.tokens=384"]))  # has all it needs
    assert shards(tmp_path / "logits") == now


@pytest.mark.parametrize("converted", [True, False])
def test_logits_are_the_originals_at_every_position(recipe, tmp_path, pico_llama, pico_checkpoint, converted):
    changes = [] if converted else [f"model={pico_checkpoint}", "fox={half_life: [2, 200]}"]
    changes += ["stages.0.temperature=2.0", "stages.0.micro_batch=2"]
    write_teacher(load_recipe(recipe, changes), top_k=FULL)
    logits, model = TeacherLogits(tmp_path / "logits"), pico_llama()
    data = PackedDataset(Manifest.load(next((tmp_path / "cache").glob("manifest-*.json"))), 64)
    assert len(logits.windows) == 12
    for window in logits.windows.tolist():
        item, found = data[window], logits.window(window)
        begins = [0, *item["doc_lengths"].cumsum(0).tolist()]
        with torch.no_grad():
            parts = [model(item["input_ids"][None, a:b]).logits[0] for a, b in itertools.pairwise(begins)]
        wanted = torch.log_softmax(torch.cat(parts) / 2.0, -1)
        log_p = log_probabilities(found["teacher_codes"])[:, :-1]
        assert float((log_p - wanted.gather(1, unsigned(found["teacher_ids"]))).abs().max()) < 0.005


def test_training_reads_what_a_teacher_in_memory_would_say_and_loads_none(recipe, tmp_path, monkeypatch):
    memory = load_recipe(recipe, ["stages.0.teacher_logits=null", f"output={tmp_path / 'memory'}"])
    train(memory)
    write_teacher(load_recipe(recipe), top_k=FULL)

    def loaded(*arguments, **options):
        raise AssertionError("the teacher was loaded")

    for name in ("load_base", "load_any", "convert"):
        monkeypatch.setattr(teacher_module, name, loaded)
    disk = load_recipe(recipe)
    train(disk)
    ours, theirs = log(tmp_path / "run"), log(tmp_path / "memory")
    assert len(ours) == 6
    for left, right in zip(ours, theirs, strict=True):
        assert left == pytest.approx(right, rel=5e-3)  # 1/256 nat


def test_a_plan_has_no_teacher_where_its_logits_are_on_disk(recipe, tmp_path):
    write_teacher(load_recipe(recipe))
    planned = {
        key: plan(load_recipe(recipe, changes))["stages"][0]
        for key, changes in {"memory": ["stages.0.teacher_logits=null"], "disk": []}.items()
    }
    assert planned["memory"]["memory_gb"]["teacher"] > 0
    assert planned["disk"]["memory_gb"]["teacher"] == 0
    assert planned["disk"]["flops_per_token"] < planned["memory"]["flops_per_token"]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_resumed_run_reads_on_where_it_stopped_bit_for_bit(recipe, tmp_path, workers):
    write_teacher(load_recipe(recipe))
    loaded = load_recipe(recipe, [f"dataloader_workers={workers}"])
    train(loaded)
    model = tmp_path / "run" / "model" / "model.safetensors"
    before, lines = model.read_bytes(), log(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "model")
    folders = (tmp_path / "run" / "stage-0-distill").glob("checkpoint-*")
    assert sorted(folder.name for folder in folders) == ["checkpoint-4", "checkpoint-6"]
    shutil.rmtree(tmp_path / "run" / "stage-0-distill" / "checkpoint-6")
    assert train(loaded)["stages"][0]["resumed_at"] == 4
    assert model.read_bytes() == before
    assert log(tmp_path / "run") == lines
    shutil.rmtree(tmp_path / "run" / "model")
    shutil.rmtree(tmp_path / "run" / "stage-0-distill" / "checkpoint-6")
    shutil.rmtree(tmp_path / "logits")
    write_teacher(loaded, top_k=16)
    with pytest.raises(ValueError, match=r"data under this run changed: .*top 64.* now it is .*top 16"):
        train(loaded)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("stages.0.sequence_length=128", "written for sequence_length 64, and the stage's is 128"),
        ("stages.0.temperature=2.0", "written for temperature 1.0, and the stage's is 2.0"),
        ("stages.0.teacher_logits=nowhere", "nowhere holds no teacher logits (no teacher.json): run `retrofox teacher"),
        ("seed=3", "windows that the stage reads (seed 3; they were written for seed 0)"),
        (
            "stages.0.tokens=1536",
            "windows that the stage reads (seed 0; they were written for seed 0): run `retrofox teacher`",
        ),
        ("texts", "were written for another data: its fingerprint was"),
        ("tokenizer", "were written for another tokenizer: its fingerprint was"),
    ],
)
def test_logits_of_something_else_are_refused_before_anything_is_written(
    recipe, tmp_path, pico_tokenizer, change, said
):
    write_teacher(load_recipe(recipe))
    changes = [change]
    if change == "texts":
        (tmp_path / "texts" / "3.txt").write_text("another text")
        changes = []
    if change == "tokenizer":
        changes = [f"data.tokenizer={tmp_path / 'tokenizer'}"]
        other = type(pico_tokenizer)(tokenizer_object=pico_tokenizer.backend_tokenizer, eos_token="<s>")
        other.save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(ValueError, match=r".") as refused:
        train(load_recipe(recipe, changes))
    assert said in str(refused.value)
    assert "stages.0" in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_other_logits_and_foreign_files_are_not_written_over(recipe, tmp_path):
    write_teacher(load_recipe(recipe))
    before = shards(tmp_path / "logits")
    for change, said in (
        ("seed=3", "holds other logits (seed 0, not 3)"),
        ("stages.0.temperature=2", "holds other logits (temperature 1.0, not 2.0)"),
    ):
        with pytest.raises(ValueError, match=r"choose another --out") as refused:
            write_teacher(load_recipe(recipe, [change]))
        assert said in str(refused.value)
    with pytest.raises(ValueError, match=r"top_k 64, not 16"):
        write_teacher(load_recipe(recipe), top_k=16)
    assert shards(tmp_path / "logits") == before
    with pytest.raises(ValueError, match=r"texts holds files that are no teacher logits"):
        write_teacher(load_recipe(recipe), out=tmp_path / "texts")


def test_a_damaged_shard_is_named(recipe, tmp_path):
    write_teacher(load_recipe(recipe))
    file = tmp_path / "logits" / "shard-000002.safetensors"
    content = load_file(file)
    content["data"][len(content["data"]) // 2] ^= 1
    save_file(content, file)
    with pytest.raises(ValueError, match=r"shard-000002\.safetensors, window .* can't be read .*delete the file"):
        train(load_recipe(recipe))
    file.write_bytes(b"")
    with pytest.raises(ValueError, match=r"shard-000002\.safetensors is damaged: delete it"):
        train(load_recipe(recipe, [f"output={tmp_path / 'other'}"]))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--top-k", "289"], "--top-k must be from 1 to the vocabulary, 288; got 289"),
        (["--stage", "1"], "--stage 1 is no distill stage: they are 0, from 0"),
        (["stages.0.teacher_logits=null"], "give stages.0.teacher_logits=DIR, which train reads, too, or --out DIR"),
        (
            ["stages=[{objective: extend, tokens: 64, sequence_length: 64}]"],
            "no stage of this recipe distills (its stages: extend)",
        ),
        (["data.train=[nowhere.txt]"], "no data at nowhere.txt"),
        (
            ["--out", "/proc/logits"],
            "can't write to /proc/logits, /proc: No such file or directory; choose another --out",
        ),
        (["--out", __file__], f"can't write to {__file__}, {__file__}: a file; choose another --out"),
    ],
)
def test_the_command_says_in_one_line_what_it_can_not_write(recipe, tmp_path, run, arguments, said):
    code, out, err = run("teacher", recipe, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error:")
    assert said in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "logits").exists()


@pytest.mark.parametrize("values", [{"top_k": "64"}, {"sequence_length": None}, {"written": 3, "data": 7}])
def test_a_note_with_values_of_another_kind_is_damaged(recipe, tmp_path, values):
    write_teacher(load_recipe(recipe))
    note = tmp_path / "logits" / "teacher.json"
    note.write_text(json.dumps({**json.loads(note.read_text()), **values}))
    with pytest.raises(ValueError, match=r"teacher\.json is damaged, or of another version \((top_k|sequence|data)"):
        train(load_recipe(recipe))


def test_stages_of_one_length_share_a_directory_and_others_may_not(recipe, tmp_path):
    text = yaml.safe_load(recipe.read_text())
    first = text["stages"][0]
    text["stages"] = [first, {"objective": "extend", "tokens": 128, "sequence_length": 64}, {**first, "tokens": 128}]
    recipe.write_text(yaml.safe_dump(text))
    (report,) = write_teacher(load_recipe(recipe)).values()
    assert report["windows"] == 12 + 2
    (report,) = write_teacher(load_recipe(recipe), stage=2, out=tmp_path / "one").values()
    assert report["windows"] == 2
    with pytest.raises(ValueError, match=r"stages 0, 2 differ in temperature \(1.0, 2.0\) and can't share"):
        write_teacher(load_recipe(recipe, ["stages.2.temperature=2"]))


def test_a_larger_teacher_of_the_same_tokenizer_teaches(
    recipe, tmp_path, pico_llama, pico_tokenizer, pico_fox_checkpoint
):
    pico_llama(hidden_size=48, vocab_size=300).save_pretrained(tmp_path / "larger")
    pico_tokenizer.save_pretrained(tmp_path / "larger")
    changes = [f"model={tmp_path / 'larger'}", f"data.tokenizer={pico_fox_checkpoint}"]
    write_teacher(load_recipe(recipe, changes), out=tmp_path / "wide")
    with pytest.raises(
        ValueError, match=r"larger with 300 tokens, and the model has 288: take a teacher with the same"
    ):
        train(load_recipe(recipe, [f"stages.0.teacher_logits={tmp_path / 'wide'}"]))
    pico_llama(hidden_size=48).save_pretrained(tmp_path / "larger")
    write_teacher(load_recipe(recipe, changes))
    assert len(train(load_recipe(recipe))["stages"]) == 1
    assert str(tmp_path / "larger") in (tmp_path / "logits" / "teacher.json").read_text()
