"""The columns of a measurement: the model, those it is compared with, and baselines made of the base, one at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from retrofox.evaluation.baselines import Baseline, build
from retrofox.loading.loaded_model import LoadedModel, open_model
from retrofox.loading.tokenizers import open_tokenizer
from retrofox.support.memory import peak_bytes


def listed_models(against: Any) -> list[Any]:
    """One model, several or None, as a list."""
    if against is None:
        return []
    return list(against) if isinstance(against, (list, tuple)) else [against]


def tokenizer_of(model: Any) -> Any:
    """The tokenizer of a model on disk or on the Hub, without its weights, or that of a live one."""
    named = isinstance(model, (str, os.PathLike))
    return open_tokenizer(os.fspath(model)) if named else open_model(model).tokenizer


def columns(
    model: Any, others: Sequence[Any], baselines: Sequence[Baseline], **options: Any
) -> Iterator[tuple[str, LoadedModel]]:
    """(key, open model) of everything that is measured: model, base, its baselines, further bases.

    Args:
        model: as `open_model` takes it, or an `LoadedModel` one; `others` likewise.
        baselines: made of the first other, or of the model where there is none; they share its weights.
        options: tokenizer, dtype and device of `open_model`.
    """
    for number, source in enumerate([model, *others]):
        opened = source if isinstance(source, LoadedModel) else open_model(source, **options)
        yield "model" if number == 0 else "base" if number == 1 else f"base{number}", opened
        if number == min(1, len(others)):
            for baseline in baselines:
                yield baseline.text, build(baseline, opened)
        opened = None


def of_run(opened: LoadedModel, tokens: int, seconds: float) -> dict[str, Any]:
    """What reports say of a column beside its figures: where it came from, what it ran in, speed and peak memory."""
    return {
        "source": opened.source,
        "dtype": str(next(opened.model.parameters()).dtype).removeprefix("torch."),
        "device": str(opened.device),
        "fox": opened.fox,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "peak_memory_bytes": peak_bytes(opened.device),
    }
