"""Files of results are whole or not there; lengths are named alike everywhere."""

from __future__ import annotations

import pytest

from retrofox.support.files import write_result
from retrofox.support.plots import tokens_label


def test_a_failing_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    write_result(path, b"old")
    assert path.stat().st_mode & 0o444 == 0o444
    monkeypatch.setattr("os.replace", lambda *paths: (_ for _ in ()).throw(OSError("disk is gone")))
    with pytest.raises(ValueError, match=r"can't write .*results.json: disk is gone; free some disk space"):
        write_result(path, b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]
    assert path.read_text() == "old"


def test_token_counts_are_labelled_as_context_lengths_are_named():
    assert [tokens_label(n) for n in (1, 512, 1000, 1024, 1536, 32768, 1 << 20)] == [
        "1", "512", "1000", "1k", "1.5k", "32k", "1M"
    ]  # fmt: skip
    # a half-life comes back from its gate with a rounding error, and 1000 to 1023 k have four digits
    assert [tokens_label(n) for n in (1023.9, 1048575.1, 1040000.0, 3.5 * 2**20)] == ["1k", "1M", "1016k", "3.5M"]
