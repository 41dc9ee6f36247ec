"""Texts and conversations to tokens at the tokenizer's own speed, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from retrofox.data import pieces
from retrofox.data.backend import affixes, backend, special_literals
from retrofox.data.chat import ChatEncoder
from retrofox.data.read import Batch
from retrofox.data.records import conversations_of, texts_of, utf8
from retrofox.data.synthetic_facts import lacks_words

PIECES = ("first piece", "middle piece", "last piece")


@dataclass(frozen=True)
class Reading:
    """How the records of a source become documents: the field, texts or conversations, special tokens split or not."""

    field: str = "text"
    chat: bool = False
    split_special_tokens: bool = True


@dataclass
class Encoded:
    """Tokens of a batch: `tokens` of all its documents in a row, their `lengths`, and how many texts were empty.

    `names` don't tell the folders that files lie in: reports have them.

    `unfinished`: the last document goes on in the next batch (pieces of a long text, see `Encoder.divide`).
    `wordless`: documents with too few words for the made-up facts that were asked for.
    `literals`: special tokens of the tokenizer, such as </s>, that are spelled out in the texts.
    `learnt`: of conversations, 1 at the tokens that the assistant wrote, uint8.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    names: list[str]
    empty: int
    size: int
    unfinished: bool = False
    wordless: int = 0
    literals: int = 0
    learnt: np.ndarray | None = None


class Encoder:
    """Tokens of documents as the tokenizer gives them, its special tokens around them, and its EOS as the last.

    Special tokens that are spelled out in a text, such as </s>, are plain text with `split_special_tokens`.
    Conversations take the form of the tokenizer's chat template instead (`data.chat`).
    """

    def __init__(self, tokenizer: Any, reading: Reading | None = None):
        self.reading = reading or Reading()
        self.literal = special_literals(tokenizer)
        self.eos = tokenizer.eos_token_id
        self.dtype = np.dtype("<u2" if max(tokenizer.get_vocab().values()) < 1 << 16 else "<u4")
        self.tokenizer = tokenizer
        self.chat = ChatEncoder(tokenizer, self.reading.split_special_tokens) if self.reading.chat else None
        self.fast = backend(tokenizer)
        if self.fast is not None:
            self.fast.encode_special_tokens = self.reading.split_special_tokens
        self.affixes = affixes(self.fast)

    def __call__(self, batch: Batch) -> Encoded:
        """Encodes a batch; documents without any text, or anything the assistant says, are counted, not kept.

        Raises:
            ValueError: a record can't be read; the text says which.
        """
        if batch.kind in PIECES:
            tokens = self._piece(batch.items[0], batch.kind)
            names, unfinished = [*map(_label, batch.names)], batch.kind != "last piece"
            literals = self._literals(batch.items)
            return Encoded(tokens, np.array([len(tokens)]), names, 0, batch.size, unfinished, literals=literals)
        if self.chat is not None:
            return self._conversations(batch, self.chat)
        texts, names = texts_of(batch, self.reading.field)
        kept = [number for number, text in enumerate(texts) if text.strip()]
        texts = [texts[number] for number in kept]
        encoded = self._joined(self.encode([batch.augment(text) for text in texts]), [names[n] for n in kept], batch)
        encoded.empty, encoded.literals = len(names) - len(kept), self._literals(texts)
        encoded.wordless = sum(map(lacks_words, texts)) if batch.augment.fact_share else 0
        return encoded

    def _conversations(self, batch: Batch, chat: ChatEncoder) -> Encoded:
        found = conversations_of(batch, self.reading.field)
        made = [chat(one, name) for one, name in zip(found, batch.names, strict=True) if one]
        names = [name for one, name in zip(found, batch.names, strict=True) if one]
        kept = [number for number, (_, learnt) in enumerate(made) if any(learnt)]
        rows = [np.array(made[number][0], dtype=self.dtype) for number in kept]
        encoded = self._joined(rows, [names[number] for number in kept], batch)
        encoded.empty = len(found) - len(kept)
        encoded.literals = self._literals([str(message["content"]) for one in found for message in one])
        encoded.learnt = np.array([mark for number in kept for mark in made[number][1]], dtype=np.uint8)
        return encoded

    def _joined(self, rows: list[np.ndarray], names: list[str], batch: Batch) -> Encoded:
        tokens = np.concatenate(rows) if rows else np.empty(0, dtype=self.dtype)
        lengths = np.array([len(row) for row in rows], dtype=np.int64)
        return Encoded(tokens, lengths, [*map(_label, names)], 0, batch.size)

    def _literals(self, texts: list[str]) -> int:
        """How many special tokens are spelled out in these texts."""
        return 0 if self.literal is None else sum(len(self.literal.findall(text)) for text in texts)

    def divide(self, batch: Batch) -> Iterator[Batch]:
        """The batch itself, or its long texts in pieces that together give the same tokens.

        One thread alone would be busy with a book of many megabytes, and hold many times its size in memory.
        """
        long = batch.kind == "bytes" and max(map(len, batch.items), default=0) > pieces.PIECE
        if not long or batch.augment or self.affixes is None:
            yield batch
            return
        for item, name in zip(batch.items, batch.names, strict=True):
            size = batch.size * len(item) // max(1, sum(map(len, batch.items)))
            text = _whole([utf8(item, name)])[0] if len(item) > pieces.PIECE else ""
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
            options = {"truncation": False, "verbose": False, "split_special_tokens": self.reading.split_special_tokens}
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
