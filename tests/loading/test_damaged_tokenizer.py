"""A tokenizer file that is cut short, or only a pointer to one, is told before anything is written or uploaded."""

from __future__ import annotations

import pytest

import retrofox

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 17209920\n"
DAMAGED = [
    ("tokenizer.json", '{"version'),
    ("tokenizer.json", POINTER),
    ("tokenizer_config.json", ""),
]


def refused(name: str, ended: tuple[int, str, str]) -> None:
    code, out, err = ended
    lines = err.strip().splitlines()
    assert (code, out) == (2, "")
    assert f"/{name} is damaged, the tokenizer can't be read (" in lines[-1]
    assert sum(line.startswith("error:") for line in lines) == 1
    assert "Traceback" not in err


@pytest.mark.parametrize(("name", "text"), DAMAGED)
@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_converting_refuses_it_and_leaves_nothing(pico_checkpoint, tmp_path, run, name, text, options):
    (pico_checkpoint / name).write_text(text)
    refused(name, run("convert", pico_checkpoint, tmp_path / "out", *options))
    assert list(tmp_path.iterdir()) == [pico_checkpoint]


def test_pushing_refuses_it(pico_checkpoint, tmp_path, run):
    retrofox.convert(pico_checkpoint, tmp_path / "out", verify=False)
    (tmp_path / "out" / "tokenizer.json").write_text(POINTER)
    refused("tokenizer.json", run("push", tmp_path / "out", "me/model", "--dry-run"))
