"""Prepared data: every reader, shards that are whole or absent, packed windows, an order that resumes exactly."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from retrofox.config import validate
from retrofox.data import (
    DataSource,
    Manifest,
    PackedDataset,
    StepSampler,
    claim,
    collate,
    documents,
    open_tokens,
    prepare,
    prepare_sources,
)
from retrofox.data_longcrawl64 import unescaped

PHRASE = "the fox forgets what the gate lets go and the key keeps what it saw a while ago"


def make_tokenizer(bos: bool = False, eos: str | None = "</s>") -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>", "<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([PHRASE], trainer)
    if bos:
        inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token=eos, model_max_length=16)


def make_text(seed: int, words: int) -> str:
    rng = np.random.default_rng(seed)
    return " ".join(rng.choice(PHRASE.split(), words).tolist())


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture
def texts(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, words in enumerate((300, 7, 40, 12, 90)):
        (folder / f"{number}.txt").write_text(make_text(number, words))
    return sorted(folder.iterdir())


def prepared(paths: list[str | Path], tokenizer, out: Path, **options) -> Manifest:
    return prepare_sources([DataSource(str(path)) for path in paths], tokenizer, out, progress=False, **options)


def expected(text: str, tokenizer) -> list[int]:
    return [*tokenizer(text, truncation=False, verbose=False)["input_ids"], tokenizer.eos_token_id]


def zstd(data: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard")
    frames = zstandard.ZstdCompressor()
    return frames.compress(data[: len(data) // 2]) + frames.compress(
        data[len(data) // 2 :]
    )  # two frames, as pzstd writes


def parquet(rows: list[str]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"id": list(range(len(rows))), "text": rows}), sink)
    return sink.getvalue().to_pybytes()


ROWS = ["the fox — “gate”\nnew line", make_text(5, 50), "", "a key"]
LINES = "\n".join(json.dumps({"id": 1, "text": row}) for row in ROWS).encode()
PACKERS = {"": lambda data: data, ".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress, ".zst": zstd}


@pytest.mark.parametrize("suffix", PACKERS)
@pytest.mark.parametrize("form", [".txt", ".jsonl", ".json", ".parquet"])
def test_every_form_and_compression_gives_the_same_documents(tmp_path, tokenizer, form, suffix):
    data = {
        ".txt": ROWS[0].encode(),
        ".jsonl": LINES + b"\n\n",
        ".json": json.dumps([{"text": row} for row in ROWS]).encode(),
        ".parquet": parquet(ROWS),
    }[form]
    path = tmp_path / f"data{form}{suffix}"
    path.write_bytes(PACKERS[suffix](data))
    (tokens,) = open_tokens(prepared([path], tokenizer, tmp_path / "out"))
    wanted = [expected(row, tokenizer) for row in (ROWS[:1] if form == ".txt" else ROWS) if row]
    assert [tokens.document(number).tolist() for number in range(len(tokens))] == wanted
    assert [ids.tolist() for _, ids in documents([path], tokenizer)] == wanted


def test_directories_and_globs_take_known_files_in_order(tmp_path, texts, tokenizer):
    (texts[0].parent / "LICENCE").write_text("not a document")
    (texts[0].parent / ".hidden.txt").write_text("not a document")
    (texts[0].parent / "deep").mkdir()
    (texts[0].parent / "deep" / "z.txt").write_text("a key")
    (tokens,) = open_tokens(prepared([texts[0].parent], tokenizer, tmp_path / "out"))
    assert len(tokens) == 6
    assert tokens.document(1).tolist() == expected(texts[1].read_text(), tokenizer)
    manifest = prepared([texts[0].parent / "[0-2].txt"], tokenizer, tmp_path / "out")
    assert (manifest.documents, manifest.made, manifest.reused) == (3, 0, 3)


def test_hugging_face_datasets_from_disk_and_from_files(tmp_path, tokenizer):
    datasets = pytest.importorskip("datasets")
    rows = [make_text(n, 20) for n in range(700)]
    data = datasets.Dataset.from_dict({"body": rows, "n": list(range(700))})
    data.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict({"train": data, "test": data.select(range(3))}).save_to_disk(str(tmp_path / "both"))
    wanted = [expected(row, tokenizer) for row in rows]
    for path in (f"hf:{tmp_path / 'saved'}", str(tmp_path / "saved"), f"hf:{tmp_path / 'both'}:train"):
        (tokens,) = open_tokens(prepared([path], tokenizer, tmp_path / "out", text_field="body"))
        assert [tokens.document(number).tolist() for number in range(len(tokens))] == wanted
    assert prepared([f"hf:{tmp_path / 'both'}:test"], tokenizer, tmp_path / "out", text_field="body").documents == 3
    with pytest.raises(ValueError, match=r"no column 'text'.*body"):
        prepared([tmp_path / "saved"], tokenizer, tmp_path / "out")
    with pytest.raises(ValueError, match="no split 'dev'; there are: train, test"):
        prepared([f"hf:{tmp_path / 'both'}::dev"], tokenizer, tmp_path / "out")
    with pytest.raises(ValueError, match="without splits, and split 'test' was asked for"):
        prepared([f"hf:{tmp_path / 'saved'}:test"], tokenizer, tmp_path / "out")
    with pytest.raises(ValueError, match=r"expected hf:org/name\[:config\]\[:split\]"):
        prepared(["hf:"], tokenizer, tmp_path / "out")


def test_hugging_face_slices_and_names_may_hold_colons(tmp_path, tokenizer, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hub")
    data = datasets.Dataset.from_dict({"text": [make_text(n, 20) for n in range(50)]})
    (tmp_path / "a:b").mkdir()
    data.to_parquet(tmp_path / "a:b" / "train.parquet")
    data.save_to_disk(str(tmp_path / "c:d"))
    assert prepared([f"hf:{tmp_path / 'a:b'}"], tokenizer, tmp_path / "out").documents == 50
    (tmp_path / "a:b").rename(tmp_path / "plain")
    assert prepared([f"hf:{tmp_path / 'plain'}:train[:10%]"], tokenizer, tmp_path / "out").documents == 5
    assert prepared([f"hf:{tmp_path / 'plain'}:default:train[4:6]"], tokenizer, tmp_path / "out").documents == 2
    assert prepared([tmp_path / "c:d"], tokenizer, tmp_path / "out").documents == 50
    (arrow,) = (tmp_path / "c:d").glob("*.arrow")
    arrow.write_bytes(arrow.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"hf:.*c:d: can't be loaded"):
        prepared([tmp_path / "c:d"], tokenizer, tmp_path / "out")


def test_longcrawl64_is_decoded_and_tokenised_again(tmp_path, tokenizer, monkeypatch):
    zarr = pytest.importorskip("zarr")
    numcodecs = pytest.importorskip("numcodecs")
    gpt2 = make_tokenizer(eos=None)  # stands in for GPT-2's: another vocabulary than the one tokenised to
    (tmp_path / "gpt2").mkdir()
    gpt2.backend_tokenizer.save(str(tmp_path / "gpt2" / "tokenizer.json"))
    monkeypatch.setenv("RETROFOX_GPT2_TOKENIZER", str(tmp_path / "gpt2"))
    rows = np.array([gpt2(make_text(n, 120), truncation=False)["input_ids"][:96] for n in range(5)], dtype="<u2")
    rows[3, 50] = gpt2.convert_tokens_to_ids("<|endoftext|>")
    array = zarr.open(
        str(tmp_path / "lc" / "train.zarr"),
        mode="w",
        shape=rows.shape,
        chunks=(2, 32),
        dtype="<u2",
        compressor=numcodecs.Blosc(cname="lz4", clevel=5, shuffle=1),
        zarr_format=2,
    )
    array[:] = rows
    array.attrs["encoder"] = "tiktoken-gpt2"
    pieces = [*rows[:3], rows[3, :50], rows[3, 51:], rows[4]]
    wanted = [str(gpt2.decode(piece.tolist())) for piece in pieces]
    for path in ("lc", "lc/train.zarr"):
        manifest = prepared([f"longcrawl64:{tmp_path / path}"], tokenizer, tmp_path / "out")
        (tokens,) = open_tokens(manifest)
        assert [tokens.document(n).tolist() for n in range(6)] == [expected(text, tokenizer) for text in wanted]
    assert manifest.reused == 3
    (tmp_path / "lc" / "train.zarr" / "1.0").unlink()
    with pytest.raises(ValueError, match=r"1\.0 is missing, but other chunks of documents 2 to 3"):
        prepared([f"longcrawl64:{tmp_path / 'lc'}"], tokenizer, tmp_path / "out")
    for column in (1, 2):
        (tmp_path / "lc" / "train.zarr" / f"1.{column}").unlink()
    assert prepared([f"longcrawl64:{tmp_path / 'lc'}"], tokenizer, tmp_path / "out").documents == 3
    array.attrs["encoder"] = "other"
    with pytest.raises(ValueError, match="encoder is 'other'"):
        prepared([f"longcrawl64:{tmp_path / 'lc'}"], tokenizer, tmp_path / "out")


def test_longcrawl64_is_json_text_and_becomes_plain_text(tmp_path, tokenizer, monkeypatch):
    zarr = pytest.importorskip("zarr")
    gpt2 = make_tokenizer(eos=None)
    gpt2.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    monkeypatch.setenv("RETROFOX_GPT2_TOKENIZER", str(tmp_path))
    text = 'He said "go"\n\n\tto the café \U0001f98a, C:\\new\\u00e9 end'
    ids = gpt2(json.dumps(text)[1:-1], truncation=False, verbose=False)["input_ids"]
    array = zarr.open(
        str(tmp_path / "train.zarr"), mode="w", shape=(1, len(ids)), chunks=(1, 16), dtype="<u2", zarr_format=2
    )
    array[:] = np.array([ids], dtype="<u2")
    (tokens,) = open_tokens(prepared([f"longcrawl64:{tmp_path}"], tokenizer, tmp_path / "out"))
    assert tokens.document(0).tolist() == expected(text, tokenizer)
    chunk = tmp_path / "train.zarr" / "0.1"
    chunk.write_bytes(chunk.read_bytes()[:-3])
    with pytest.raises(ValueError, match="a chunk of documents 0 to 0 can't be read"):
        prepared([f"longcrawl64:{tmp_path}"], tokenizer, tmp_path / "out")


@settings(deadline=None)
@given(
    st.text(alphabet=st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from('\\"/\n\tu0n')), max_size=40)
)
def test_json_form_is_undone_wherever_it_breaks_off(text):
    form = json.dumps(text)[1:-1]
    assert joined(unescaped(form)) == text
    for length in range(len(form)):
        assert text.startswith(joined(unescaped(form[:length])))


def joined(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16")


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
    assert tokens.document(0).tolist() == [*map(ord, texts[1].read_text()), 0]


@pytest.mark.parametrize("bos", [False, True])
def test_documents_are_the_tokenizers_ids_and_eos_once(tmp_path, texts, bos):
    tokenizer = make_tokenizer(bos)
    texts[1].write_text("the fox</s>")
    (tokens,) = open_tokens(prepared([texts[0].parent / "[01].txt"], tokenizer, tmp_path / "out"))
    long = tokens.document(0).tolist()
    assert long == expected(texts[0].read_text(), tokenizer)
    assert len(long) > tokenizer.model_max_length
    assert (long[0] == tokenizer.bos_token_id) is bos
    assert tokens.document(1).tolist() == tokenizer("the fox</s>")["input_ids"]


def test_a_tokenizer_without_eos_appends_nothing(tmp_path, texts):
    tokenizer = make_tokenizer(eos=None)
    (tokens,) = open_tokens(prepared([texts[1]], tokenizer, tmp_path / "out"))
    assert tokens.document(0).tolist() == tokenizer(texts[1].read_text(), truncation=False)["input_ids"]


def test_processes_give_the_same_shards_as_one(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("retrofox.data_shards.IN_PROCESS_BYTES", 0)
    monkeypatch.setattr("retrofox.data_read.BATCH_BYTES", 2000)
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps({"text": make_text(n, 1 + n % 200)}) for n in range(300)))
    one = prepared([path], tokenizer, tmp_path / "one", workers=1)
    three = prepared([path], tokenizer, tmp_path / "three", workers=3)
    assert one.sources[0].shards == three.sources[0].shards
    path.write_text(path.read_text() + '\n{"text": 3}')
    with pytest.raises(ValueError, match=r"data.jsonl:301: field 'text' must hold text, got int"):
        prepared([path], tokenizer, tmp_path / "three", workers=3)
    assert not list((tmp_path / "three").glob(".*.tmp"))


def test_vocabularies_beyond_16_bits_take_32(tmp_path, texts):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([f"<extra_{n}>" for n in range(66_000)])
    texts[1].write_text("<extra_65999> the fox")
    (tokens,) = open_tokens(prepared([texts[1]], tokenizer, tmp_path / "out"))
    assert tokens.shards[0].dtype == "<u4"
    assert tokens.document(0)[0] == len(tokenizer) - 1


def test_a_second_run_reuses_and_a_changed_file_is_read_again(tmp_path, texts, tokenizer):
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
    assert PackedDataset(changed, 16).fingerprint != PackedDataset(first, 16).fingerprint
    texts[2].write_text(content)
    assert (
        PackedDataset(prepared([texts[0].parent], tokenizer, out), 16).fingerprint
        == PackedDataset(first, 16).fingerprint
    )
    other = make_tokenizer(bos=True)
    assert prepared([texts[0].parent], other, out).made == 5


def test_the_manifest_names_what_was_read(tmp_path, texts, tokenizer):
    import hashlib

    manifest = prepared(list(texts[:2]), tokenizer, tmp_path / "out")
    values = json.loads(manifest.path.read_text())
    assert values["tokens"] == sum(len(expected(path.read_text(), tokenizer)) for path in texts[:2])
    assert values["format"] == 1
    assert len(values["tokenizer"]) == 32
    for source, path in zip(values["sources"], texts, strict=False):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert source["files"] == [{"path": str(path), "bytes": path.stat().st_size, "sha256": digest}]
    loaded = Manifest.load(manifest.path)
    assert loaded.sources == manifest.sources


@pytest.mark.parametrize("damage", [b"", b"{}", b'{"shard": {}}', b'{"shard": []}', b"\xff", b"[]"])
def test_a_damaged_note_makes_its_shard_anew(tmp_path, texts, tokenizer, damage):
    first = prepared([texts[0]], tokenizer, tmp_path / "out")
    (tmp_path / "out" / f"{first.sources[0].shards[0].key}.json").write_bytes(damage)
    again = prepared([texts[0]], tokenizer, tmp_path / "out")
    assert (again.made, again.sources) == (1, first.sources)


def test_a_second_run_says_that_there_is_nothing_to_do(tmp_path, texts, tokenizer, capsys):
    source = [DataSource(str(texts[0].parent))]
    prepare_sources(source, tokenizer, tmp_path / "out")
    assert "token shards are in" not in capsys.readouterr().err
    prepare_sources(source, tokenizer, tmp_path / "out")
    said = capsys.readouterr().err
    assert "5 of 5 token shards are in" in said
    assert "nothing to tokenise" in said
    texts[3].write_text("something new")
    prepare_sources(source, tokenizer, tmp_path / "out")
    assert "4 of 5 token shards are in" in capsys.readouterr().err


def test_a_truncated_shard_is_made_again_by_prepare_and_refused_by_open(tmp_path, texts, tokenizer):
    manifest = prepared([texts[0]], tokenizer, tmp_path / "out")
    (shard,) = (tmp_path / "out").glob("*.tokens")
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(ValueError, match=r"instead of .* run `retrofox prepare` again"):
        open_tokens(manifest)
    assert prepared([texts[0]], tokenizer, tmp_path / "out").made == 1


KILLED = """
import sys, time
sys.path.insert(0, {tests!r})
from pathlib import Path
import retrofox.data_shards as shards
from retrofox.data_encode import Encoder
from test_data import DataSource, make_tokenizer
shards.IN_PROCESS_BYTES = 0
call = Encoder.__call__
def slow(self, batch):
    time.sleep(1e-3 if "0.txt" in batch.names else 60)
    return call(self, batch)
Encoder.__call__ = slow
print("ready", flush=True)
shards.prepare_sources([DataSource({data!r})], make_tokenizer(), {out!r}, workers=1, progress=False)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_runs_leave_complete_shards_only(tmp_path, texts, tokenizer, how):
    out = tmp_path / "out"
    code = KILLED.format(tests=str(Path(__file__).parent), data=str(texts[0].parent), out=str(out))
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    deadline = time.time() + 120
    while not (list(out.glob("*.json")) and list(out.glob(".*.tokens.*.tmp")) and len(list(out.glob("*.tokens"))) == 1):
        assert process.poll() is None
        assert time.time() < deadline
        time.sleep(0.05)
    process.send_signal(how)
    assert process.wait(60) != 0
    if how == signal.SIGINT:
        assert not list(out.glob(".*.tmp"))
    manifest = prepared([texts[0].parent], tokenizer, out)
    assert (manifest.made, manifest.reused) == (4, 1)
    assert not list(out.glob(".*.tmp"))
    (tokens,) = open_tokens(manifest)
    assert [tokens.document(n).tolist() for n in range(5)] == [expected(p.read_text(), tokenizer) for p in texts]


def test_a_compressed_file_that_breaks_off_is_refused_wherever_it_does(tmp_path, tokenizer):
    lines = "".join(json.dumps({"text": make_text(n, 40)}) + "\n" for n in range(200)).encode()
    for suffix, packed in PACKERS.items():
        for form in (".jsonl", ".txt"):
            whole, path = packed(lines), tmp_path / f"torn{form}{suffix}"
            for cut in (1, 5, len(whole) // 2) if suffix else ():
                path.write_bytes(whole[:-cut])
                with pytest.raises(ValueError, match=r"torn.* can't be read .*damaged"):
                    prepared([path], tokenizer, tmp_path / "out")


def test_damaged_and_foreign_files_are_named(tmp_path, tokenizer):
    whole = bytearray(parquet([make_text(n, 30) for n in range(2000)]))
    whole[len(whole) // 3] ^= 0xFF
    (tmp_path / "bad.parquet").write_bytes(whole)
    with pytest.raises(ValueError, match=r"bad\.parquet: can't be read"):
        prepared([tmp_path / "bad.parquet"], tokenizer, tmp_path / "out")
    for name in ("a.tar.gz", "a.tgz", "a.zip"):
        (tmp_path / name).write_bytes(b"text")
        with pytest.raises(ValueError, match="is an archive of files: unpack it"):
            prepared([tmp_path / name], tokenizer, tmp_path / "out")
    (tmp_path / "a.txt").write_bytes(gzip.compress(b"the fox"))
    with pytest.raises(ValueError, match="not UTF-8"):
        prepared([tmp_path / "a.txt"], tokenizer, tmp_path / "out")
    (tmp_path / "a.txt").rename(tmp_path / "a.txt.gz")
    assert prepared([tmp_path / "a.txt.gz"], tokenizer, tmp_path / "out").documents == 1
    (tmp_path / "a.txt.gz").rename(tmp_path / "a.txt")  # the same bytes under a name that says otherwise
    with pytest.raises(ValueError, match="not UTF-8"):
        prepared([tmp_path / "a.txt"], tokenizer, tmp_path / "out")


def test_parquet_columns_of_every_kind_of_text(tmp_path, tokenizer):
    text = pa.array(["a key", "the fox", None])
    for number, column in enumerate((text, text.cast(pa.large_string()), text.dictionary_encode())):
        path = tmp_path / f"{number}.parquet"
        pq.write_table(pa.table({"text": column}), path)
        assert prepared([path], tokenizer, tmp_path / "out").documents == 2
    pq.write_table(pa.table({"text": [["a"], ["b"]]}), path)
    with pytest.raises(ValueError, match="must hold text, got list"):
        prepared([path], tokenizer, tmp_path / "out")


def test_links_to_directories_are_followed_and_circles_are_not(tmp_path, texts, tokenizer):
    folder = texts[0].parent
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "far.txt").write_text("a key far away")
    (folder / "far").symlink_to(tmp_path / "elsewhere")
    (folder / "circle").symlink_to(folder)
    (folder / "lost.txt").symlink_to(tmp_path / "nowhere.txt")
    assert prepared([folder], tokenizer, tmp_path / "out").documents == 6


def test_a_damaged_memory_of_digests_is_forgotten(tmp_path, texts, tokenizer):
    prepared([texts[1]], tokenizer, tmp_path / "out")
    for damage in ("{", "[]", ""):
        (tmp_path / "out" / "digests.json").write_text(damage)
        assert prepared([texts[1]], tokenizer, tmp_path / "out").reused == 1


def test_a_prepared_cache_that_is_only_read_serves(tmp_path, texts, tokenizer, monkeypatch):
    first = prepared([texts[0].parent], tokenizer, tmp_path / "out")

    def refuse(*arguments, **options):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("retrofox.data_files.os.replace", refuse)
    assert prepared([texts[0].parent], tokenizer, tmp_path / "out").sources == first.sources
    texts[0].write_text("something new")
    with pytest.raises(ValueError, match=r"can't be written to .*Read-only file system.*set data\.cache"):
        prepared([texts[0].parent], tokenizer, tmp_path / "out")


def test_refusals_say_what_to_do(tmp_path, texts, tokenizer):
    out = tmp_path / "out"
    with pytest.raises(FileNotFoundError, match=r"no data at .*nowhere"):
        prepared([tmp_path / "nowhere"], tokenizer, out)
    with pytest.raises(FileNotFoundError, match="no file matches"):
        prepared([tmp_path / "*.nothing"], tokenizer, out)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no readable file.*\.parquet"):
        prepared([tmp_path / "empty"], tokenizer, out)
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": ')
    with pytest.raises(ValueError, match=r"bad.jsonl:2: not a line of JSON"):
        prepared([tmp_path / "bad.jsonl"], tokenizer, out)
    (tmp_path / "field.jsonl").write_text('{"body": "a"}')
    with pytest.raises(ValueError, match="no field 'text'; the record has 'body': set text_field"):
        prepared([tmp_path / "field.jsonl"], tokenizer, out)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    with pytest.raises(ValueError, match=r"latin.txt: not UTF-8"):
        prepared([tmp_path / "latin.txt"], tokenizer, out)
    (tmp_path / "torn.jsonl.gz").write_bytes(gzip.compress(LINES * 9)[:-20])
    with pytest.raises(ValueError, match=r"torn.jsonl.gz: can't be read .* damaged"):
        prepared([tmp_path / "torn.jsonl.gz"], tokenizer, out)
    (tmp_path / "blank.txt").write_text(" \n")
    with pytest.raises(ValueError, match="no text in it, 1 empty"):
        prepared([tmp_path / "blank.txt"], tokenizer, out)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"can't be written to .*set data.cache"):
        prepared([texts[0]], tokenizer, tmp_path / "file" / "out")


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


def test_collate_gives_boundaries_only_where_rows_hold_several_documents(tmp_path, texts, tokenizer):
    data = PackedDataset(prepared([texts[0].parent], tokenizer, tmp_path / "out"), 32)
    single = [i for i in range(len(data)) if len(data[i]["doc_lengths"]) == 1]
    several = [i for i in range(len(data)) if len(data[i]["doc_lengths"]) > 1]
    assert single
    assert several
    assert set(collate([data[single[0]], data[single[1]]])) == {"input_ids", "labels", "position_ids"}
    batch = collate([data[single[0]], data[several[0]]])
    assert batch["cu_seqlens"].dtype == torch.int32
    assert batch["cu_seqlens"].tolist() == [0, 32, *(32 + data[several[0]]["doc_lengths"].cumsum(0)).tolist()]
    starts = (batch["position_ids"].flatten() == 0).nonzero().flatten().tolist()
    assert batch["cu_seqlens"].tolist()[:-1] == starts


def test_a_loader_goes_on_where_another_world_stopped(tmp_path, texts, tokenizer):
    data = PackedDataset(prepared([texts[0].parent, texts[0]], tokenizer, tmp_path / "out"), 16, seed=7)

    def rows(consumed: int, steps: int, batch: int, world: int, workers: int = 0) -> list[list[int]]:
        loaders = [
            iter(
                torch.utils.data.DataLoader(
                    data,
                    batch_sampler=StepSampler(data.order, batch, consumed, rank, world, steps),
                    num_workers=workers,
                    collate_fn=collate,
                )
            )
            for rank in range(world)
        ]
        return [row for _ in range(steps) for loader in loaders for row in next(loader)["input_ids"].tolist()]

    through = rows(0, 12, batch=4, world=1)
    state = json.loads(json.dumps(data.state(16)))
    consumed = PackedDataset(prepared([texts[0].parent, texts[0]], tokenizer, tmp_path / "out"), 16, seed=7).check(
        state
    )
    assert through == rows(0, 4, batch=2, world=2) + rows(consumed, 16, batch=1, world=2, workers=1)
    with pytest.raises(ValueError, match="seed was 7, now it is 8"):
        PackedDataset(prepared([texts[0].parent, texts[0]], tokenizer, tmp_path / "out"), 16, seed=8).check(state)
    texts[4].write_text("other text")
    with pytest.raises(ValueError, match="data under this run changed: its fingerprint"):
        PackedDataset(prepared([texts[0].parent, texts[0]], tokenizer, tmp_path / "out"), 16, seed=7).check(state)


def test_a_run_keeps_to_the_data_it_began_with(tmp_path, texts, tokenizer):
    def claimed(*, again=tokenizer, held_out=True):
        train = prepared([texts[0].parent], again, tmp_path / "out")
        claim(tmp_path / "data.json", train, prepared([texts[1]], again, tmp_path / "out") if held_out else None)

    claimed()
    claimed()
    before = texts[1].read_text()
    texts[1].write_text("other text")
    with pytest.raises(ValueError, match=rf"data under this run changed: {texts[0].parent}, {texts[1]}\. Restore it"):
        claimed()
    texts[1].write_text(before)
    claimed()
    with pytest.raises(ValueError, match="changed: the tokenizer"):
        claimed(again=make_tokenizer(bos=True))
    with pytest.raises(ValueError, match="changed: the list of sources"):
        claimed(held_out=False)
    (tmp_path / "data.json").write_text("{")
    with pytest.raises(ValueError, match=r"data\.json is damaged"):
        claimed()


def test_weights_are_shares_of_tokens(tmp_path, tokenizer):
    sources = []
    for name, words, files in (("long", 400, 3), ("short", 9, 40), ("tiny", 3, 2)):
        (tmp_path / name).mkdir()
        for number in range(files):
            (tmp_path / name / f"{number}.txt").write_text(make_text(number, words))
        sources.append(DataSource(str(tmp_path / name), {"long": 0.2, "short": 0.7, "tiny": 0.1}[name]))
    data = PackedDataset(prepare_sources(sources, tokenizer, tmp_path / "out", progress=False), 64)
    plain = [plan.tokens / len(plan) for plan in data.plans]
    assert max(plain) / min(plain) > 1.2  # windows are filled unequally: shares of windows would not do
    drawn = data.order.take(np.arange(200_000))
    counts = np.bincount(np.searchsorted(data.offsets, drawn, side="right") - 1, minlength=3)
    share = counts * plain / (counts * plain).sum()
    np.testing.assert_allclose(share, [0.2, 0.7, 0.1], atol=2e-4)


def test_prepare_reads_a_recipe(tmp_path, texts, tokenizer):
    tokenizer.save_pretrained(tmp_path / "tok")
    (tmp_path / "tok" / "config.json").write_text('{"model_type": "llama"}')
    recipe = validate(
        {
            "model": "unused/model",
            "output": str(tmp_path / "run"),
            "data": {
                "train": [str(texts[0]), {"path": str(texts[4]), "weight": 3.0}],
                "eval": [str(texts[2])],
                "tokenizer": str(tmp_path / "tok"),
                "cache": str(tmp_path / "cache"),
            },
            "stages": [{"objective": "extend", "tokens": 1024, "sequence_length": 32}],
        }
    )
    report = prepare(recipe, progress=False)
    assert report["train"]["documents"] == 2
    assert report["eval"]["tokens"] == len(expected(texts[2].read_text(), tokenizer))
    assert 0 < report["train"]["windows"]["32"]["fill"] <= 1
    assert report == json.loads(json.dumps(report))
    again = prepare(recipe, progress=False)
    assert again["train"]["shards_reused"] == 2
