"""What the tests of prepared data share: a tokenizer, texts, and what preparing them should give."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from retrofox.config import Source
from retrofox.data.packed import Tokens
from retrofox.data.shards import Manifest, prepare_sources

PHRASE = "the fox forgets what the gate lets go and the key keeps what it saw a while ago"


@pytest.fixture(scope="session")
def make_tokenizer(pico_tokenizer) -> Callable[..., PreTrainedTokenizerFast]:
    """make_tokenizer(bos=False) -> 300 tokens, bytes and merges of PHRASE; bos: put before each text."""

    def make(bos: bool = False) -> PreTrainedTokenizerFast:
        tokenizer = pico_tokenizer.train_new_from_iterator([PHRASE], 300, show_progress=False)
        tokenizer.model_max_length, tokenizer.chat_template = 16, None
        if bos:
            template = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
            tokenizer.backend_tokenizer.post_processor = template
        return tokenizer

    return make


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer) -> PreTrainedTokenizerFast:
    return make_tokenizer()


def make_text(seed: int, words: int) -> str:
    """So many words of PHRASE."""
    return " ".join(np.random.default_rng(seed).choice(PHRASE.split(), words).tolist())


@pytest.fixture
def texts(tmp_path) -> list[Path]:
    """Five text files of different lengths."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, words in enumerate((300, 7, 40, 12, 90)):
        (folder / f"{number}.txt").write_text(make_text(number, words))
    return sorted(folder.iterdir())


def prepared(paths: list[Any], tokenizer, out: Path, **options) -> Manifest:
    """The manifest of those sources."""
    return prepare_sources([Source(path=str(path)) for path in paths], tokenizer, out, progress=False, **options)


def held(tokens: Tokens) -> list[list[int]]:
    """The tokens of each document of a prepared source."""
    return [tokens.slice(start, stop - start)[0].tolist() for start, stop in pairwise(tokens.bounds.tolist())]


def expected(text: str, tokenizer) -> list[int]:
    """The tokens of a document."""
    return [*tokenizer(text, truncation=False, verbose=False)["input_ids"], tokenizer.eos_token_id]
