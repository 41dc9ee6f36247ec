"""What `make demo` leaves behind: the table it prints, as JSON, in the form that the page of results reads."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def demo():
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_record_has_the_table_the_versions_and_the_machine(demo, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["demo.py", "--model", "/somewhere/else/model.gguf", "--fast"])
    steps = demo.Steps(tmp_path)
    steps.done = {"convert": {"command": ["retrofox"], "seconds": 2.0, "peak_mib": 100}}
    losses = {"base": 3.0, "base2": 4.0, "model": 2.0}
    evaluation = {
        "buckets": [{"from": 0, "to": 16, "loss": {key: {"mean": value} for key, value in losses.items()}}],
        "lines": [{"key": key, "mean": value + 1} for key, value in losses.items()],
    }
    rows = {
        role: {"role": role, "modes": {"easy": {"by_length": [{"prompts": 4, "found": share, "interval": [0.2, 1.0]}]}}}
        for role, share in (("model", 0.75), ("base", 1.0), ("base2", 0.5))
    }
    found = {"lengths": [512], "models": {f"the {role}": values for role, values in rows.items()}}
    result = demo.record(steps, 0.5, evaluation, found)
    assert result["command"] == "python examples/demo.py --model model.gguf --fast"
    assert result["seconds"] == 2.5
    assert result["steps"][1] == {"name": "convert", "seconds": 2.0, "peak_mib": 100}
    assert result["loss"] == [
        {"from": 0, "to": 16, "original": 3.0, "converted": 4.0, "adapted": 2.0},
        {"original": 4.0, "converted": 5.0, "adapted": 3.0},
    ]
    shares = {"original": 1.0, "converted": 0.5, "adapted": 0.75}
    assert result["needles"] == [
        {"length": 512, "prompts": 4} | {name: {"found": x, "interval": [0.2, 1.0]} for name, x in shares.items()}
    ]
    with demo.console.capture() as printed:
        demo.console.print(demo.recalled(found))
    assert "512" in printed.get()
    assert "100% (20-100)" in printed.get()
    assert {"torch", "transformers", "retrofox"} <= set(result["versions"])
    assert result["machine"]["cores"] >= 1
    kept = json.loads((ROOT / "benchmarks" / "demo.json").read_text())
    assert set(result) - {"needles"} <= set(kept)  # a record from before needles were asked for
    assert [set(row) for row in kept["loss"]] == [set(result["loss"][0])] * (len(kept["loss"]) - 1) + [
        set(result["loss"][1])
    ]
