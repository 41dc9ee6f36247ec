"""The benchmark that trains and judges one arm, with a command that writes down what it was asked."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import retrofit_arm

PROGRAM = """
import json, sys
from pathlib import Path
given = sys.argv[1:]
if "broken" in given:
    sys.exit("error: a reason")
out = Path(given[given.index("--out") + 1]) if "--out" in given else Path(given[2].removeprefix("output="))
out.mkdir(parents=True, exist_ok=True)
(out / "result.json").write_text(json.dumps(given))
"""


@pytest.fixture
def arm(tmp_path, monkeypatch):
    """arm(*arguments) -> part -> the command it was; the folder is tmp_path/fox."""
    monkeypatch.setattr(retrofit_arm, "RETROFOX", (sys.executable, "-c", PROGRAM))
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


def test_only_what_is_asked_for_runs(arm):
    assert set(arm("--model", "base", "--only", "eval,needle-easy")) == {"eval", "needle-easy"}


def test_an_unknown_part_is_refused(arm, capsys):
    with pytest.raises(SystemExit) as ended:
        arm("--model", "base", "--only", "evil")
    assert ended.value.code == 2
    assert "no such part: evil; there are train, needle-easy," in capsys.readouterr().err


def test_a_failure_is_told_with_its_reason(arm):
    with pytest.raises(SystemExit, match=r"(?s)train ended with exit code 1.*error: a reason"):
        arm("--recipe", "broken")
