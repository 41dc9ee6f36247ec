"""Special tokens spelled out in a text are plain text, or tokens where that is asked for; how many is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from retrofox.config import Source
from retrofox.data.packed import open_tokens
from retrofox.data.shards import prepare_sources

TEXT = "the fox</s> forgets <s>what the gate lets go</s>"
SPECIAL = {0, 1, 2}


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "a.txt"
    path.write_text(TEXT)
    return path


def document(file: Path, tokenizer, out: Path, **options) -> list[int]:
    return open_tokens(prepare_sources([Source(path=str(file))], tokenizer, out, **options))[0].document(0).tolist()


def test_special_tokens_in_a_text_are_plain_text(file, tokenizer, tmp_path):
    ids = document(file, tokenizer, tmp_path / "out", progress=False)
    assert SPECIAL.isdisjoint(ids[:-1])
    assert tokenizer.decode(ids[:-1]) == TEXT


def test_special_tokens_in_a_text_become_tokens_where_asked_for(file, tokenizer, tmp_path):
    ids = document(file, tokenizer, tmp_path / "out", progress=False, split_special_tokens=False)
    assert ids == tokenizer(TEXT)["input_ids"]
    assert [token for token in ids if token in SPECIAL] == [1, 0, 1]


@pytest.mark.parametrize(("split", "read"), [(True, "plain text"), (False, "these tokens")])
def test_how_many_special_tokens_a_text_spells_out_is_said_also_of_reused_shards(
    file, tokenizer, tmp_path, capsys, split, read
):
    for _ in range(2):
        document(file, tokenizer, tmp_path / "out", split_special_tokens=split)
        assert f"a.txt: its texts spell out special tokens, such as </s>, 3 times: read as {read}" in (
            capsys.readouterr().err
        )
