"""The recipes in the package: all of them, listed, shown and copied by `retrofox recipes`."""

import re
from pathlib import Path

import pytest

from retrofox.config import load_recipe
from retrofox.config.shipped import HOME, copy, named, shipped

ROOT = Path(__file__).parents[2]


def test_the_package_has_every_recipe_and_declares_it_for_the_wheel():
    there = sorted(file.relative_to(ROOT / "recipes") for file in (ROOT / "recipes").rglob("*.yaml"))
    declared = [file for pattern in ("*.yaml", "*/*.yaml") for file in HOME.glob(pattern)]
    assert sorted(file.relative_to(HOME) for file in declared) == there
    assert sorted(Path(f"{name}.yaml") for name in shipped()) == there
    package_data = (ROOT / "pyproject.toml").read_text()
    assert all(f'"{HOME.name}/{pattern}"' in package_data for pattern in ("*.yaml", "*/*.yaml"))


def test_ls_says_what_each_is_for_and_takes(run):
    code, out, _ = run("recipes", "ls")
    assert code == 0
    lines = out.splitlines()
    assert [line.split()[0] for line in lines] == list(shipped())
    stretch = next(line for line in lines if line.startswith("smollm2-stretch"))
    assert re.split(r"  +", stretch)[2:] == ["1 x 80 GB", "5 minutes", "HuggingFaceTB/SmolLM2-135M-Instruct"]
    assert all(len(re.split(r"  +", line)) == 5 for line in lines if not line.startswith("accelerate/"))


def test_show_prints_the_file_itself(run):
    for name in ("smollm2-stretch", "smollm2-stretch.yaml", "recipes/smollm2-stretch.yaml"):
        code, out, _ = run("recipes", "show", name)
        assert (code, out) == (0, (ROOT / "recipes" / "smollm2-stretch.yaml").read_text())


def test_cp_writes_a_recipe_that_loads_and_never_over_another(run, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, out, _ = run("recipes", "cp", "smollm2-lora")
    assert (code, out.strip()) == (0, "smollm2-lora.yaml")
    assert load_recipe(tmp_path / "smollm2-lora.yaml").lora is not None
    (tmp_path / "smollm2-lora.yaml").write_text("mine")
    code, _, err = run("recipes", "cp", "smollm2-lora")
    assert code == 2
    assert "smollm2-lora.yaml exists: remove it or name another file" in " ".join(err.split())
    assert (tmp_path / "smollm2-lora.yaml").read_text() == "mine"
    assert copy("accelerate/ddp", tmp_path / "launch.yaml").read_text() == named("accelerate/ddp").read_text()
    (tmp_path / "folder").mkdir()
    code, out, _ = run("recipes", "cp", "smollm2-control", "folder")
    assert (code, out.strip()) == (0, "folder/smollm2-control.yaml")


def test_an_unknown_name_is_refused_with_the_nearest(run):
    for command in ("show", "cp"):
        code, _, err = run("recipes", command, "smollm2-strecth")
        assert code == 2
        assert "did you mean 'smollm2-stretch'?" in " ".join(err.split())
    with pytest.raises(
        FileNotFoundError,
        match=r"or one of .*smollm2-control, smollm2-fox-paper, smollm2-lora",
    ):
        named("nothing of the kind at all")
