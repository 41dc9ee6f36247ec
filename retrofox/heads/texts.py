"""Documents on which heads are measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from retrofox.data.sources import Text, as_source
from retrofox.data.windows import documents

TOKENS_READ = 1 << 21
"""Most tokens read of the sources together: a few seconds of tokenising."""


def documents_of(files: Sequence[Text], tokenizer: Any) -> list[np.ndarray]:
    """Documents as tokens, int32, each source giving its first documents up to its weight's share of TOKENS_READ.

    Raises:
        FileNotFoundError: a file that is not there.
        ValueError: no source, no tokenizer, or no text in the sources.
    """
    if not files:
        raise ValueError("no text to measure heads on: name at least one file")
    if tokenizer is None:
        raise ValueError(
            "measuring heads on text needs a tokenizer, and the model has none: put its files beside the model"
        )
    found: list[np.ndarray] = []
    sources = [as_source(file) for file in files]
    weights = sum(source.weight for source in sources)
    for source in sources:
        left = max(1, int(TOKENS_READ * source.weight / weights))
        for _, ids in documents([source], tokenizer):
            found.append(ids[:left])
            left -= len(ids)
            if left <= 0:
                break
    if not any(len(ids) for ids in found):
        raise ValueError(f"no text in {', '.join(source.path for source in sources)}")
    return found
