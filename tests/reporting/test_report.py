"""`retrofox report`: what it measures, names as missing, and refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from retrofox.reporting.report import report
from retrofox.reporting.suites import choose_suite


def test_every_part_is_measured_and_written(made):
    result, out = made["result"], made["out"]
    assert list(result["parts"]) == ["needle-easy", "needle-standard", "loss", "panel", "heads"]
    assert set(result["missing"]) == {"tasks"}
    written = json.loads((out / "report.json").read_text())
    assert written["summary"] == json.loads(json.dumps(result["summary"]))
    assert "answers" not in written["parts"]["needle-easy"]["result"]
    for name, entry in result["parts"].items():
        assert written["parts"][name]["measures"] == entry["measures"]
        assert [*(out / "parts" / name).glob("*.json")]
    assert [line["key"] for line in result["parts"]["loss"]["result"]["lines"]][-1] == "base"
    assert list(result["parts"]["needle-easy"]["result"]["models"]) == ["fox", "base"]
    assert result["parts"]["heads"]["result"]["live_share"]["lengths"][0]["length"] == 64
    assert not list(out.rglob("*.tmp"))


def test_what_cannot_be_measured_is_named(made, tmp_path, monkeypatch):
    short = tmp_path / "short.txt"
    short.write_text("Ten words that all differ, so nothing here comes twice.")
    monkeypatch.setattr("retrofox.reporting.sections.find_spec", lambda name: None)
    given = {**made["given"], "data": [str(short)], "out": str(tmp_path / "out")}
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
def test_tasks_are_a_part_of_their_own(made, tmp_path):
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
    assert list(result["parts"]) == ["panel", "heads", "tasks"]
    row = next(row for row in result["summary"]["rows"] if row["topic"] == "tasks")
    assert row["what"] == "pico_choice, acc"
    assert row["difference"]["documents"] == 6
    assert "pico_choice, acc" in (tmp_path / "out" / "report.html").read_text()


def test_sizes_of_a_suite_can_be_changed(monkeypatch):
    monkeypatch.undo()  # the small suites
    changed = choose_suite("long", length=3000, max_documents=2, trials=9, tasks=["piqa"])
    assert (changed.length, changed.documents, changed.tasks) == (3000, 2, ("ruler", "piqa"))
    assert changed.lengths[-1] == 3000
    assert max(changed.lengths) == 3000
    assert changed.heads_length == 3000
    assert changed.trials == {"easy": 9, "standard": 9}


def test_what_can_not_be_reported_is_refused_before_anything_runs(made, tmp_path):
    given, base = {**made["given"], "out": str(tmp_path / "out")}, made["given"]["against"][0]
    for change, error, message in (
        ({"length": 10}, ValueError, "length must be at least 64"),
        ({"data": ["nowhere.txt"]}, FileNotFoundError, "nowhere.txt"),
        ({"limit": 3}, ValueError, "limit says how lm-eval tasks run: name tasks, or drop it"),
        ({"tasks": ["piqa", "nope"]}, ValueError, r"unknown task nope; `lm_eval ls tasks` lists"),
        ({"tasks": ["piqa"], "include_path": "missing"}, FileNotFoundError, "include_path is not a directory: missing"),
        ({"model": base, "against": [], "data": []}, ValueError, "no part could be measured"),
        ({"model": base, "out": None}, ValueError, "name a folder for the report"),
        ({"name": "base"}, ValueError, "name 'base' is that of another column"),
    ):
        with pytest.raises(error, match=message):
            report(**{**given, **change})
    assert not list(tmp_path.iterdir())


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
