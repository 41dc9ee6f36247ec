"""`retrofox report`: what it measures, keeps, reuses, names as missing, and refuses."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from retrofox.reporting.report import report
from retrofox.reporting.sections import PartStore, ReportRequest, plan_parts
from retrofox.reporting.suites import choose_suite


@pytest.fixture
def copy(made, tmp_path) -> dict[str, Any]:
    """The arguments of the report that was made, for a copy of its folder."""
    shutil.copytree(made["out"], tmp_path / "out")
    return {**made["given"], "out": str(tmp_path / "out")}


@pytest.fixture
def ran(monkeypatch) -> list[str]:
    """Names of the parts that run from now on."""
    names: list[str] = []
    write = PartStore.write

    def noted(self, part, *found):
        names.append(part.name)
        return write(self, part, *found)

    monkeypatch.setattr(PartStore, "write", noted)
    return names


def test_every_part_is_measured_and_kept(made):
    result, out = made["result"], made["out"]
    assert list(result["parts"]) == ["needle-easy", "needle-standard", "loss", "panel", "heads"]
    assert set(result["missing"]) == {"tasks"}
    written = json.loads((out / "report.json").read_text())
    assert written == json.loads(json.dumps(result))
    for name, entry in written["parts"].items():
        kept = json.loads((out / "parts" / name / "part.json").read_text())
        answers = kept["result"].pop("answers", None)
        assert (kept, bool(answers)) == (entry, name.startswith("needle"))
    assert [line["key"] for line in result["parts"]["loss"]["result"]["lines"]][-1] == "base"
    assert list(result["parts"]["needle-easy"]["result"]["models"]) == ["fox", "base"]
    assert result["parts"]["heads"]["result"]["live_share"]["lengths"][0]["length"] == 64
    assert not list(out.rglob("*.tmp"))


def test_a_second_run_reuses_what_is_complete_wherever_the_files_lie(copy, ran, tmp_path, capsys):
    again = report(**copy)
    assert ran == []
    assert "loss: kept from before" in capsys.readouterr().err
    for name in ("fox", "base", "texts"):
        source = Path(copy["model"]).parent / name
        shutil.copytree(source, tmp_path / name)
    elsewhere = {"model": str(tmp_path / "fox"), "against": [str(tmp_path / "base")], "data": [str(tmp_path / "texts")]}
    moved = report(**{**copy, **elsewhere})
    assert ran == []
    assert moved["summary"] == again["summary"]


def test_what_has_changed_runs_again(copy, ran, tmp_path):
    report(**{**copy, "trials": 3})
    assert ran == ["needle-easy", "needle-standard"]
    shutil.copytree(copy["model"], tmp_path / "fox")
    weights = load_file(tmp_path / "fox" / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] += 1e-3
    save_file(weights, tmp_path / "fox" / "model.safetensors", {"format": "pt"})
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "0.txt").write_text((Path(copy["data"][0]) / "0.txt").read_text() + "More.")
    parts, _ = plan_parts(ReportRequest(copy["model"], copy["against"], copy["data"]), choose_suite("quick", True))

    def identities(model=copy["model"], data=copy["data"], dtype=None, further=()) -> dict[str, Any]:
        store = PartStore(tmp_path / "out", ReportRequest(model, [*copy["against"], *further], data), dtype, None)
        return {part.name: store.identity(part) for part in parts}

    before, reads = identities(), {part.name for part in parts if "data" in part.options}
    for changed, names in (
        (identities(model=str(tmp_path / "fox")), {part.name for part in parts}),
        (identities(data=[str(tmp_path / "texts")]), reads),
        (identities(dtype="bfloat16"), {part.name for part in parts}),
        (identities(further=[copy["model"]]), {"needle-easy", "needle-standard", "loss"}),
    ):
        assert {name for name in before if changed[name] != before[name]} == names


def test_a_damaged_part_runs_again(copy, ran):
    place = Path(copy["out"]) / "parts" / "heads" / "part.json"
    place.write_text(place.read_text()[:50])
    report(**copy)
    assert ran == ["heads"]


def test_an_interruption_loses_the_part_under_way_alone(copy, ran, monkeypatch, capsys):
    for name in ("needle-easy", "heads"):
        shutil.rmtree(Path(copy["out"]) / "parts" / name)
    forward, stopped = torch.nn.Embedding.forward, []

    def stop(self, ids):
        if (Path(copy["out"]) / "parts" / "needle-easy" / "part.json").exists() and not stopped:
            stopped.append(1)
            os.kill(os.getpid(), signal.SIGINT)
        return forward(self, ids)

    monkeypatch.setattr(torch.nn.Embedding, "forward", stop)
    with pytest.raises(SystemExit) as end:
        report(**copy)
    assert end.value.code == 128 + signal.SIGINT
    assert ran == ["needle-easy"]
    assert "finished parts are kept" in capsys.readouterr().err
    result = report(**copy)
    assert ran == ["needle-easy", "heads"]
    assert list(result["parts"]) == ["needle-easy", "needle-standard", "loss", "panel", "heads"]


def test_what_cannot_be_measured_is_named_and_tried_again(made, tmp_path, ran, monkeypatch):
    short = tmp_path / "short.txt"
    short.write_text("Ten words that all differ, so nothing here comes twice.")
    monkeypatch.setattr("retrofox.reporting.sections.find_spec", lambda name: None)
    given = {**made["given"], "data": [str(short)], "out": str(tmp_path / "out")}
    for _ in range(2):
        ran.clear()
        result = report(**given, tasks=["piqa"])
        assert "loss" in result["parts"]
    assert result["missing"]["tasks"].startswith("piqa need lm-eval, which is not installed")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Not measured" in page
    assert "piqa need lm-eval, which is not installed" in page


def test_without_texts_there_are_gates_alone_in_the_models_directory(made, tmp_path):
    model = tmp_path / "run7" / "model"
    shutil.copytree(made["given"]["model"], model)
    result = report(model, progress=False)
    assert list(result["parts"]) == ["heads"]
    assert set(result["missing"]) == {"needle-easy", "needle-standard", "loss", "panel", "tasks"}
    assert "<h1>run7</h1>" in (model / "report" / "report.html").read_text()


@pytest.mark.filterwarnings("ignore")
def test_tasks_are_a_part_of_their_own(made, tmp_path, ran):
    lines = [{"q": "the fox " * n, "choices": [" gate", " fox"], "gold": n % 2} for n in range(1, 9)]
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "choice.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "tasks" / "choice.yaml").write_text(
        f"task: pico_choice\ndataset_path: json\ndataset_kwargs: {{data_files: {tmp_path}/tasks/choice.jsonl}}\n"
        "test_split: train\noutput_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: choices\n"
        "doc_to_target: gold\nmetric_list: [{metric: acc}]\n"
    )
    given = {"model": made["given"]["model"], "against": made["given"]["against"], "out": tmp_path / "out"}
    given |= {"tasks": ["pico_choice"], "include_path": str(tmp_path / "tasks"), "limit": 6, "progress": False}
    result = report(**given)
    assert ran == ["panel", "heads", "tasks"]
    row = next(row for row in result["summary"]["rows"] if row["topic"] == "tasks")
    assert row["what"] == "pico_choice, acc"
    assert row["difference"]["documents"] == 6
    assert "pico_choice, acc" in (tmp_path / "out" / "report.html").read_text()
    ran.clear()
    report(**given)
    assert ran == []
    (tmp_path / "tasks" / "choice.jsonl").write_text("\n".join(map(json.dumps, lines[::-1])))
    report(**given)
    assert ran == ["tasks"]


def test_sizes_of_a_suite_can_be_changed(monkeypatch):
    monkeypatch.undo()  # the small suites
    changed = choose_suite("long", length=3000, max_documents=2, trials=9, tasks=["piqa"])
    assert (changed.length, changed.documents, changed.tasks) == (3000, 2, ("ruler", "piqa"))
    assert changed.lengths[-1] == 3000
    assert max(changed.lengths) == 3000
    assert changed.heads_length == 3000
    assert changed.trials == {"easy": 9, "standard": 9}


def test_what_can_not_be_reported_is_refused_before_anything_runs(made, tmp_path, ran):
    given, base = {**made["given"], "out": str(tmp_path / "out")}, made["given"]["against"][0]
    (empty := tmp_path / "empty.txt").touch()
    for change, error, message in (
        ({"length": 10}, ValueError, "length must be at least 64"),
        ({"data": ["nowhere.txt"]}, FileNotFoundError, "nowhere.txt"),
        ({"data": [str(empty)]}, ValueError, "no text of 2 tokens or more in .*empty.txt"),
        ({"limit": 3}, ValueError, "limit says how lm-eval tasks run: name tasks, or drop it"),
        ({"tasks": ["piqa", "nope"]}, ValueError, r"unknown task nope; `lm_eval ls tasks` lists"),
        ({"tasks": ["piqa"], "include_path": "missing"}, FileNotFoundError, "include_path is not a directory: missing"),
        ({"model": base, "against": [], "data": []}, ValueError, "no part could be measured"),
        ({"model": base, "out": None}, ValueError, "name a folder for the report"),
    ):
        with pytest.raises(error, match=message):
            report(**{**given, **change})
    assert not ran
    assert list(tmp_path.iterdir()) == [empty]


def test_the_documented_sizes_are_those_of_the_suites(monkeypatch):
    monkeypatch.undo()
    page = (Path(__file__).parents[2] / "docs" / "report.md").read_text(encoding="utf-8")
    rows = {cells[0]: cells[1:] for line in page.splitlines() if (cells := [c.strip() for c in line.split("|")[1:-1]])}
    chosen = [choose_suite("quick"), choose_suite("quick", True), choose_suite("long"), choose_suite("full")]
    prompts = [{mode: suite.depths * trials for mode, trials in suite.trials.items()} for suite in chosen]
    assert [cell.split()[0] for cell in rows["texts up to"]] == [f"{suite.length >> 10}k" for suite in chosen]
    assert rows["needle prompts at each length: easy, standard"] == [f"{p['easy']}, {p['standard']}" for p in prompts]
    assert rows["documents for the loss"] == [str(suite.documents) for suite in chosen]
    assert rows["tasks"] == [", ".join(f"`{task}`" for task in suite.tasks) for suite in chosen]
