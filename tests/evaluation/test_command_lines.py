"""The commands that measure hand every option on: none is taken and ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

PLACE = {"device": None, "dtype": None}
NEEDLE = {"depths": 3, "mode": ["easy", "standard"], "trials": 7, "seed": 5, "out": Path("o")}
PANEL = {"quick": True, "length": 1024, "tokens": 4096, "chat": 5, "text_field": "text"}
REPORT = {"length": 4096, "max_documents": 5, "trials": 6, "tasks": ["short", "piqa"]}
REPORT |= {"include_path": "i", "limit": 3, "text_field": "body", "device": "cpu", "dtype": "float32"}


@pytest.mark.parametrize(
    ("words", "function", "given", "options"),
    [
        (
            "needle me/m --data x y --against me/b me/c --lengths 64,128 --depths 3 --mode easy --mode standard "
            "--trials 7 --seed 5 --out o",
            "retrofox.evaluation.needle.needle",
            ("me/m", ["me/b", "me/c"], ["x", "y"], [64, 128]),
            {**NEEDLE, **PLACE, "text_field": "text"},
        ),
        (
            "panel me/m --against me/b --data a=x b=y --out o --quick --length 1Ki --tokens 4Ki --chat 5",
            "retrofox.evaluation.panel.panel",
            ("me/m", "me/b", ["a=x", "b=y"], Path("o")),
            {**PANEL, **PLACE},
        ),
        (
            "report me/m --against me/b me/c --data x y --suite long --out o --length 4Ki --max-documents 5 --trials 6 "
            "--tasks short,piqa --include-path i --limit 3 --text-field body --device cpu "
            "--dtype float32",
            "retrofox.reporting.report.report",
            ("me/m", ["me/b", "me/c"], ["x", "y"], "long", Path("o")),
            REPORT,
        ),
    ],
    ids=["needle", "panel", "report"],
)
def test_every_option_is_handed_on(run, monkeypatch, tmp_path, words, function, given, options):
    monkeypatch.chdir(tmp_path)
    for name in "xy":
        Path(name).write_text("text")
    for name in ("i", "me/m", "me/b", "me/c"):
        Path(name).mkdir(parents=True)
        (Path(name) / "config.json").write_text("{}")
    calls = []
    monkeypatch.setattr(function, lambda *positional, **named: calls.append((positional, named)))
    assert run(*words.split())[0] == 0
    assert calls == [(given, options)]
