"""Alternatives to a retrofit, made from the base model alone: columns beside it in every measurement.

    pi:4              position interpolation: positions divided by 4           transformers' rope_type "linear"
    ntk:4             dynamic NTK: RoPE's base grows with the text's length    transformers' rope_type "dynamic"
    yarn:4            YaRN                                                     transformers' rope_type "yarn"
    drope             RoPE dropped from every layer, no gates in its place

None of them is trained further. Sources: Chen et al. 2023, arXiv 2306.15595 (pi); bloc97 and emozilla 2023 (ntk); Peng
et al. 2024, arXiv 2309.00071 (yarn).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from typing import Any

from retrofox.anatomy import is_converted
from retrofox.conversion.convert import convert
from retrofox.evaluation.baseline_names import SCALED, Baseline
from retrofox.families import check_supported
from retrofox.fox_spec import FoxSpec
from retrofox.loading.loaded_model import LoadedModel
from retrofox.loading.rope_scaling import set_rope
from retrofox.loading.source import holds_converted


def build(baseline: Baseline, base: LoadedModel) -> LoadedModel:
    """The baseline as a model of its own that shares the base's weights; the base stays as it is.

    Raises:
        ValueError: its family or its RoPE is not one that the baseline can be made of.
    """
    config = base.model.config
    try:
        check_supported(config)
        model = _MAKE[baseline.kind](base.model, baseline)
    except ValueError as error:
        raise ValueError(f"baseline {baseline.text} of {base.name}: {error}") from None
    return LoadedModel(
        model.eval(), base.tokenizer, f"{base.name} + {baseline.label}", f"{base.source} + {baseline.text}"
    )


def _shared(model: Any) -> Any:
    """A copy of a model's modules and config around the same parameters and buffers."""
    tensors = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def _rescaled(base: Any, baseline: Baseline) -> Any:
    model = _shared(base)
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


def _dropped(base: Any, baseline: Baseline) -> Any:
    return convert(base, fox=FoxSpec(rope="drop", gate="none"))


_MAKE: dict[str, Callable[[Any, Baseline], Any]] = {**dict.fromkeys(SCALED, _rescaled), "drope": _dropped}


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
