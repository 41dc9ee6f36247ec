"""The tutorial's own commands and code, in their order, on a pico model in the place of SmolLM2."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from pathlib import Path

import retrofox

ROOT = Path(__file__).parent.parent.parent
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.M | re.S)


def test_the_tutorial_runs_as_it_is_written(pico_checkpoint, run, tmp_path, monkeypatch):
    text = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for part, letters in (("train", 40_000), ("heldout", 4_000)):  # short books: a byte is a token to a pico model
        folder = tmp_path / "examples" / "data" / part
        folder.mkdir(parents=True)
        book = sorted((ROOT / "examples" / "data" / part).glob("*.txt"))[0]
        (folder / book.name).write_text(book.read_text(encoding="utf-8")[:letters], encoding="utf-8")
    ran, printed = [], io.StringIO()
    for kind, title, block in BLOCK.findall(text):
        if kind == "yaml":
            (tmp_path / title).write_text(block)
        elif kind == "python":
            with contextlib.redirect_stdout(printed):
                exec(block, {})
        else:
            for line in block.splitlines():
                command, *arguments = shlex.split(line.replace(MODEL, str(pico_checkpoint)))
                assert command == "retrofox"
                code, _, err = run(*arguments)
                assert code == 0, f"{line}\n{err}"
                ran.append(arguments[0])
    assert ran == ["convert", "convert", "inspect", "plan", "train", "eval", "generate"]
    assert printed.getvalue().startswith("The old house stood")
    spec = retrofox.load("run/model").config.fox
    assert (spec["rope"], spec["rope_factor"]) == ("interpolate", 8)
    lines = {line["key"]: line["mean"] for line in json.loads(Path("results/eval.json").read_text())["lines"]}
    assert set(lines) == {"model", "open", "shuffled", "base", "base2"}
    assert lines["model"] < lines["base2"]
    assert Path("results/per_token_loss.png").is_file()
