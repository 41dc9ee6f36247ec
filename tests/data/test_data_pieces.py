"""Long texts are tokenised in pieces, many files in one stream: the tokens stay those of each whole text."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from retrofox.config import Source
from retrofox.data import pieces
from retrofox.data.encode import Encoder
from retrofox.data.packed import open_tokens
from retrofox.data.read import Batch
from retrofox.data.shards import prepare_sources

PHRASE = "the fox forgets what the gate lets go, it's 1234567 keys;  and\n\nthe key keeps what it saw: naïve façade\tx"


def make_tokenizer(before: object, special: str) -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = before  # type: ignore[assignment]
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([PHRASE] * 3, trainer)
    inner.post_processor = processors.TemplateProcessing(single=special, special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


def make_text(words: int) -> str:
    rng = np.random.default_rng(words)
    return "".join(rng.choice(PHRASE.split(" "), words).tolist()[i] + " \n "[i % 3] for i in range(words))


@pytest.fixture
def short_pieces(monkeypatch):
    """Pieces of 1000 characters, so that small texts are long ones."""
    monkeypatch.setattr(pieces, "PIECE", 1000)


@pytest.mark.parametrize("special", ["$A", "<s> $A", "<s> $A </s>"])
@pytest.mark.parametrize(
    "before", [pre_tokenizers.ByteLevel(add_prefix_space=False), pre_tokenizers.Metaspace(prepend_scheme="always")]
)
def test_a_long_text_in_pieces_has_the_tokens_of_the_whole(tmp_path, short_pieces, before, special):
    tokenizer = make_tokenizer(before, special)
    texts = {"a": make_text(30), "b": make_text(1500), "c": make_text(900)}
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    kinds = [piece.kind for piece in Encoder(tokenizer).divide(Batch("bytes", [texts["b"].encode()], ["b"], 100))]
    assert kinds[0] == "first piece"
    assert kinds[-1] == "last piece"
    assert len(kinds) > 5
    [prepared] = open_tokens(prepare_sources([Source(path=str(tmp_path))], tokenizer, tmp_path / "out", progress=False))
    assert len(prepared) == 3
    for number, text in enumerate(texts.values()):
        whole = tokenizer(text)["input_ids"]
        assert prepared.document(number).tolist() == (whole if whole[-1] == 1 else [*whole, 1])


def test_a_text_without_safe_places_stays_whole(short_pieces):
    tokenizer = make_tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=False), "$A")
    batch = Batch("bytes", [make_text(3000).translate({32: None, 10: None}).encode()], ["a"], 100)
    assert [piece.kind for piece in Encoder(tokenizer).divide(batch)] == ["bytes"]


def test_a_text_that_its_tokenizer_does_not_divide_stays_whole(short_pieces):
    inner = Tokenizer(models.Unigram())
    special = ["<unk>", "</s>"]
    trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=special, unk_token="<unk>", show_progress=False)
    inner.train_from_iterator([PHRASE] * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    batch = Batch("bytes", [make_text(3000).encode()], ["a"], 100)
    assert [piece.kind for piece in Encoder(tokenizer).divide(batch)] == ["bytes"]


def test_a_long_blank_text_is_empty_and_not_utf8_is_refused(tmp_path, short_pieces):
    tokenizer = make_tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=False), "$A")
    (tmp_path / "a.txt").write_text(" \n" * 9000)
    with pytest.raises(ValueError, match=r"no text in it \(empty documents: 1\): give texts"):
        prepare_sources([Source(path=str(tmp_path))], tokenizer, tmp_path / "out", progress=False)
    (tmp_path / "b.txt").write_bytes(b"word " * 9000 + b"\xff")
    with pytest.raises(ValueError, match=r"b\.txt: not UTF-8 text \(.* at byte 45000\)"):
        prepare_sources([Source(path=str(tmp_path))], tokenizer, tmp_path / "out", progress=False)


def test_shards_before_an_unreadable_file_are_kept(tmp_path):
    tokenizer = make_tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=False), "$A")
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(make_text(50 + number), encoding="utf-8")
    (tmp_path / "2.txt.gz").write_bytes(b"no gzip")
    for workers in (1, 2):
        out = tmp_path / f"_out{workers}"
        with pytest.raises(ValueError, match=r"2\.txt\.gz: can't be read"):
            prepare_sources([Source(path=str(tmp_path))], tokenizer, out, workers=workers, progress=False)
        assert len(list(out.glob("*.tokens"))) == 3
        (tmp_path / "2.txt.gz").rename(tmp_path / "aside")
        manifest = prepare_sources([Source(path=str(tmp_path))], tokenizer, out, workers=workers, progress=False)
        assert (manifest.made, manifest.reused) == (1, 3)
        (tmp_path / "aside").rename(tmp_path / "2.txt.gz")


def test_tokens_changed_in_place_are_made_again_copies_are_kept(tmp_path):
    tokenizer = make_tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=False), "$A")
    (tmp_path / "a.txt").write_text(make_text(50), encoding="utf-8")
    source, out = Source(path=str(tmp_path / "a.txt")), tmp_path / "out"
    prepare_sources([source], tokenizer, out, progress=False)
    shutil.copytree(out, tmp_path / "copy", copy_function=shutil.copyfile)
    assert prepare_sources([source], tokenizer, tmp_path / "copy", progress=False).made == 0
    [tokens] = out.glob("*.tokens")
    content = tokens.read_bytes()
    tokens.write_bytes(content[:-2] + b"\x07\x00")
    assert prepare_sources([source], tokenizer, out, progress=False).made == 1
    assert tokens.read_bytes() == content


def test_shards_inside_the_directory_of_their_texts_are_not_read_as_texts(tmp_path):
    tokenizer = make_tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=False), "$A")
    (tmp_path / "a.txt").write_text(make_text(50), encoding="utf-8")
    for made in (1, 0):
        assert prepare_sources([Source(path=str(tmp_path))], tokenizer, tmp_path / "out", progress=False).made == made
    with pytest.raises(ValueError, match=r"set data\.cache to another directory"):
        prepare_sources([Source(path=str(tmp_path))], tokenizer, tmp_path, progress=False)
