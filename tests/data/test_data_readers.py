"""Every reader gives the same documents, compressed or not, and names what it can't read; datasets."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from retrofox.data.packed import open_tokens
from retrofox.data.windows import documents
from tests.data.conftest import expected, held, make_text, prepared


def zstd(data: bytes) -> bytes:
    half = len(data) // 2  # two frames, as pzstd writes
    return b"".join(pa.compress(part, "zstd", asbytes=True) for part in (data[:half], data[half:]))


def parquet(rows: list[str]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"id": list(range(len(rows))), "text": rows}), sink)
    return sink.getvalue().to_pybytes()


ROWS = ["the fox — “gate”\nnew line", "the key keeps what it saw " * 10, "", "a key"]
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
    assert held(tokens) == wanted
    assert [ids.tolist() for _, ids in documents([path], tokenizer)] == wanted


def test_directories_and_globs_take_known_files_in_order(tmp_path, texts, tokenizer):
    (texts[0].parent / "LICENCE").write_text("not a document")
    (texts[0].parent / ".hidden.txt").write_text("not a document")
    (texts[0].parent / "deep").mkdir()
    (texts[0].parent / "deep" / "z.txt").write_text("a key")
    (tokens,) = open_tokens(prepared([texts[0].parent], tokenizer, tmp_path / "out"))
    assert len(held(tokens)) == 6
    assert held(tokens)[1] == expected(texts[1].read_text(), tokenizer)
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
        assert held(tokens) == wanted
    assert prepared([f"hf:{tmp_path / 'both'}:test"], tokenizer, tmp_path / "out", text_field="body").documents == 3
    with pytest.raises(ValueError, match=r"no field 'text'; the record has .*'body'.*: set text_field"):
        prepared([tmp_path / "saved"], tokenizer, tmp_path / "out")


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


def test_links_to_directories_are_followed_and_circles_are_not(tmp_path, texts, tokenizer):
    folder = texts[0].parent
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "far.txt").write_text("a key far away")
    (folder / "far").symlink_to(tmp_path / "elsewhere")
    (folder / "circle").symlink_to(folder)
    (folder / "lost.txt").symlink_to(tmp_path / "nowhere.txt")
    assert prepared([folder], tokenizer, tmp_path / "out").documents == 6


def test_paths_without_texts_say_what_to_do(tmp_path, tokenizer):
    (tmp_path / "empty").mkdir()
    for name, error, why in (
        ("nowhere", FileNotFoundError, r"no data at .*nowhere"),
        ("*.nothing", FileNotFoundError, r"no data at .*\*\.nothing"),
        ("empty", ValueError, r"no readable file.*\.parquet"),
    ):
        with pytest.raises(error, match=why):
            prepared([tmp_path / name], tokenizer, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": ', "{file}:2: not a line of JSON"),
        ("a.jsonl", b'{"body": "a"}', "{file}:1: no field 'text'; the record has 'body': set text_field"),
        ("a.jsonl", b'{"messages": []}', "no field 'text'; the record has 'messages': chats are read by a recipe"),
        ("a.txt", b"caf\xe9 au lait", "{file}: not UTF-8"),  # with its folder: several may hold such a name
        ("a.txt", b" \n", r"no text in it \(empty documents: 1\): give texts"),
        ("a.jsonl", b"\xef\xbb\xbf\r\n", r"no text in it \(empty documents: 0\): give texts"),
    ],
)
def test_what_can_not_be_read_is_named(tmp_path, tokenizer, name, content, why):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=why.replace("{file}", str(tmp_path / name))):
        prepared([tmp_path / name], tokenizer, tmp_path / "out")
