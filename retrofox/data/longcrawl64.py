"""LongCrawl64: 6.6 million documents of 65536 GPT-2 tokens each, read block by block and decoded to text again.

The set is one zarr array (format 2) per split, "train.zarr" and "heldout.zarr": uint16, shape (documents, 65536),
chunks 2048 x 2048, Blosc LZ4, with the attribute {"encoder": "tiktoken-gpt2"}. Source: Buckman 2024,
https://manifestai.com/articles/longcrawl64/. What was tokenised is the JSON form of the texts, a newline being a
backslash and an n, so that is undone here (Lin et al. 2025, forgetting_transformer/tokenizer.py, do the same).
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from retrofox.data.files import Digests
from retrofox.data.read import Batch, damaged, needed

GPT2 = "openai-community/gpt2"
GPT2_VARIABLE = "RETROFOX_GPT2_TOKENIZER"
READ_ROWS = 64
_NOT_JSON = re.compile(r'[\x00-\x1f]|(?<!\\)(?:\\\\)*"')
_ESCAPED = re.compile(r'\\(?:u([0-9a-fA-F]{4})|(["\\/bfnrt])|(u[0-9a-fA-F]{0,3})?$)')
_LETTERS = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


@dataclass
class Block:
    """Some rows of the array: one row of its chunks."""

    name: str
    size: int
    path: Path
    start: int
    stop: int

    def identity(self, digests: Digests) -> str:
        """The array's description and the contents of the chunks that hold these rows."""
        files = [digests.of(chunk) for chunk in _chunks(self.path, self.start)]
        return json.dumps(["longcrawl64 unescaped", encoder(self.path), self.stop - self.start, files])

    def batches(self, text_field: str, chat: bool = False) -> Iterator[Batch]:
        """Rows as bytes of little-endian uint16, to be decoded on the tokenising side."""
        array, kind = _open(self.path), f"gpt2:{encoder(self.path)}"
        try:  # all rows: a chunk is decompressed once, not 32 times
            block = np.asarray(array[self.start : self.stop]).astype("<u2")
        except (RuntimeError, ValueError) as error:
            raise ValueError(
                f"{self.path}: a chunk of documents {self.start} to {self.stop - 1} can't be read ({error}): get "
                f"{_chunks(self.path, self.start)[0].name} and its neighbours again"
            ) from error
        step = max(1, READ_ROWS * 1024 // max(1, block.shape[1]))
        for start in range(0, len(block), step):
            rows = block[start : start + step]
            names = [f"{self.name}:{self.start + start + i}" for i in range(len(rows))]
            yield Batch(kind, [row.tobytes() for row in rows], names, rows.nbytes)


def blocks(path: Path) -> Iterator[Block]:
    """The blocks of a zarr directory, or of the train.zarr in a directory: those whose chunks are there.

    A part of the set can be downloaded (all of it is 435 billion tokens): files ROW.0 to ROW.31 are 2048 documents.

    Raises:
        FileNotFoundError: no such directory.
        ValueError: not a LongCrawl64 array; some but not all chunks of a block; the package zarr is missing.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"no directory {path}: give that of train.zarr or heldout.zarr")
    inner = path if (path / ".zarray").is_file() else path / "train.zarr"
    array = _open(inner)
    step = array.chunks[0]
    for start in range(0, array.shape[0], step):
        stop = min(start + step, array.shape[0])
        chunks = _chunks(inner, start)
        there = [chunk for chunk in chunks if chunk.is_file()]
        if not there:
            continue
        if len(there) < len(chunks):
            lost = next(chunk for chunk in chunks if not chunk.is_file())
            raise ValueError(
                f"{lost} is missing, but other chunks of documents {start} to {stop - 1} are there: get it, or remove "
                "those"
            )
        yield Block(inner.stem, (stop - start) * array.shape[1] * 2, inner, start, stop)


def _chunks(path: Path, start: int) -> list[Path]:
    """The chunk files that hold the rows from `start` on."""
    values = _description(path)
    row, separator = start // values["chunks"][0], values.get("dimension_separator", ".")
    return [path / f"{row}{separator}{column}" for column in range(-(-values["shape"][1] // values["chunks"][1]))]


def _description(path: Path) -> dict[str, Any]:
    try:
        return json.loads((path / ".zarray").read_text(encoding="utf-8"))
    except ValueError as error:
        raise damaged(path / ".zarray", error) from error


def _open(path: Path) -> Any:
    zarr = needed("longcrawl64", "zarr")
    array = zarr.open(str(path), mode="r") if (path / ".zarray").is_file() and _description(path) else None
    if array is None or array.ndim != 2 or array.dtype != np.dtype("<u2"):
        found = "" if array is None else f", got {array.dtype} {array.shape}"
        raise ValueError(
            f"{path}: no zarr array of uint16, documents x tokens{found}: give the directory train.zarr or heldout.zarr"
        )
    return array


def encoder(path: Path) -> str:
    """The tokenizer that made the array: GPT-2's, a local copy where RETROFOX_GPT2_TOKENIZER names one."""
    attributes = path / ".zattrs"
    named = json.loads(attributes.read_text(encoding="utf-8")).get("encoder") if attributes.is_file() else None
    if named not in (None, "tiktoken-gpt2"):
        raise ValueError(f"{path}: its encoder is {named!r}; known is 'tiktoken-gpt2'")
    return os.environ.get(GPT2_VARIABLE, GPT2)


@functools.lru_cache(maxsize=2)
def _decoder(name: str) -> Any:
    from tokenizers import Tokenizer

    local = Path(name).expanduser() / "tokenizer.json"
    if local.is_file():
        return Tokenizer.from_file(str(local))
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name, trust_remote_code=False).backend_tokenizer


def decode(kind: str, tokens: bytes) -> list[str]:
    """The text of GPT-2 tokens; an end-of-text token (the last of the vocabulary) separates documents."""
    tokenizer = _decoder(kind.partition(":")[2])
    ids = np.frombuffer(tokens, dtype="<u2")
    end = tokenizer.token_to_id("<|endoftext|>")
    cuts = np.flatnonzero(ids == end) if end is not None else np.empty(0, dtype=np.int64)
    pieces = np.split(ids, cuts)
    pieces = [piece[1:] if number else piece for number, piece in enumerate(pieces)]
    texts = [tokenizer.decode(piece.tolist(), skip_special_tokens=False) for piece in pieces if len(piece)]
    # Rows are cut at 65536 tokens, which may halve a character.
    return [unescaped(text.rstrip("\ufffd")) for text in texts]


def unescaped(text: str) -> str:
    r"""The text whose JSON form this is, up to where it breaks off; one with raw newlines or quotes is no such form.

    \ud83d\ude00 becomes two surrogates, which the encoder joins.
    """
    if _NOT_JSON.search(text):
        return text
    text = _ESCAPED.sub(lambda found: _unescape(*found.groups()), text)
    return text[:-1] if "\ud800" <= text[-1:] <= "\udbff" else text


def _unescape(code: str | None, letter: str | None, torn: str | None) -> str:
    if code is not None:
        return chr(int(code, 16))
    return "" if letter is None else _LETTERS.get(letter, letter)
