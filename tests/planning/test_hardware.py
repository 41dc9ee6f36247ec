"""Machines by name, by numbers, and the one that is here."""

from __future__ import annotations

import subprocess

import pytest

from retrofox.planning.hardware import hardware, quantity


@pytest.mark.parametrize(
    ("text", "value"),
    [("80G", 80e9), ("79.6GiB", 79.6 * 2**30), ("990T", 990e12), ("2.25e15", 2.25e15), ("24gb", 24e9)],
)
def test_quantities(text, value):
    assert quantity(text) == value


def test_an_unknown_name_or_no_quantity_is_refused():
    for text in ("eighty", "80X", "-3G", "0", "80"):
        with pytest.raises(ValueError, match="is no quantity"):
            quantity(text)
    with pytest.raises(ValueError, match=r"a100-40, .* got 'h900': or give --memory 80G"):
        hardware("h900")


def test_numbers_make_a_machine_without_a_name():
    assert hardware(memory="40G", flops="300T")[1:4] == (40e9, 300e12, True)


def test_the_gpu_that_is_here_is_asked_of_its_driver(monkeypatch):
    told = subprocess.CompletedProcess([], 0, stdout="NVIDIA H200, 143771\n")
    monkeypatch.setattr(subprocess, "run", lambda *given, **options: told)
    found = hardware()
    assert (found.name, found.flops) == ("NVIDIA H200", 989e12)
    assert found.memory == pytest.approx(141e9, rel=0.01)


def test_without_a_driver_it_is_the_cpu(monkeypatch):
    def none(*given, **options):
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", none)
    assert not hardware().gpu
