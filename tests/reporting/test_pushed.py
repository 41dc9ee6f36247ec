"""What `push` takes of a report: page, JSON and a section of the card, of these weights and no others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import retrofox
from retrofox.hub import push
from retrofox.reporting.pushed import HEADING, report_of, with_section
from retrofox.reporting.report import report


@pytest.fixture
def converted(made, pico_checkpoint, tmp_path) -> Path:
    """A converted directory with a report in it."""
    retrofox.convert(pico_checkpoint, tmp_path / "fox", verify=False)
    report(str(tmp_path / "fox"), progress=False)
    return tmp_path / "fox"


@pytest.fixture
def sent(monkeypatch) -> dict[str, Any]:
    """What a push would commit, by path; the Hub then does not answer."""
    found: dict[str, Any] = {}

    class Api:
        def create_repo(self, repo: str, **options: Any) -> None:
            found.update(options)

        def list_repo_files(self, repo: str) -> list[str]:
            return []

        def repo_info(self, repo: str) -> Any:
            return SimpleNamespace(private=True)

        def create_commit(self, repo: str, operations: Any, **_: Any) -> None:
            found.update({one.path_in_repo: one.path_or_fileobj for one in operations})
            raise OSError("no Hub here")

    monkeypatch.setattr("retrofox.conversion.upload.HfApi", Api)
    return found


def test_a_report_goes_along_and_into_the_card(converted, sent):
    with pytest.raises(OSError, match="no Hub here"):
        push(converted, "me/fox", private=True)
    assert {name for name in sent if name.startswith("report/")} == {"report/report.html", "report/report.json"}
    assert sent["private"] is True
    card = sent["README.md"].decode()
    section = json.loads((converted / "report" / "report.json").read_text())["markdown"]
    assert card.startswith((converted / "README.md").read_text().split("```python")[0])
    assert card.endswith(section)
    assert "[report/report.html](report/report.html)" in section
    assert HEADING not in (converted / "README.md").read_text()  # the one on disk stays as it is


def test_a_report_elsewhere_is_named(converted, sent, tmp_path, run):
    shutil.move(converted / "report", tmp_path / "elsewhere")
    assert report_of(converted) is None
    assert "report/report.html" not in push(converted, "me/fox", dry_run=True)["files"]
    code, printed, err = run("push", converted, "me/fox", "--report", tmp_path / "elsewhere", "--dry-run")
    assert code == 0, err
    assert "report/report.html" in json.loads(printed)["files"]
    with pytest.raises(FileNotFoundError, match="no report in"):
        push(converted, "me/fox", report=tmp_path, dry_run=True)


def test_a_report_of_other_weights_or_a_damaged_one_is_not_pushed(converted, sent):
    place = converted / "report" / "report.json"
    kept = place.read_text()
    config = json.loads((converted / "config.json").read_text())
    (converted / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-4}))
    with pytest.raises(ValueError, match=r"of other weights than those in .*run `retrofox report` again"):
        push(converted, "me/fox", dry_run=True)
    (converted / "config.json").write_text(json.dumps(config))
    for damaged in (kept[:100], "[]", "{}"):
        place.write_text(damaged)
        with pytest.raises(ValueError, match="is damaged"):
            push(converted, "me/fox", dry_run=True)
    place.write_text(kept)
    (converted / "report" / "report.html").unlink()
    with pytest.raises(ValueError, match=r"is damaged .*report\.html"):
        push(converted, "me/fox", dry_run=True)
    assert sent == {}


def test_a_section_takes_the_place_of_an_older_one():
    card = "# A\n\ntext\n"
    once = with_section(card, f"{HEADING}\n\nfirst \\1\n")
    assert once == f"# A\n\ntext\n\n{HEADING}\n\nfirst \\1\n"
    assert "first" not in with_section(once, f"{HEADING}\n\nsecond\n")
    between = with_section(f"{once}\n## Licence\n\nfree\n", f"{HEADING}\n\nsecond\n")
    assert between == f"# A\n\ntext\n\n{HEADING}\n\nsecond\n\n## Licence\n\nfree\n"
