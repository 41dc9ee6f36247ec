"""Texts and conversations to tokens at the tokenizer's own speed, batch by batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from retrofox.config import Source
from retrofox.data.backend import backend, special_literals, valid_unicode
from retrofox.data.chat import ChatEncoder
from retrofox.data.read import Record
from retrofox.data.synthetic_facts import lacks_words, with_facts

MESSAGES = "messages"
"""The field of conversations where none is named."""


@dataclass(frozen=True)
class Reading:
    """How records become documents: the field, texts or conversations, special tokens split or not, made-up facts."""

    field: str = "text"
    chat: bool = False
    split_special_tokens: bool = True
    fact_share: float = 0.0
    questions: float = 0.0

    @classmethod
    def of(cls, source: Source, text_field: str = "text", split_special_tokens: bool = True) -> Reading:
        """That of a source; its own text_field goes before `text_field`."""
        field = source.text_field or (MESSAGES if source.chat else text_field)
        facts = source.fact_share or 0.0
        return cls(field, source.chat, split_special_tokens, facts, (source.questions or 0.0) if facts else 0.0)


class Encoded(NamedTuple):
    """Tokens of a document, none where it holds no text, or nothing that the assistant says.

    `learnt`: of a conversation, 1 at the tokens that the assistant wrote, uint8.
    `literals`: special tokens of the tokenizer, such as </s>, that are spelled out in the text.
    `untold`: whether facts are wanted, and it has too few words for any.
    """

    tokens: np.ndarray
    learnt: np.ndarray | None = None
    literals: int = 0
    untold: bool = False


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

    def __call__(self, records: Sequence[Record]) -> list[Encoded]:
        """Encodes documents, on the tokenizer's threads; ValueError names a conversation that the template refuses."""
        if self.chat is not None:
            return [self._conversation(record, self.chat) for record in records]
        texts = [record.value for record in records]
        share, questions = self.reading.fact_share, self.reading.questions
        filled = [number for number, text in enumerate(texts) if text.strip()]
        found = [Encoded(np.empty(0, dtype=self.dtype))] * len(texts)
        told = [with_facts(texts[n], share, questions) if share else texts[n] for n in filled]
        for number, tokens in zip(filled, self.encode(told), strict=True):
            untold = share > 0 and lacks_words(texts[number])
            found[number] = Encoded(tokens, literals=self._literals(texts[number]), untold=untold)
        return found

    def _conversation(self, record: Record, chat: ChatEncoder) -> Encoded:
        ids, learnt = chat(record.value, record.name) if record.value else ([], [])
        if not any(learnt):
            ids, learnt = [], []
        literals = sum(self._literals(str(message["content"])) for message in record.value)
        return Encoded(np.array(ids, dtype=self.dtype), np.array(learnt, dtype=np.uint8), literals)

    def _literals(self, text: str) -> int:
        """How many special tokens are spelled out in a text."""
        return len(self.literal.findall(text))

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Tokens of each text, EOS last, as the smallest unsigned integers that hold the vocabulary."""
        whole = [valid_unicode(text) for text in texts]
        if self.fast is not None:
            rows = [encoding.ids for encoding in self.fast.encode_batch_fast(whole)]
        else:
            options = {"truncation": False, "verbose": False, "split_special_tokens": self.reading.split_special_tokens}
            rows = [self.tokenizer(text, **options)["input_ids"] for text in whole]
        if self.eos is not None:
            rows = [ids if ids[-1:] == [self.eos] else [*ids, self.eos] for ids in rows]
        return [np.array(ids, dtype=self.dtype) for ids in rows]
