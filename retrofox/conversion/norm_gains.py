"""The gains that added norms start with: each head's RMS on a text, so that a conversion's first logits stay close."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from retrofox.calibration import capture
from retrofox.calibration.source import open_source
from retrofox.calibration.windows import Text, documents_of
from retrofox.data.fixed_text import fixed_tokens
from retrofox.fox_spec import FoxSpec
from retrofox.model.pro import HeadNorm, calibrate_norms
from retrofox.surgery import Plan

WINDOWS, LENGTH = 4, 512
"""Most windows of a calibration text that are read, and tokens in each: gains settle within a few hundred tokens."""


def has_norms(plan: Plan) -> bool:
    """Whether the conversion adds QK-norms or output norms, the Pro parts that don't start as identities."""
    return any(name.endswith(("norm.gain", "norm_fox.gain")) for name in plan.tensors)


def text_tokens(config: Any, tokenizer: Any, files: Sequence[Text] = ()) -> torch.Tensor:
    """(N, T) int64 tokens to measure on: windows of `files`, else a fixed text, else (no tokenizer) seeded noise."""
    longest = min(LENGTH, config.max_position_embeddings)
    if not files or tokenizer is None:
        return fixed_tokens(tokenizer, config.vocab_size, longest)[0]
    documents = documents_of(files, tokenizer)
    found = [ids[start : start + longest] for ids in documents for start in range(0, len(ids), longest)]
    most = max(map(len, found))
    return torch.stack([torch.as_tensor(ids).long() for ids in found if len(ids) == most][:WINDOWS])


def set_gains(model: PreTrainedModel, tokenizer: Any = None, files: Sequence[Text] = ()) -> dict[str, list[float]]:
    """Sets the gains of a live converted model's added norms, in place; returns each norm's RMS per head."""
    tokens = text_tokens(model.config, tokenizer, files).to(model.device)
    return calibrate_norms(model, tokens.split(1))


def gains_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Name -> gain (heads, head_dim) float32 of every added norm."""
    norms = [(name, module) for name, module in model.named_modules() if isinstance(module, HeadNorm)]
    return {f"{name}.gain": module.gain.detach().clone() for name, module in norms}


def measure_gains(
    source: str | Path, spec: FoxSpec, tokenizer: Any, revision: str | None = None
) -> dict[str, torch.Tensor]:
    """Name in the converted model -> gain (heads, head_dim) float32, for every norm that a conversion adds.

    A directory of safetensors is read a layer at a time: in memory are its embeddings, its head and one layer, in
    float32. Other sources are loaded whole.
    """
    opened = open_source(source, spec, revision, None)
    model = opened.model
    hidden, calls = capture.enter(model, text_tokens(model.config, tokenizer))
    gains = {}
    for number, call in enumerate(calls):
        with opened.layer(number) as layer:
            step = _Layer(layer, call)
            calibrate_norms(step, [hidden])
            hidden = step.left
        prefix = f"{model.base_model_prefix}.layers.{number}."
        gains |= {prefix + name: gain for name, gain in gains_of(layer).items()}
    return gains


class _Layer(nn.Module):
    """One decoder layer that is called as a model is; `left` is what left it."""

    def __init__(self, layer: nn.Module, call: capture.LayerCall):
        super().__init__()
        self.layer, self.call = layer, call
        self.left = torch.empty(0)

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> None:
        self.left = capture.through(self.layer, input_ids, self.call)
