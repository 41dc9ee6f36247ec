"""The release as an artefact: the wheel holds the whole package and, far from the checkout, converts and generates."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

from retrofox.version import __version__

ROOT = Path(__file__).parents[1]
VERSIONS = ("5.10.1", "5.17.0", "5.23.0")
"""Of transformers: the oldest that pyproject allows, one between, and the newest that was there."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel that pip builds of the sources, copied: a build leaves folders in the tree it runs in."""
    folder = tmp_path_factory.mktemp("release")
    source = folder / "source"
    for part in ("retrofox", "kernels/fox_kernels", "recipes"):
        unwanted = shutil.ignore_patterns("__pycache__", "*.pyc")
        shutil.copytree(ROOT / part, source / part, symlinks=True, ignore=unwanted)
    for part in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / part, source / part)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", str(source), "-w", str(folder / "dist")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    (built,) = (folder / "dist").iterdir()
    return built


@pytest.mark.slow  # pip fetches setuptools to build with
def test_the_wheel_holds_every_module_and_recipe_and_nothing_else(wheel):
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    there = {f"retrofox/{file.relative_to(ROOT / 'retrofox')}" for file in (ROOT / "retrofox").rglob("*.py")}
    kernels = ROOT / "kernels"
    there |= {str(file.relative_to(kernels)) for file in (kernels / "fox_kernels").rglob("*.py")}
    there |= {"retrofox/py.typed", "fox_kernels/py.typed"}
    recipes = ROOT / "recipes"
    there |= {f"retrofox/shipped-recipes/{file.relative_to(recipes)}" for file in recipes.rglob("*.yaml")}
    assert sorted(names) == sorted(there)
    assert wheel.name == f"retrofox-{__version__}-py3-none-any.whl"


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_installed_alone_it_converts_and_generates(wheel, version, pico_checkpoint, tmp_path):
    clean = tmp_path / "clean"
    venv.create(clean, symlinks=True)
    python, program = clean / "bin" / "python", clean / "bin" / "retrofox"
    packages = next(clean.glob("lib/python*/site-packages"))
    pip = [sys.executable, "-m", "pip"]
    fetched = [*pip, "install", "-q", "--target", packages, f"transformers=={version}"]
    subprocess.run([str(part) for part in fetched], check=True)
    # The rest is taken from here. .pth files in that folder, such as an editable install's, aren't read.
    (packages / "needed.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    def run(*command: object) -> str:
        done = subprocess.run(
            [str(part) for part in command], capture_output=True, text=True, cwd=elsewhere, env=environment
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(*pip, "--python", python, "install", "-q", "--no-deps", "--no-index", wheel)
    where = run(python, "-c", "import fox_kernels, retrofox; print(retrofox.__file__, fox_kernels.__file__)").split()
    assert all(Path(file).is_relative_to(packages) for file in where)
    assert run(python, "-c", "import transformers; print(transformers.__version__)").strip() == version
    assert run(program, "--version").strip() == __version__
    assert "smollm2-stretch" in run(program, "recipes", "ls")
    report = json.loads(run(program, "convert", pico_checkpoint, "converted", "--preset", "fox-llama", "--json"))
    assert report["parity"]["max_difference"] < 1e-3
    assert report["plan"]["spec"]["preset"] == "fox-llama"
    assert run(program, "generate", "converted", "the fox", "--max-new-tokens", 4, "--no-stream").strip()


@pytest.mark.slow  # asks PyPI
@pytest.mark.parametrize(
    "requirement", re.findall(r'"([\w-]+>=[\d.]+,<[\d.]+)"', (ROOT / "pyproject.toml").read_text())
)
def test_no_upper_bound_is_two_releases_behind(requirement):
    wanted = Requirement(requirement)
    command = [sys.executable, "-m", "pip", "index", "versions", wanted.name]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    versions = [Version(each) for each in shown.split("Available versions: ")[1].splitlines()[0].split(", ")]
    (bound,) = (Version(each.version) for each in wanted.specifier if each.operator == "<")
    refused = {version.release[:2] for version in versions if version >= bound}
    assert len(refused) < 2, f"{requirement} is {len(refused)} releases behind: {sorted(refused)}"
