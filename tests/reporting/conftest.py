"""One small report, measured once, and what it is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from retrofox.reporting import suites
from retrofox.reporting.report import report
from retrofox.reporting.suites import Suite

SMALL = Suite(
    length=512,
    lengths=(400, 512),
    depths=1,
    trials={"easy": 2, "standard": 1},
    documents=3,
    heads_length=64,
    panel_tokens=128,
    chat=2,
)


@pytest.fixture(autouse=True)
def small(monkeypatch) -> None:
    """Every suite is a small one."""
    monkeypatch.setattr(suites, "QUICK_ON_CPU", SMALL)
    monkeypatch.setitem(suites.SUITES, "quick", SMALL)


@pytest.fixture(scope="session")
def made(pico_llama, pico_fox, saved, tmp_path_factory) -> dict[str, Any]:
    """A base, its converted form and texts on disk; the report of them, and its folder."""
    folder = tmp_path_factory.mktemp("made")
    for name, model in (("base", pico_llama()), ("fox", pico_fox())):
        saved(model, folder / name)
    (folder / "texts").mkdir()
    for number, word in enumerate(("gate", "river", "stone")):
        text = f"the {word} forgets the fox, and the fox finds the {word} again. Nobody saw the {word} fall. "
        (folder / "texts" / f"{number}.txt").write_text(text * 30, encoding="utf-8")
    given = {"model": str(folder / "fox"), "against": [str(folder / "base")], "data": [str(folder / "texts")]}
    given |= {"out": str(folder / "out"), "progress": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suites, "QUICK_ON_CPU", SMALL)
        result = report(**given)
    return {"given": given, "result": result, "out": Path(given["out"])}
