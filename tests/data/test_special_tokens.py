"""Special tokens spelled out in a text are plain text, or tokens where that is asked for; how many is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from retrofox.config import Recipe, Source
from retrofox.data.encode import Encoder
from retrofox.data.packed import open_tokens
from retrofox.data.prepare import prepare
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


def test_a_tokenizer_without_a_rust_backend_reads_plain_text_too(tokenizer):
    encoder = Encoder(tokenizer)
    encoder.fast = None
    assert SPECIAL.isdisjoint(encoder.encode([TEXT])[0].tolist()[:-1])


def test_a_recipe_says_how_special_tokens_are_read(file, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    recipe = {
        "model": str(tmp_path / "tokenizer"),
        "output": str(tmp_path / "run"),
        "data": {"train": [str(file)], "cache": str(tmp_path / "out"), "split_special_tokens": False},
        "stages": [{"objective": "extend", "tokens": 100, "batch_tokens": 64, "sequence_length": 16}],
    }
    (source,) = prepare(Recipe.model_validate(recipe), progress=False)["train"]["sources"]
    assert source["special_tokens_spelled_out"] == 3
    assert source["tokens"] == len(tokenizer(TEXT)["input_ids"])
