"""Starting values that are measured on the base: gains of added norms, half-lives of gates."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from retrofox.anatomy import attentions
from retrofox.conversion.verify import LARGEST_IN_FLOAT32, fixed_tokens
from retrofox.data.sources import Text
from retrofox.half_lives import bias_from_half_life
from retrofox.heads.start import Start, measure_start
from retrofox.loading.base import load_base
from retrofox.loading.device import resolve_device
from retrofox.loading.tokenizers import tokenizer_of_live
from retrofox.model.modeling_fox import HeadNorm
from retrofox.surgery import Plan, apply

LENGTH = 512
"""Tokens of the fixed text that are read, at most: gains settle within a few hundred."""


def is_measured(plan: Plan) -> bool:
    """Whether some of a conversion's tensors start with measured values."""
    return plan.own_gates is None and (has_norms(plan) or plan.spec.init == "measured")


def has_norms(plan: Plan) -> bool:
    """Whether the conversion adds QK-norms or output norms, the Pro parts that don't start as identities."""
    return any(name.endswith(("norm.gain", "norm_fox.gain")) for name in plan.tensors)


def measured_values(
    base: str | Path | PreTrainedModel, plan: Plan, texts: Sequence[Text]
) -> tuple[dict[str, torch.Tensor], Start | None]:
    """Name in the converted model -> measured starting value, and what was measured of the heads.

    A base on disk is loaded for it, on the GPU if there is one, in float32 as for the parity proof. With init
    "measured" the plan's `open_heads` become the heads that were found.
    """
    if not is_measured(plan):
        return {}, None
    if isinstance(base, PreTrainedModel):
        model, tokenizer = apply(base, plan), tokenizer_of_live(base)
    else:
        loaded, tokenizer = load_base(base)
        loaded = loaded.float() if loaded.num_parameters() <= LARGEST_IN_FLOAT32 else loaded
        model = apply(loaded.to(resolve_device(None)), plan)  # type: ignore[arg-type]
    start = set_measured(model, plan, tokenizer, texts)
    found = {f"{name}.gain": module.gain for name, module in model.named_modules() if isinstance(module, HeadNorm)}
    if start is not None:
        found |= {f"{name}.forget_gate.bias": attention.forget_gate.bias for name, attention in attentions(model)}
    return {name: value.detach().cpu().clone() for name, value in found.items()}, start


def set_measured(model: PreTrainedModel, plan: Plan, tokenizer: Any, texts: Sequence[Text]) -> Start | None:
    """Sets the measured starting values of a live converted model, in place; returns what was measured of the heads."""
    if has_norms(plan):
        tokens, _ = fixed_tokens(tokenizer, model.config.vocab_size, min(LENGTH, model.config.max_position_embeddings))
        set_norm_gains(model, tokens.to(model.device))
    if plan.spec.init != "measured":
        return None
    start = measure_start(model, tokenizer, texts)
    plan.spec.open_heads = tuple(start.open_heads)
    plan.config.fox = model.config.fox = plan.spec.to_dict()
    for (_, attention), half_lives in zip(attentions(model), start.half_lives, strict=True):
        bias = attention.forget_gate.bias  # type: ignore[union-attr]
        bias.data.copy_(torch.tensor([bias_from_half_life(x) for x in half_lives]))
        attention.bound_gates(plan.spec)
    return start


@torch.no_grad()
def set_norm_gains(model: torch.nn.Module, input_ids: torch.Tensor) -> None:
    """Sets the gain of every added norm to the RMS its heads have on a text, so that normed states keep their size.

    All norms stand aside meanwhile.

    Args:
        input_ids: (B, T) int64, without padding; a few hundred tokens are enough.
    """
    norms = [module for module in model.modules() if isinstance(module, HeadNorm)]
    rms: dict[torch.nn.Module, torch.Tensor] = {}

    def aside(norm: torch.nn.Module, given: tuple[torch.Tensor, ...], _: torch.Tensor) -> torch.Tensor:
        rms[norm] = given[0].double().square().mean((0, 1, 3)).sqrt()
        return given[0]

    with contextlib.ExitStack() as after:
        after.callback(model.train, model.training)
        for norm in norms:
            after.enter_context(norm.register_forward_hook(aside))
        model.eval()(input_ids=input_ids, use_cache=False)
    for norm in norms:
        norm.gain.copy_(rms[norm][:, None].to(norm.gain).expand_as(norm.gain))
