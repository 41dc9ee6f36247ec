"""What the tests of prepared data share: a tokenizer, texts, and what preparing them should give."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from retrofox.config import Source
from retrofox.data.shards import Manifest, prepare_sources

PHRASE = "the fox forgets what the gate lets go and the key keeps what it saw a while ago"


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., PreTrainedTokenizerFast]:
    """make_tokenizer(bos=False, eos="</s>") -> 300 tokens, bytes and merges of PHRASE; bos: put before each text."""

    def make(bos: bool = False, eos: str | None = "</s>") -> PreTrainedTokenizerFast:
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

    return make


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer) -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="session")
def make_text() -> Callable[[int, int], str]:
    """make_text(seed, words) -> so many words of PHRASE."""

    def make(seed: int, words: int) -> str:
        rng = np.random.default_rng(seed)
        return " ".join(rng.choice(PHRASE.split(), words).tolist())

    return make


@pytest.fixture
def texts(tmp_path, make_text) -> list[Path]:
    """Five text files of different lengths."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number, words in enumerate((300, 7, 40, 12, 90)):
        (folder / f"{number}.txt").write_text(make_text(number, words))
    return sorted(folder.iterdir())


@pytest.fixture(scope="session")
def prepared() -> Callable[..., Manifest]:
    """prepared(paths, tokenizer, out, **options) -> the manifest of those sources."""

    def prepare(paths: list[str | Path], tokenizer, out: Path, **options) -> Manifest:
        return prepare_sources([Source(path=str(path)) for path in paths], tokenizer, out, progress=False, **options)

    return prepare


@pytest.fixture(scope="session")
def expected() -> Callable[..., list[int]]:
    """expected(text, tokenizer) -> the tokens of a document."""

    def tokens(text: str, tokenizer) -> list[int]:
        return [*tokenizer(text, truncation=False, verbose=False)["input_ids"], tokenizer.eos_token_id]

    return tokens
