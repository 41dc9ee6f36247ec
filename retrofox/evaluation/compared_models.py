"""The columns of a measurement: the model, those it is compared with, and baselines made of the base, one at a time.

    pi:4              position interpolation: positions divided by 4           transformers' rope_type "linear"
    ntk:4             dynamic NTK: RoPE's base grows with the text's length    transformers' rope_type "dynamic"
    yarn:4            YaRN                                                     transformers' rope_type "yarn"
    drope             RoPE dropped from every layer, no gates in its place

No baseline is trained further. Sources: Chen et al. 2023, arXiv 2306.15595 (pi); bloc97 and emozilla 2023 (ntk); Peng
et al. 2024, arXiv 2309.00071 (yarn).
"""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from retrofox.anatomy import is_converted
from retrofox.conversion.convert import convert
from retrofox.data.windows import require_files
from retrofox.evaluation.names import SCALED, Baseline, parse_all
from retrofox.families import check_supported
from retrofox.fox_spec import FoxSpec
from retrofox.loading.device import check_place
from retrofox.loading.loaded_model import LoadedModel, open_model
from retrofox.loading.rope_scaling import set_rope
from retrofox.loading.source import holds_converted
from retrofox.loading.tokenizers import open_tokenizer, require_same_tokenizer
from retrofox.support.memory import peak_bytes
from retrofox.support.report import check_folder


def build(baseline: Baseline, base: LoadedModel) -> LoadedModel:
    """The baseline as a model of its own that shares the base's weights; the base stays as it is.

    Raises:
        ValueError: its family or its RoPE is not one that the baseline can be made of.
    """
    try:
        check_supported(base.model.config)
        if baseline.kind == "drope":
            model = convert(base.model, fox=FoxSpec(rope="drop", gate="none"))
        else:
            model = _rescaled(base.model, baseline)
    except ValueError as error:
        raise ValueError(f"baseline {baseline.text} of {base.name}: {error}") from None
    name, source = f"{base.name} + {baseline.label}", f"{base.source} + {baseline.text}"
    return LoadedModel(model.eval(), base.tokenizer, name, source)


def _rescaled(base: Any, baseline: Baseline) -> Any:
    """A copy of the modules and the config around the same parameters and buffers, its RoPE scaled."""
    tensors = (*base.parameters(), *base.buffers())
    model = copy.deepcopy(base, {id(tensor): tensor for tensor in tensors})
    set_rope(model, {"rope_type": SCALED[baseline.kind][0], "factor": baseline.factor})
    for module in model.modules():
        if baseline.kind == "ntk" and hasattr(module, "max_seq_len_cached"):
            module.register_forward_pre_hook(_forget_longest)
    return model


def _forget_longest(rotary: Any, arguments: Any) -> None:
    """Before each text: transformers' dynamic RoPE would go on with the frequencies of the longest text so far."""
    for name in vars(rotary):
        if name.endswith("max_seq_len_cached"):
            setattr(rotary, name, 0)


def base_for(baselines: Sequence[Baseline], model: Any, against: Sequence[Any]) -> Any:
    """The source that baselines are made of: the first of `against`, or the model itself if it is unconverted.

    Raises:
        ValueError: that source is converted; said before anything is loaded where it lies on disk.
    """
    base = against[0] if against else model
    if not baselines:
        return base
    converted = holds_converted(os.fspath(base)) if isinstance(base, (str, os.PathLike)) else is_converted(base)
    if converted:
        what = "the first --against" if against else "the model"
        raise ValueError(
            f"baselines are made of the base, and {what} is converted: give the base as the first --against"
        )
    return base


@dataclass
class Comparison:
    """Models that are measured on the same tokens.

    Attributes:
        model: as `open_model` takes it; `others` likewise, the base first.
        baselines: made of the first other, or of the model where there is none; they share its weights.
        tokenizer: the model's.
        place: dtype and device of `open_model`.
    """

    model: Any
    others: list[Any]
    baselines: list[Baseline]
    tokenizer: Any
    place: dict[str, Any]

    def columns(self) -> Iterator[tuple[str, LoadedModel]]:
        """(key, open model) of everything that is measured: model, base, its baselines, further bases.

        No two have the same name. Whoever iterates drops its own reference, so that one model's weights are freed
        before the next one's are loaded.
        """
        names: set[str] = set()

        def named(opened: LoadedModel) -> LoadedModel:
            number, name = 1, opened.name
            while name in names:
                number += 1
                name = f"{opened.name} ({number})"
            names.add(name)
            return replace(opened, name=name)

        for number, source in enumerate([self.model, *self.others]):
            opened = named(open_model(source, tokenizer=self.tokenizer, **self.place))
            yield "model" if number == 0 else "base" if number == 1 else f"base{number}", opened
            if number == min(1, len(self.others)):
                for baseline in self.baselines:
                    yield baseline.text, named(build(baseline, opened))
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
    baselines: Sequence[str | Baseline] = (),
    tokenizer: Any = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> Comparison:
    """What will be compared; refuses, before any weights are loaded, what can't be measured.

    Args:
        against: one model, several or None.
        sources: the texts.
        out: where results go.

    Raises:
        FileNotFoundError: a text that is not there.
        ValueError: results that can't go to `out`, a device, dtype or baseline that can't be, another tokenizer.
    """
    others = list(against) if isinstance(against, (list, tuple)) else [] if against is None else [against]
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
    return Comparison(model, others, wanted, tokenizer, {"dtype": dtype, "device": device})


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
