"""The benchmarks that train and judge one arm, and several in turn, with commands that note what they were asked."""

from __future__ import annotations

import json
import sys

import pytest
import retrofit_arm
import retrofit_arms

ONE_ARM = """
import json, sys
from pathlib import Path
given = sys.argv[1:]
out = Path(given[given.index("--out") + 1]) if "--out" in given else Path(given[2].removeprefix("output="))
out.mkdir(parents=True, exist_ok=True)
(out / "result.json").write_text(json.dumps(given))
"""


@pytest.fixture
def arm(tmp_path, monkeypatch):
    """arm(*arguments) -> part -> the command it was; the folder is tmp_path/fox."""
    monkeypatch.setattr(retrofit_arm, "RETROFOX", (sys.executable, "-c", ONE_ARM))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "copa.yaml").touch()

    def run(*arguments: str) -> dict[str, list[str]]:
        files = ["--dev", "dev.xz", "--haystack", "hay.xz"]
        monkeypatch.setattr(sys, "argv", ["retrofit_arm.py", str(tmp_path / "fox"), *files, *arguments])
        retrofit_arm.main()
        found = (tmp_path / "fox").rglob("result.json")
        return {file.parent.name: json.loads(file.read_text()) for file in found}

    return run


def test_an_arm_is_trained_once_and_judged_by_every_part(arm, tmp_path):
    tasks = ["--tasks", str(tmp_path / "tasks")]
    found = arm("--recipe", "fox.yaml", *tasks, "seed=1")
    folder = tmp_path / "fox"
    assert found.pop("fox") == ["train", "fox.yaml", f"output={folder}", "seed=1"]
    assert set(found) == {"needle-easy", "needle-standard", "eval", "eval-128k", "tasks"}
    assert {command[1] for command in found.values()} == {str(folder / "model")}
    assert found["needle-standard"][0] == "needle"
    assert "standard" in found["needle-standard"]
    assert found["tasks"][found["tasks"].index("--tasks") + 1] == "local_copa"
    again = arm("--recipe", "other.yaml", *tasks)  # everything is there
    assert again["fox"][1] == "fox.yaml"


PROGRAM = """
import json, sys, time
from pathlib import Path
given = sys.argv[1:]
folder, trains = Path(given[0]), "--recipe" in given
folder.mkdir(exist_ok=True)
if trains and "broken.yaml" in given:
    sys.exit("a reason")
if not trains:
    time.sleep(0.4)
if trains:
    (folder / "result.json").write_text("{}")
with (folder.parent / "order.jsonl").open("a") as file:
    file.write(json.dumps(["train" if trains else "judge", folder.name, given]) + "\\n")
"""
FILES = ["--dev", "dev.xz", "--haystack", "hay.xz"]


@pytest.fixture
def arms(tmp_path, monkeypatch):
    """arms(*arguments) -> (exit code, [(what, arm, arguments)] in the order of their ends)."""
    monkeypatch.setattr(retrofit_arms, "ARM", (sys.executable, "-c", PROGRAM))

    def run(*arguments: str) -> tuple[int, list[tuple[str, str, list[str]]]]:
        code = retrofit_arms.main([str(tmp_path), *arguments, *FILES])
        lines = (tmp_path / "order.jsonl").read_text().splitlines() if (tmp_path / "order.jsonl").exists() else []
        return code, [(what, arm, given) for what, arm, given in map(json.loads, lines)]

    return run


def test_arms_are_trained_in_turn_and_judged_beside_the_next(arms, tmp_path):
    code, done = arms("a=a.yaml", "b=b.yaml", "base=models/base", "--only", "eval", "--changes", "seed=1")
    assert code == 0
    order = [(what, arm) for what, arm, _ in done]
    assert order.index(("train", "b")) < order.index(("judge", "a"))
    assert [arm for what, arm in order if what == "judge"] == ["a", "b", "base"]
    commands = {(what, arm): given for what, arm, given in done}
    assert commands["train", "a"][-1] == "seed=1"
    assert commands["train", "a"][commands["train", "a"].index("--only") + 1] == "train"
    judged = commands["judge", "a"]
    assert judged[judged.index("--model") + 1] == str(tmp_path / "a" / "model")
    assert judged[judged.index("--only") + 1] == "eval"
    assert commands["judge", "base"][2] == "models/base"


def test_a_failure_leaves_the_other_arms_alone(arms, tmp_path, capsys):
    code, done = arms("a=broken.yaml", "b=b.yaml")
    assert code == 1
    assert [(what, arm) for what, arm, _ in done] == [("train", "b"), ("judge", "b")]
    assert f"failed, see {tmp_path / 'a.train.log'}" in capsys.readouterr().out
    assert "a reason" in (tmp_path / "a.train.log").read_text()
