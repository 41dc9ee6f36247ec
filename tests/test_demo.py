"""The demo's script: steps run once, and nothing but what a demo wrote is removed; `make test` runs it in short."""

import json

import demo
import pytest


def test_only_what_a_demo_wrote_is_removed(tmp_path):
    mine = tmp_path / "mine"
    (mine / "eval").mkdir(parents=True)
    (mine / "eval" / "results.txt").write_text("years of work")
    for fresh in (False, True):
        with pytest.raises(SystemExit, match="has eval, which no demo wrote: name another folder"):
            demo.begin(mine, fresh)
        with pytest.raises(SystemExit, match="is a file"):
            demo.begin(mine / "eval" / "results.txt", fresh)
    (mine / "steps.json").write_text("{}")
    (mine / "notes.txt").touch()
    assert sorted(file.name for file in demo.begin(mine, False).iterdir()) == ["eval", "notes.txt", "steps.json"]
    assert [file.name for file in demo.begin(mine, True).iterdir()] == ["notes.txt"]
    assert demo.begin(tmp_path / "a" / "new", True).is_dir()


def test_a_step_runs_once_and_again_after_one_that_ran(tmp_path, capfd):
    def run(first: str, second: str) -> list[str]:
        """The steps that ran."""
        capfd.readouterr()
        steps = demo.Steps(tmp_path)
        steps.run("first", ["json.tool", first, str(tmp_path / "1.json")])
        steps.run("second", ["json.tool", second, str(tmp_path / "2.json")])
        assert all({"command", "seconds", "peak_mib"} == set(record) for record in steps.done.values())
        return [line.split(":")[0] for line in capfd.readouterr().out.splitlines() if ": json" in line]

    for name in ("a.json", "b[red].json"):
        (tmp_path / name).write_text("{}")
    a, b = str(tmp_path / "a.json"), str(tmp_path / "b[red].json")
    assert run(a, a) == ["first", "second"]
    assert run(a, a) == []
    assert run(a, b) == ["second"]
    assert run(b, b) == ["first", "second"]
    with pytest.raises(SystemExit, match=r"demo: second failed \(exit code [12]\)"):
        run(b, str(tmp_path / "missing.json"))
    assert "seconds" not in json.loads((tmp_path / "steps.json").read_text())["second"]
    assert run(b, b) == ["second"]


def test_the_short_demo_fails_where_its_losses_are_not_the_usual():
    def evaluation(base, converted, adapted):
        return {"lines": [{"key": k, "mean": v} for k, v in (("base", base), ("base2", converted), ("model", adapted))]}

    demo.check(evaluation(3.879, 3.880, 3.814))
    for losses in ((3.879, 3.880, 3.875), (3.879, 3.880, float("nan"))):
        with pytest.raises(SystemExit, match=r"two steps took the loss from 3\.880 to"):
            demo.check(evaluation(*losses))
    for converted in (4.2, float("nan")):
        with pytest.raises(SystemExit, match="the conversion moved the loss by"):
            demo.check(evaluation(3.879, converted, 3.0))
