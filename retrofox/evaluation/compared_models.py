"""The columns of a measurement: the model, those it is compared with, and baselines made of the base, one at a time."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from retrofox.data.windows import require_files
from retrofox.evaluation.baseline_names import Baseline, parse_all
from retrofox.evaluation.baselines import base_for, build
from retrofox.loading.device import check_place
from retrofox.loading.loaded_model import LoadedModel, open_model
from retrofox.loading.tokenizers import open_tokenizer, require_same_tokenizer
from retrofox.support.memory import peak_bytes
from retrofox.support.report import check_folder


def listed_models(against: Any) -> list[Any]:
    """One model, several or None, as a list."""
    if against is None:
        return []
    return list(against) if isinstance(against, (list, tuple)) else [against]


def check_comparison(
    model: Any,
    others: Sequence[Any],
    sources: Sequence[str],
    out: str | os.PathLike | None,
    *,
    baselines: Sequence[str | Baseline] = (),
    tokenizer: Any = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> tuple[list[Baseline], Any]:
    """Refuses, before any weights are loaded, what can't be measured; (the baselines, the model's tokenizer).

    Raises:
        FileNotFoundError: a text that is not there.
        ValueError: results that can't go to `out`, a device, dtype or baseline that can't be, another tokenizer.
    """
    require_files(sources)
    wanted = parse_all(baselines)
    base_for(wanted, model, others)
    check_folder(out)
    check_place(device, dtype)
    if tokenizer is None:  # read without the weights
        named = isinstance(model, (str, os.PathLike))
        tokenizer = open_tokenizer(os.fspath(model)) if named else open_model(model).tokenizer
    for other in others:
        require_same_tokenizer(tokenizer, other)
    return wanted, tokenizer


def columns(
    model: Any, others: Sequence[Any], baselines: Sequence[Baseline], **options: Any
) -> Iterator[tuple[str, LoadedModel]]:
    """(key, open model) of everything that is measured: model, base, its baselines, further bases.

    No two have the same name. Whoever iterates drops its own reference, so that one model's weights are freed before
    the next one's are loaded.

    Args:
        model: as `open_model` takes it, or a `LoadedModel`; `others` likewise.
        baselines: made of the first other, or of the model where there is none; they share its weights.
        options: tokenizer, dtype and device of `open_model`.
    """
    names: set[str] = set()

    def named(opened: LoadedModel) -> LoadedModel:
        number, name = 1, opened.name
        while name in names:
            number += 1
            name = f"{opened.name} ({number})"
        names.add(name)
        return replace(opened, name=name)

    for number, source in enumerate([model, *others]):
        opened = named(source if isinstance(source, LoadedModel) else open_model(source, **options))
        yield "model" if number == 0 else "base" if number == 1 else f"base{number}", opened
        if number == min(1, len(others)):
            for baseline in baselines:
                yield baseline.text, named(build(baseline, opened))
        opened = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


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
