"""Packed windows: each token once, boundaries kept, shares as weighted."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from retrofox.config import Source, validate
from retrofox.data.packed import PackedDataset
from retrofox.data.prepare import prepare
from retrofox.data.shards import prepare_sources
from retrofox.training.run_directory import claim_data
from tests.data.conftest import expected, make_text, prepared


def test_windows_hold_each_token_once_and_never_cross_documents(tmp_path, texts, tokenizer):
    manifest = prepared([texts[0].parent], tokenizer, tmp_path / "out")
    data = PackedDataset(manifest, 32, seed=3)
    whole = [expected(path.read_text(), tokenizer) for path in texts]
    seen = []
    for index in range(len(data)):
        item = data[index]
        assert {key: item[key].dtype for key in ("input_ids", "labels", "position_ids")} == dict.fromkeys(
            ("input_ids", "labels", "position_ids"), torch.int64
        )
        lengths = item["doc_lengths"].tolist()
        assert sum(lengths) == 32
        for start, length in zip(np.cumsum([0, *lengths[:-1]]), lengths, strict=True):
            part = slice(start, start + length)
            ids, labels = item["input_ids"][part].tolist(), item["labels"][part].tolist()
            assert item["position_ids"][part].tolist() == list(range(length))
            assert labels[0] == -100
            if all(label == -100 for label in labels) and start + length == 32 and set(ids) == {data.filler}:
                continue  # padding
            assert labels[1:] == ids[1:]
            seen.append(ids)
    pieces = [ids[start : start + 32] for ids in whole for start in range(0, len(ids), 32)]
    assert sorted(seen) == sorted(pieces)
    assert data.fill == pytest.approx(sum(map(len, whole)) / (len(data) * 32))


def test_a_run_keeps_to_the_data_it_began_with(tmp_path, texts, tokenizer, make_tokenizer, monkeypatch):
    def claimed(*, again=tokenizer, held_out=True, of=texts[0].parent):
        train = prepared([of], again, tmp_path / "out")
        claim_data(tmp_path / "data.json", train, prepared([texts[1]], again, tmp_path / "out") if held_out else None)

    claimed()
    claimed()
    before = texts[1].read_text()
    texts[1].write_text("other text")
    with pytest.raises(ValueError, match=rf"data under this run changed: {texts[0].parent}, {texts[1]}\. Restore it"):
        claimed()
    texts[1].write_text(before)
    claimed()
    with pytest.raises(ValueError, match=rf"changed: {texts[1]}\. Restore it"):  # the held-out text
        claimed(of=texts[1])
    with pytest.raises(ValueError, match="changed: the tokenizer"):
        claimed(again=make_tokenizer(bos=True))
    with pytest.raises(ValueError, match="changed: the list of sources"):
        claimed(held_out=False)
    monkeypatch.setattr("retrofox.training.run_directory.ORDERING", 3)
    with pytest.raises(ValueError, match="changed: how this version of retrofox packs and orders them"):
        claimed()


def test_weights_are_shares_of_tokens(tmp_path, tokenizer):
    sources = []
    for name, words, files in (("long", 400, 3), ("short", 9, 40), ("tiny", 3, 2)):
        (tmp_path / name).mkdir()
        for number in range(files):
            (tmp_path / name / f"{number}.txt").write_text(make_text(number, words))
        sources.append(Source(path=str(tmp_path / name), weight={"long": 0.2, "short": 0.7, "tiny": 0.1}[name]))
    data = PackedDataset(prepare_sources(sources, tokenizer, tmp_path / "out", progress=False), 64)
    plain = [packing.tokens / len(packing) for packing in data.packings]
    assert max(plain) / min(plain) > 1.2  # windows are filled unequally: shares of windows would not do
    drawn = data.order.take(np.arange(200_000))
    counts = np.bincount(np.searchsorted(data.offsets, drawn, side="right") - 1, minlength=3)
    share = counts * plain / (counts * plain).sum()
    np.testing.assert_allclose(share, [0.2, 0.7, 0.1], atol=2e-4)


def test_prepare_reads_a_recipe(tmp_path, texts, tokenizer, capsys):
    tokenizer.save_pretrained(tmp_path / "tok")
    texts[0].write_text("the fox</s> forgets")
    (tmp_path / "tok" / "config.json").write_text('{"model_type": "llama"}')
    recipe = validate(
        {
            "model": "unused/model",
            "output": str(tmp_path / "run"),
            "data": {
                "train": [str(texts[0]), {"path": str(texts[4]), "weight": 3.0}],
                "eval": [str(texts[2])],
                "tokenizer": str(tmp_path / "tok"),
                "split_special_tokens": False,
                "cache": str(tmp_path / "cache"),
            },
            "stages": [{"objective": "extend", "tokens": 1024, "sequence_length": 32}],
        }
    )
    report = prepare(recipe, progress=False)
    assert report["train"]["documents"] == 2
    assert report["train"]["sources"][0]["special_tokens_spelled_out"] == 1
    assert report["train"]["sources"][0]["tokens"] == len(expected("the fox</s> forgets", tokenizer))
    assert report["eval"]["tokens"] == len(expected(texts[2].read_text(), tokenizer))
    assert 0 < report["train"]["windows"]["32"]["fill"] <= 1
    assert report == json.loads(json.dumps(report))
    again = prepare(recipe)
    assert again["train"]["shards_reused"] == 2
    assert capsys.readouterr().err.count("3 of 3 token shards were in") == 1
