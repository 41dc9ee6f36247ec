"""Rows of a set on the Hub, streamed: only the files that hold them are opened; the Hub is a folder here."""

from __future__ import annotations

import pytest

from retrofox.data.packed import open_tokens
from retrofox.data.sources import sliced
from tests.data.conftest import expected, held, make_text, prepared

datasets = pytest.importorskip("datasets")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """org/books: two Parquet files of 300 documents each in train, 3 in validation; returns (texts, folder)."""
    folder = tmp_path / "hub" / "data"
    folder.mkdir(parents=True)
    texts = [make_text(n, 20) for n in range(603)]
    parts = {
        "train-00000-of-00002": (0, 300),
        "train-00001-of-00002": (300, 600),
        "validation-00000-of-00001": (600, 603),
    }
    for name, (start, stop) in parts.items():
        rows = {"body": texts[start:stop], "n": list(range(start, stop))}
        datasets.Dataset.from_dict(rows).to_parquet(folder / f"{name}.parquet")
    real = datasets.load_dataset_builder

    def builder(name, config=None):
        assert name == "org/books"
        return real(str(folder.parent), config)

    monkeypatch.setattr("datasets.load_dataset_builder", builder)
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: pytest.fail("the whole set was asked for"))
    return texts, folder


def test_a_range_of_rows_is_read_and_no_more(hub, tmp_path, tokenizer):
    texts, folder = hub
    (folder / "train-00001-of-00002.parquet").write_bytes(b"not fetched, so not missed")
    manifest = prepared(["hf:org/books:train[10:290]"], tokenizer, tmp_path / "out", text_field="body")
    (tokens,) = open_tokens(manifest)
    wanted = [expected(text, tokenizer) for text in texts[10:290]]
    assert held(tokens) == wanted
    assert (manifest.made, manifest.reused) == (2, 0)


def test_shards_are_reused_and_rows_run_over_files_and_to_the_end(hub, tmp_path, tokenizer):
    texts, _ = hub
    sources = ["hf:org/books:train[:900]", "hf:org/books:default:validation[:2]"]
    manifest = prepared(sources, tokenizer, tmp_path / "out", text_field="body")
    assert (manifest.documents, manifest.reused) == (602, 0)
    train, held_out = open_tokens(manifest)
    assert held(train)[599] == expected(texts[599], tokenizer)
    assert held(held_out)[1] == expected(texts[601], tokenizer)
    again = prepared(sources, tokenizer, tmp_path / "out", text_field="body")
    assert (again.made, again.reused) == (0, manifest.made)
    longer = prepared(["hf:org/books:train[:512]"], tokenizer, tmp_path / "out", text_field="body")
    assert (longer.made, longer.reused) == (0, 2)


def test_another_version_of_the_set_is_tokenised_anew(hub, tmp_path, tokenizer):
    _, folder = hub
    path = "hf:org/books:validation[:3]"
    prepared([path], tokenizer, tmp_path / "out", text_field="body")
    datasets.Dataset.from_dict({"body": ["a fox"]}).to_parquet(folder / "validation-00000-of-00001.parquet")
    manifest = prepared([path], tokenizer, tmp_path / "out", text_field="body")
    assert (manifest.documents, manifest.made) == (1, 1)


def test_bad_slices_and_columns_are_refused(hub, tmp_path, tokenizer):
    for path, message in (
        ("hf:org/books:train[:9]", r"books:train:1: no field 'text'; the record has 'body', 'n': set text_field"),
        ("hf:org/books::dev[:9]", r"can't be loaded: no rows 0 to 9 of a split 'dev'; there are: train"),
        ("hf:org/books:train[9:9]", r"no rows 9 to 9 of a split 'train'"),
    ):
        with pytest.raises(ValueError, match=message):
            prepared([path], tokenizer, tmp_path / "out")


def test_which_splits_are_streamed():
    assert sliced("train[:500]") == ("train", 0, 500)
    assert sliced("train[1_000:2_000]") == ("train", 1000, 2000)
    assert [sliced(split) for split in (None, "train", "train[:10%]", "train[-5:]", "train[5:]")] == [None] * 5
