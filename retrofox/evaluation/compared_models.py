"""The columns of a measurement, one at a time: the model, the base, further models."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from retrofox.data.windows import require_files
from retrofox.loading.device import resolve_device, resolve_dtype
from retrofox.loading.loaded_model import LoadedModel, open_model
from retrofox.loading.tokenizers import open_tokenizer, require_same_tokenizer
from retrofox.support.report import check_folder


@dataclass
class Comparison:
    """Models that are measured on the same tokens.

    Attributes:
        model: as `open_model` takes it; `others` likewise, the base first.
        tokenizer: the model's.
        place: dtype and device of `open_model`.
    """

    model: Any
    others: list[Any]
    tokenizer: Any
    place: dict[str, Any]

    def open(self, source: Any) -> LoadedModel:
        """One of them, ready to run."""
        return open_model(source, tokenizer=self.tokenizer, **self.place)

    def columns(self) -> Iterator[tuple[str, LoadedModel]]:
        """(key, open model) of everything that is measured: model, base, further bases.

        No two have the same name. Whoever iterates drops its own reference, so that one model's weights are freed
        before the next one's are loaded.
        """
        names: set[str] = set()
        for number, source in enumerate([self.model, *self.others]):
            opened = self.open(source)
            name, alike = opened.name, 1
            while name in names:
                alike += 1
                name = f"{opened.name} ({alike})"
            names.add(name)
            key = "model" if number == 0 else "base" if number == 1 else f"base{number}"
            yield key, replace(opened, name=name)
            opened = None
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def compare(
    model: Any,
    against: Any,
    sources: Sequence[str],
    out: str | os.PathLike | None,
    *,
    tokenizer: Any = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> Comparison:
    """The models to compare; refuses those that can't be measured before any weights are loaded.

    Raises:
        FileNotFoundError: a text that is not there.
        ValueError: results that can't go to `out`, a device or dtype that can't be, another tokenizer.
    """
    others = list(against) if isinstance(against, (list, tuple)) else [] if against is None else [against]
    require_files(sources)
    check_folder(out)
    resolve_device(device)  # raises before texts are read
    resolve_dtype(dtype)
    if tokenizer is None:  # read without the weights
        on_disk = isinstance(model, (str, os.PathLike))
        tokenizer = open_tokenizer(os.fspath(model)) if on_disk else open_model(model).tokenizer
    for other in others:
        require_same_tokenizer(tokenizer, other)
    return Comparison(model, others, tokenizer, {"dtype": dtype, "device": device})
