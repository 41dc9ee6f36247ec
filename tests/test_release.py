"""The release: the wheel built of the sdist holds the whole package and, far from the checkout, converts and runs."""

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
"""Of transformers, beside the one that is here: the oldest that pyproject allows, and two between."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel built of the sdist of the sources, copied: a build leaves folders in the tree it runs in."""
    folder = tmp_path_factory.mktemp("release")
    source, dist = folder / "source", folder / "dist"
    for part in ("retrofox", "kernels/fox_kernels", "recipes"):
        unwanted = shutil.ignore_patterns("__pycache__", "*.pyc")
        shutil.copytree(ROOT / part, source / part, symlinks=True, ignore=unwanted)
    for part in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / part, source / part)
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(dist)!r})"
    done = subprocess.run([sys.executable, "-c", build], capture_output=True, text=True, cwd=source)
    assert done.returncode == 0, done.stderr
    (sdist,) = dist.iterdir()
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    command = [sys.executable, "-m", "pip", "wheel", "-q", *offline, str(sdist), "-w", str(dist)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    (built,) = dist.glob("*.whl")
    return built


def test_the_wheel_holds_every_module_and_recipe_and_nothing_else(wheel):
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    package = ROOT / "retrofox"
    files = [
        *package.rglob("*.py"),
        *package.glob("evaluation/panel-texts/*"),
        package / "reporting" / "report.html.j2",
    ]
    there = {f"retrofox/{file.relative_to(package)}" for file in files}
    kernels = ROOT / "kernels"
    there |= {str(file.relative_to(kernels)) for file in (kernels / "fox_kernels").rglob("*.py")}
    there |= {"retrofox/py.typed", "fox_kernels/py.typed"}
    recipes = ROOT / "recipes"
    there |= {f"retrofox/shipped-recipes/{file.relative_to(recipes)}" for file in recipes.rglob("*.yaml")}
    assert sorted(names) == sorted(there)
    assert wheel.name == f"retrofox-{__version__}-py3-none-any.whl"


@pytest.mark.parametrize("version", [None, *(pytest.param(each, marks=pytest.mark.slow) for each in VERSIONS)])
def test_installed_alone_it_converts_and_generates(wheel, version, pico_checkpoint, tmp_path):
    clean = tmp_path / "clean"
    venv.create(clean, symlinks=True)
    python, program = clean / "bin" / "python", clean / "bin" / "retrofox"
    packages = next(clean.glob("lib/python*/site-packages"))
    pip = [sys.executable, "-m", "pip"]
    if version is not None:
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
    found = run(python, "-c", "import transformers; print(transformers.__version__)").strip()
    assert version in (None, found)
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
