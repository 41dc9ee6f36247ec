"""Text to tokens at the tokenizer's own speed: the encoder, its pieces of long texts, and a tokenizer's fingerprint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from retrofox.data import pieces
from retrofox.data.backend import affixes, backend, special_literals
from retrofox.data.facts import lacks_words, with_facts
from retrofox.data.longcrawl64 import decode
from retrofox.data.read import Batch

PIECES = ("first piece", "middle piece", "last piece")


@dataclass
class Encoded:
    """Tokens of a batch: `tokens` of all its documents in a row, their `lengths`, and how many texts were empty.

    `names` don't tell the folders that files lie in: reports have them.

    `unfinished`: the last document goes on in the next batch (pieces of a long text, see `Encoder.divide`).
    `wordless`: documents with too few words for the made-up facts that were asked for.
    `literals`: special tokens of the tokenizer, such as </s>, that are spelled out in the texts.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    names: list[str]
    empty: int
    size: int
    unfinished: bool = False
    wordless: int = 0
    literals: int = 0


class Encoder:
    """Tokens of documents as the tokenizer gives them, its special tokens around them, and its EOS as the last.

    Special tokens that are spelled out in a text, such as </s>, are plain text with `split_special_tokens`.
    """

    def __init__(self, tokenizer: Any, text_field: str = "text", split_special_tokens: bool = True):
        self.text_field, self.split_special_tokens = text_field, split_special_tokens
        self.literal = special_literals(tokenizer)
        self.eos = tokenizer.eos_token_id
        self.dtype = np.dtype("<u2" if max(tokenizer.get_vocab().values()) < 1 << 16 else "<u4")
        self.tokenizer = tokenizer
        self.fast = backend(tokenizer)
        if self.fast is not None:
            self.fast.encode_special_tokens = split_special_tokens
        self.affixes = affixes(self.fast)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if self.fast is not None:
            state["tokenizer"], state["fast"] = None, self.fast.to_str()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if state["fast"] is not None:
            from tokenizers import Tokenizer

            self.fast = Tokenizer.from_str(state["fast"])
            self.fast.encode_special_tokens = self.split_special_tokens

    def texts(self, batch: Batch) -> tuple[list[str], list[str]]:
        """The texts of a batch, with made-up facts where it asks for them, and their names.

        Raises:
            ValueError: see `_read`.
        """
        texts, names = self._read(batch)
        return self._told(texts, batch), names

    def _told(self, texts: list[str], batch: Batch) -> list[str]:
        return [with_facts(text, batch.recall, batch.questions) for text in texts] if batch.recall else texts

    def _read(self, batch: Batch) -> tuple[list[str], list[str]]:
        """The texts of a batch and their names.

        Raises:
            ValueError: not UTF-8, not JSON, no such field; the text says which record.
        """
        if batch.kind == "text":
            return batch.items, batch.names
        if batch.kind.startswith("gpt2:"):
            found = [
                (text, name)
                for item, name in zip(batch.items, batch.names, strict=True)
                for text in decode(batch.kind, item)
            ]
            return [text for text, _ in found], [name for _, name in found]
        read = {"bytes": _utf8, "json": self._json}[batch.kind]
        return [read(item, name) for item, name in zip(batch.items, batch.names, strict=True)], batch.names

    def _json(self, line: bytes, name: str) -> str:
        line_text = _utf8(line, name)
        try:
            value = json.loads(line_text)
        except (ValueError, RecursionError) as error:  # RecursionError: thousands of brackets in one another
            raise ValueError(f"{name}: not a line of JSON: {error}") from None
        if not isinstance(value, dict):
            raise ValueError(f"{name}: a record must be a JSON object with a text field, got {type(value).__name__}")
        if self.text_field not in value:
            raise ValueError(
                f"{name}: no field {self.text_field!r}; the record has {', '.join(map(repr, value)) or 'no fields'}: "
                f"set text_field"
            )
        text = value[self.text_field]
        if text is None:
            return ""
        if not isinstance(text, str):
            raise ValueError(f"{name}: field {self.text_field!r} must hold text, got {type(text).__name__}")
        return text

    def __call__(self, batch: Batch) -> Encoded:
        """Encodes a batch; documents without any text are counted, not kept."""
        if batch.kind in PIECES:
            tokens = self._piece(batch.items[0], batch.kind)
            names, unfinished = [*map(_label, batch.names)], batch.kind != "last piece"
            literals = self._literals(batch.items)
            return Encoded(tokens, np.array([len(tokens)]), names, 0, batch.size, unfinished, literals=literals)
        texts, names = self._read(batch)
        kept = [number for number, text in enumerate(texts) if text.strip()]
        texts = [texts[number] for number in kept]
        told = self._told(texts, batch)
        same = [old for old, new in zip(texts, told, strict=True) if new is old]
        wordless = sum(map(lacks_words, same)) if batch.recall else 0
        ids = self.encode(told)
        if ids:
            tokens = np.concatenate(ids)
        else:
            tokens = np.empty(0, dtype=self.dtype)
        lengths = np.array([len(one) for one in ids], dtype=np.int64)
        kept_names = [_label(names[number]) for number in kept]
        empty, literals = len(names) - len(kept), self._literals(texts)
        return Encoded(tokens, lengths, kept_names, empty, batch.size, wordless=wordless, literals=literals)

    def _literals(self, texts: list[str]) -> int:
        """How many special tokens are spelled out in these texts."""
        return 0 if self.literal is None else sum(len(self.literal.findall(text)) for text in texts)

    def divide(self, batch: Batch) -> Iterator[Batch]:
        """The batch itself, or its long texts in pieces that together give the same tokens.

        One process alone would be busy with a book of many megabytes, and hold many times its size in memory.
        """
        if (
            batch.recall
            or batch.kind != "bytes"
            or max(map(len, batch.items), default=0) <= pieces.PIECE
            or self.affixes is None
        ):
            yield batch
            return
        for item, name in zip(batch.items, batch.names, strict=True):
            size = batch.size * len(item) // max(1, sum(map(len, batch.items)))
            text = _whole([_utf8(item, name)])[0] if len(item) > pieces.PIECE else ""
            places = [0, *pieces.cuts(text, self._plain), len(text)]
            if len(places) == 2 or not text.strip():
                yield Batch(batch.kind, [item], [name], size)
                continue
            kinds = ["first piece", *["middle piece"] * (len(places) - 3), "last piece"]
            for kind, start, stop in zip(kinds, places, places[1:], strict=False):
                yield Batch(kind, [text[start:stop]], [name], size * (stop - start) // len(text))

    def _plain(self, text: str) -> list[int]:
        return self.fast.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _piece(self, text: str, kind: str) -> np.ndarray:
        assert self.affixes is not None
        before, after = self.affixes
        ids = self._plain(text)
        if kind == "first piece":
            ids = before + ids
        if kind == "last piece":
            ids = self._ended(ids + after)
        return np.array(ids, dtype=self.dtype)

    def _ended(self, ids: list[int]) -> list[int]:
        return ids if self.eos is None or ids[-1:] == [self.eos] else [*ids, self.eos]

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Tokens of each text, EOS last, as the smallest unsigned integers that hold the vocabulary."""
        if self.fast is not None:
            rows = [encoding.ids for encoding in self.fast.encode_batch_fast(_whole(texts))]
        else:
            options = {"truncation": False, "verbose": False, "split_special_tokens": self.split_special_tokens}
            rows = [self.tokenizer(text, **options)["input_ids"] for text in _whole(texts)]
        return [np.array(self._ended(ids), dtype=self.dtype) for ids in rows]


def _whole(texts: list[str]) -> list[str]:
    """Lone surrogates, legal in JSON, are no Unicode text: replaced as decoding would."""
    return [
        text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in texts
    ]


def _label(name: str) -> str:
    """a.jsonl:3 of books/a.jsonl:3."""
    return name.rpartition("/")[2]


def _utf8(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{name}: not UTF-8 text ({error.reason} at byte {error.start}): convert or remove it"
        ) from None
