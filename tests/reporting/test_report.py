"""`retrofox report`: what it measures, keeps, reuses, names as missing, and refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from retrofox.evaluation.recall import recall
from retrofox.reporting import parts as parts_module
from retrofox.reporting import report as report_module
from retrofox.reporting.fingerprint import model_fingerprint
from retrofox.reporting.parts import Asked, plan_parts
from retrofox.reporting.report import report
from retrofox.reporting.suites import RULER, SUITES, choose_suite


def test_every_part_is_measured_and_kept_with_its_command(made):
    result, out = made["result"], made["out"]
    assert list(result["parts"]) == ["needle-easy", "needle-standard", "recall", "loss", "heads"]
    assert set(result["missing"]) == {"tasks"}
    written = json.loads((out / "report.json").read_text())
    assert written["summary"] == json.loads(json.dumps(result["summary"]))
    assert "answers" not in written["parts"]["needle-easy"]["result"]
    for name, entry in result["parts"].items():
        assert json.loads((out / "parts" / name / "part.json").read_text()) == json.loads(json.dumps(entry))
        assert entry["command"].startswith("retrofox ")
    assert [line["key"] for line in result["parts"]["recall"]["result"]["lines"]] == ["model", "base", "pi:4"]
    assert result["model_fingerprint"] == model_fingerprint(made["given"]["model"])
