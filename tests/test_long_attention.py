"""The benchmark of one layer's attention over long rows: its options, tiny rows on a CPU, and a budget that is over."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import long_attention

TINY = ["--heads", "4,2,16", "--warm", "16", "--lengths", "32", "64"]


def test_rows_have_speeds_of_both_ways(tmp_path):
    out = tmp_path / "long.json"
    long_attention.main([*TINY, "--out", str(out)])
    first, second = json.loads(out.read_text())["rows"]
    assert (first["heads"], first["length"], second["length"], first["runs"]) == ([4, 2, 16], 32, 64, 3)
    flops = 2 * 4 * 16 * 32**2
    assert first["forward_tflops"] == pytest.approx(flops / first["forward_seconds"] / 1e12)
    assert first["backward_tflops"] == pytest.approx(2.5 * flops / first["backward_seconds"] / 1e12)


def test_what_takes_too_long_is_left_out():
    rows = long_attention.main([*TINY, "--budget", "1e-9"])["rows"]
    assert "why_not" not in rows[0], "the first length says how long the others take"
    assert rows[1]["why_not"].startswith("would take about 0 s, ")


def test_heads_that_do_not_divide_are_refused(capsys):
    with pytest.raises(SystemExit):
        long_attention.main(["--heads", "4,3,16"])
    assert "key/value heads that divide them" in capsys.readouterr().err
