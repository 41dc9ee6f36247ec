"""What the tests of evaluations read and run: a few texts, models on disk, evaluations with their everyday options."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from retrofox.evaluation.evaluate import evaluate


@pytest.fixture(scope="session")
def documents(tmp_path_factory) -> list[str]:
    """Three files of unequal length."""
    folder, draw = tmp_path_factory.mktemp("documents"), random.Random(0)
    paths = []
    for number, words in enumerate((60, 90, 25)):
        text = " ".join(draw.choice(["the", "fox", "forgets", "a", "gate", "often"]) for _ in range(words))
        path = folder / f"{number}.txt"
        path.write_text(text, encoding="utf-8")
        paths.append(str(path))
    return paths


@pytest.fixture(scope="session")
def on_disk(pico_llama, pico_fox, saved, tmp_path_factory) -> tuple[str, str]:
    """(base, converted) directories; the conversion is exact: RoPE kept, gates open."""
    folder = tmp_path_factory.mktemp("models")
    exact = pico_fox(stirred=False, rope="keep", init="open", sink_tokens=0)
    base, fox = (saved(model, folder / name) for name, model in (("base", pico_llama()), ("fox", exact)))
    return str(base), str(fox)


@pytest.fixture(scope="session")
def measure(pico_tokenizer, documents) -> Callable[..., Any]:
    """measure(model, against=None, **options): evaluate on the three documents, 64 tokens of each."""
    return partial(evaluate, data=documents, length=64, tokenizer=pico_tokenizer, progress=False)
