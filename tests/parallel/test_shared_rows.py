"""Rows shared by 2 and 4 processes give one process's outputs, losses and gradients to float32 rounding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.model.test_families import ROWS

HERE = Path(__file__).parent
ROUNDING = 3e-5  # of a tensor's greatest value: sums in another order


@pytest.fixture(scope="module")
def run_checks(launch):
    """run_checks(processes) -> name -> figures of every check that so many processes make together."""

    def run(processes: int) -> dict[str, dict[str, float]]:
        families = json.dumps(ROWS if processes == 2 else {})
        done = launch((HERE / "checks.py").read_text(), families, processes=processes)
        assert done.returncode == 0, done.stderr[-4000:]
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        return {line.pop("check"): line for line in lines}

    return run


@pytest.fixture(scope="module")
def two(run_checks) -> dict[str, dict[str, float]]:
    return run_checks(2)


@pytest.fixture(scope="module")
def four(run_checks) -> dict[str, dict[str, float]]:
    return run_checks(4)


def of(found: dict[str, dict[str, float]], kind: str) -> dict[str, dict[str, float]]:
    return {name: figures for name, figures in found.items() if name.startswith(kind)}


def test_the_operator_is_exact(two, four):
    found = {**of(two, "operator"), **of(four, "operator")}
    assert len(found) == 72
    assert {name: f["error"] for name, f in found.items() if not f["error"] < ROUNDING} == {}


def test_losses_and_gradients_are_one_processs(two, four):
    found = {**of(two, "training"), **of(four, "training")}
    assert len(found) == 28
    assert {name: f for name, f in found.items() if not (f["error"] < ROUNDING and f["loss"] < ROUNDING)} == {}
    assert {f["targets"] for f in found.values()} == {126, 122}


def test_positions_that_skip_reach_the_processes(two, four):
    """That losses and gradients are one process's then, too, is among the figures of the test above."""
    assert len([name for name in (*two, *four) if name.endswith("skipping")]) == 4
    for split in ("2x2", "1x4"):
        packed = f"training {split} pro parts, sinks, log-n packed"
        assert abs(four[f"{packed} skipping"]["nats"] - four[packed]["nats"]) > 1


def test_every_family_shares_rows(two):
    found = of(two, "family")
    assert len(found) == 2 * len(ROWS)
    assert {name: f["error"] for name, f in found.items() if not f["error"] < ROUNDING} == {}
