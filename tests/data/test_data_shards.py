"""Token shards: the tokenizer's own tokens, whole or absent after any interruption, reused until something changed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from retrofox.config import Source
from retrofox.data.encode import Encoder
from retrofox.data.packed import open_tokens
from retrofox.data.shards import prepare_sources
from tests.data.conftest import expected, held, make_text, prepared


class Characters:
    """A tokenizer without a Rust one inside."""

    eos_token_id = 0

    def __len__(self) -> int:
        return 128

    def get_vocab(self) -> dict[str, int]:
        return {chr(n): n for n in range(128)}

    def __call__(self, text: str, **options) -> dict[str, list[int]]:
        return {"input_ids": [min(ord(letter), 127) for letter in text]}


def test_tokenizers_in_python_work_too(tmp_path, texts):
    (tokens,) = open_tokens(prepared([texts[1]], Characters(), tmp_path / "out"))
    assert held(tokens)[0] == [*map(ord, texts[1].read_text()), 0]


@pytest.mark.parametrize("bos", [False, True])
def test_documents_are_the_tokenizers_ids_and_eos_once(tmp_path, texts, bos, make_tokenizer):
    tokenizer = make_tokenizer(bos)
    (tokens,) = open_tokens(prepared([texts[0].parent / "[01].txt"], tokenizer, tmp_path / "out"))
    long = held(tokens)[0]
    assert long == expected(texts[0].read_text(), tokenizer)
    assert len(long) > tokenizer.model_max_length
    assert (long[0] == tokenizer.bos_token_id) is bos
    assert held(tokens)[1] == expected(texts[1].read_text(), tokenizer)


def test_batches_span_files_and_an_unreadable_one_costs_only_itself(tmp_path, texts, tokenizer):
    (texts[0].parent / "2a.jsonl").write_text('{"text": "the fox"}\n{"text": 3}')
    with pytest.raises(ValueError, match=r"2a.jsonl:2: field 'text' must hold text, got int"):
        prepared([texts[0].parent], tokenizer, tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.json"))) == 4  # three shards, and digests.json
    assert not list((tmp_path / "out").glob(".*.tmp"))
    (texts[0].parent / "2a.jsonl").unlink()
    manifest = prepared([texts[0].parent], tokenizer, tmp_path / "out")
    assert (manifest.made, manifest.reused) == (2, 3)


def test_vocabularies_beyond_16_bits_take_32(tmp_path, texts, make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([f"<extra_{n}>" for n in range(66_000)])
    texts[1].write_text("<extra_65999> the fox")
    (tokens,) = open_tokens(prepared([texts[1]], tokenizer, tmp_path / "out"))
    assert tokens.shards[0].dtype == "<u4"
    assert held(tokens)[0][0] == len(tokenizer) - 1


def test_a_second_run_reuses_and_a_changed_file_is_read_again(tmp_path, texts, tokenizer, make_tokenizer):
    out = tmp_path / "out"
    first = prepared([texts[0].parent], tokenizer, out)
    assert (first.made, first.reused) == (5, 0)
    again = prepared([texts[0].parent], tokenizer, out)
    assert (again.made, again.reused) == (0, 5)
    assert again.sources == first.sources
    before = texts[2].stat()
    content = texts[2].read_text()
    texts[2].write_text(content.replace("fox", "sow"))  # the same size and times
    os.utime(texts[2], ns=(before.st_atime_ns, before.st_mtime_ns))
    changed = prepared([texts[0].parent], tokenizer, out)
    assert (changed.made, changed.reused) == (1, 4)
    assert changed.sources[0].fingerprint != first.sources[0].fingerprint
    texts[2].write_text(content)
    assert prepared([texts[0].parent], tokenizer, out).sources == first.sources
    other = make_tokenizer(bos=True)
    assert prepared([texts[0].parent], other, out).made == 5


@pytest.mark.parametrize("damage", [b"", b'{"shard": {}}', b'{"shard": []}', b"\xff"])
def test_a_damaged_note_makes_its_shard_anew(tmp_path, texts, tokenizer, damage):
    first = prepared([texts[0]], tokenizer, tmp_path / "out")
    (tmp_path / "out" / f"{first.sources[0].shards[0].key}.json").write_bytes(damage)
    again = prepared([texts[0]], tokenizer, tmp_path / "out")
    assert (again.made, again.sources) == (1, first.sources)


def test_a_truncated_shard_is_made_again_by_prepare_and_refused_by_open(tmp_path, texts, tokenizer):
    manifest = prepared([texts[0]], tokenizer, tmp_path / "out")
    (shard,) = (tmp_path / "out").glob("*.tokens")
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"instead of .* run `retrofox prepare` again"):
        open_tokens(manifest)
    assert prepared([texts[0]], tokenizer, tmp_path / "out").made == 1


def test_finished_shards_are_read_where_none_can_be_written(tmp_path, texts, tokenizer, monkeypatch):
    first = prepared([texts[0]], tokenizer, tmp_path / "out")
    for module in ("data.shards", "support.report"):
        monkeypatch.setattr(f"retrofox.{module}.why_unwritable", lambda folder: "Permission denied")
    assert prepared([texts[0]], tokenizer, tmp_path / "out").sources == first.sources
    with pytest.raises(ValueError, match=r"data\.cache.*Permission denied"):
        prepared([texts[1]], tokenizer, tmp_path / "out")


KILLED = """
import signal
import time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a process begun in the background has it ignored
from transformers import AutoTokenizer
from retrofox.data import shards, tokenise
from retrofox.config import Source
from retrofox.data.encode import Encoder
call = Encoder.__call__
def slow(self, batch):
    time.sleep(1e-3 if batch[0].name.endswith("0.txt") else 5)
    return call(self, batch)
Encoder.__call__ = slow
tokenise.BATCH_BYTES = 1
tokenizer = AutoTokenizer.from_pretrained({tokenizer!r})
shards.prepare_sources([Source(path={data!r})], tokenizer, {out!r}, progress=False)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_runs_leave_complete_shards_only(tmp_path, texts, tokenizer, how):
    out = tmp_path / "out"
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    code = KILLED.format(tokenizer=str(tmp_path / "tokenizer"), data=str(texts[0].parent), out=str(out))
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    deadline = time.time() + 120
    while not (list(out.glob("*.json")) and list(out.glob(".*.tokens.*.tmp")) and len(list(out.glob("*.tokens"))) == 1):
        assert process.poll() is None
        assert time.time() < deadline
        time.sleep(0.05)
    process.send_signal(how)
    assert process.wait(60) != 0
    assert bool(list(out.glob(".*.tmp"))) == (how == signal.SIGKILL)
    manifest = prepared([texts[0].parent], tokenizer, out)
    assert not list(out.glob(".*.tmp"))
    assert (manifest.made, manifest.reused) == (4, 1)
    (tokens,) = open_tokens(manifest)
    assert held(tokens) == [expected(p.read_text(), tokenizer) for p in texts]


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path, tokenizer, monkeypatch):
    path, plain = tmp_path / "growing.txt", Encoder.__call__
    path.write_text(make_text(1, 50))

    def call(self, batch):
        path.write_text(make_text(1, 60))
        return plain(self, batch)

    monkeypatch.setattr(Encoder, "__call__", call)
    with pytest.raises(ValueError, match=r"growing\.txt changed while it was read"):
        prepared([path], tokenizer, tmp_path / "out")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["digests.json"]  # else a text as before found it
    monkeypatch.undo()
    assert prepared([path], tokenizer, tmp_path / "out").made == 1


@pytest.mark.parametrize(("split", "special", "read"), [(True, [1], "plain text"), (False, [1, 0, 1], "these tokens")])
def test_special_tokens_in_a_text_are_read_as_asked_for_and_counted_also_of_reused_shards(
    tmp_path, tokenizer, capsys, split, special, read
):
    text, file = "the fox</s> forgets <s>what the gate lets go</s>", tmp_path / "a.txt"
    file.write_text(text)
    for _ in range(2):
        made = prepare_sources([Source(path=str(file))], tokenizer, tmp_path / "out", split_special_tokens=split)
        assert f"a.txt: its texts spell out special tokens 3 times: read as {read}" in capsys.readouterr().err
    ids = held(open_tokens(made)[0])[0]
    assert [token for token in ids if token in (0, 1)] == special
    assert tokenizer.decode(ids) == text + "</s>" * split


def test_how_many_texts_have_too_few_words_for_facts_is_said(tmp_path, tokenizer, capsys):
    for name, text in (("few.txt", "12 34 " * 50), ("many.txt", " ".join(f"word{chr(97 + n)}" for n in range(20)))):
        (tmp_path / name).write_text(text)
    source = Source(path=str(tmp_path / "*.txt"), fact_share=1.0)
    summary = prepare_sources([source], tokenizer, tmp_path / "out").summary()
    assert summary["sources"][0]["documents_without_words_for_facts"] == 1
    assert "documents without words for facts (16, of 4-9 letters): 1" in capsys.readouterr().err


def test_a_damaged_memory_of_digests_is_forgotten(tmp_path, texts, tokenizer):
    prepared([texts[1]], tokenizer, tmp_path / "out")
    for damage in ("{", "[]", "null", ""):
        (tmp_path / "out" / "digests.json").write_text(damage)
        assert prepared([texts[1]], tokenizer, tmp_path / "out").reused == 1
