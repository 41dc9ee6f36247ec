"""benchmarks/corpus/manifest.py: it lists documents with the digest of their text, and finds what differs."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import lzma
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "benchmarks" / "corpus" / "manifest.py"


@pytest.fixture
def manifest():
    spec = importlib.util.spec_from_file_location("manifest", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def document(number: int, text: str) -> dict:
    names = {name: f"{name} {number}" for name in ("source", "title", "author", "licence", "group")}
    return {"id": str(number), **names, "tokens": 3, "text": text}


def test_a_line_has_the_digest_in_place_of_the_text(manifest, tmp_path, monkeypatch, capsys):
    file = tmp_path / "dev.jsonl.xz"
    with lzma.open(file, "wt", encoding="utf-8") as lines:
        lines.write("".join(json.dumps(document(n, f"Füchse {n}")) + "\n" for n in range(2)))  # type: ignore[arg-type]
    monkeypatch.setattr("sys.argv", ["manifest.py", str(file)])
    manifest.main()
    printed = capsys.readouterr().out
    rows = [json.loads(line) for line in printed.splitlines()]
    assert [row["id"] for row in rows] == ["0", "1"]
    assert rows[1]["file"] == "dev"
    assert rows[1]["sha256"] == hashlib.sha256("Füchse 1".encode()).hexdigest()
    assert "text" not in rows[1]

    listed = tmp_path / "manifest.jsonl"
    listed.write_text(printed, encoding="utf-8")
    assert manifest.check([file], listed) == []
    rebuilt = tmp_path / "rebuilt.jsonl"
    rebuilt.write_text("".join(json.dumps(document(n, "Füchse 1")) + "\n" for n in (0, 1, 2)), encoding="utf-8")
    assert manifest.check([rebuilt], listed) == ["0: another text", "2: not in the manifest"]
