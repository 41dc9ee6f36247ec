"""Opening a model for use: converted or not, from a Hub id, a directory, a .gguf file, an adapter or a live object."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from retrofox.anatomy import causal_lm
from retrofox.loading.base import load_base
from retrofox.loading.converted import load
from retrofox.loading.device import resolve_device, resolve_dtype
from retrofox.loading.source import holds_converted
from retrofox.loading.tokenizers import open_tokenizer


@dataclass
class LoadedModel:
    """A model ready to run, with its tokenizer and the name it goes by in tables."""

    model: PreTrainedModel
    tokenizer: Any
    name: str
    source: str

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def fox(self) -> dict[str, Any] | None:
        """The `fox` section of a converted model's config, None for any other model."""
        return getattr(self.model.config, "fox", None)


def open_model(
    source: str | os.PathLike | PreTrainedModel,
    *,
    tokenizer: Any = None,
    reads_text: bool = True,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> LoadedModel:
    """Opens a converted model or an adapter through `retrofox.load`, any other through `loading.base.load_base`.

    Args:
        source: Hub id, local directory, .gguf file, or a model that is already in memory.
        tokenizer: used instead of the one that lies beside the model.
        reads_text: whether a tokenizer is needed; if not, none is looked for.
        dtype: "float32", "bfloat16", "float16" or a torch dtype; None = bfloat16 on a GPU, float32 on a CPU. A live
            model keeps the dtype it has.
        device: None = the GPU if there is one, else the CPU; a live model then stays where it is.

    Raises:
        FileNotFoundError: a path that does not exist.
        ValueError: an unknown dtype or device, a dtype for a live model, or a model without a tokenizer.
    """
    wanted = resolve_dtype(dtype)
    if not isinstance(source, (str, os.PathLike)):
        if wanted is not None and wanted != next(source.parameters()).dtype:
            raise ValueError(f"a live model keeps its dtype, {next(source.parameters()).dtype}; got dtype {dtype!r}")
        if device is not None:
            source.to(resolve_device(device))  # type: ignore[arg-type]
        label = getattr(source.config, "name_or_path", "") or type(source).__name__
        if tokenizer is None and reads_text:
            tokenizer = open_tokenizer(label)
        return LoadedModel(causal_lm(source).eval(), tokenizer, short_name(label), label)
    text, place = os.fspath(source), resolve_device(device)
    if wanted is None:
        wanted = torch.bfloat16 if place.type == "cuda" else torch.float32
    if tokenizer is None and reads_text:
        tokenizer = open_tokenizer(text)
    if holds_converted(text):
        model = load(text, dtype=wanted, device=place)
    else:
        model, _ = load_base(text, dtype=wanted, device=place)
    # The causal LM itself, adapters in place: a PeftModel's attributes would name the wrong inner model.
    return LoadedModel(causal_lm(model).eval(), tokenizer, short_name(text), text)


def short_name(source: str) -> str:
    """A model's name in tables: the end of its path; RUN for a model that `train` wrote to RUN/model."""
    path = os.path.abspath(source) if os.path.exists(source) else os.path.normpath(source)
    if os.path.basename(path) == "model":
        path = os.path.dirname(path) or path
    return os.path.basename(path) or source
