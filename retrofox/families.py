"""The table of supported families: rows, not branches, and what differs between them outside attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from retrofox.model.configuration_fox import SUPPORTED

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_supported(config: Any) -> None:
    """Raises ValueError, listing what is supported, for a config (object or dict) of another family."""
    model_type = config.get("model_type") if isinstance(config, dict) else config.model_type
    if model_type not in SUPPORTED:
        raise ValueError(f"model_type {model_type!r} is not supported; families known: {', '.join(SUPPORTED)}")


def trained_length(config: Any) -> int:
    """The length in tokens that a base model was trained to: before any RoPE scaling stretched it."""
    parameters = getattr(config, "rope_parameters", None) or {}
    original = parameters.get("original_max_position_embeddings") if isinstance(parameters, dict) else None
    return int(original or config.max_position_embeddings)


def inner_model(model: PreTrainedModel) -> torch.nn.Module:
    """The model without its head: the module whose forward returns the last hidden state."""
    return getattr(model, model.base_model_prefix)


def logits_from_hidden(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """Applies the language-model head to hidden states as the model's own forward does.

    logits = cap(scale * W h), where scale and cap are the family's: Granite divides by `logits_scaling`, Cohere
    multiplies by `logit_scale`, Gemma 2 and 3 soft-cap with `final_logit_softcapping`.

    Args:
        hidden: (..., hidden_size), the last hidden state after the final norm, any slice of positions.

    Returns:
        (..., vocabulary) in the head's dtype.
    """
    head = model.get_output_embeddings()
    logits = head(hidden.to(head.weight.dtype))
    for scale in _LOGIT_RULES:
        logits = scale(model.config, logits)
    return logits


def _soft_cap(config: object, logits: torch.Tensor) -> torch.Tensor:
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


def _granite(config: object, logits: torch.Tensor) -> torch.Tensor:
    divisor = getattr(config, "logits_scaling", None)
    return logits if divisor is None else logits / divisor


def _cohere(config: object, logits: torch.Tensor) -> torch.Tensor:
    factor = getattr(config, "logit_scale", None)
    return logits if factor is None else logits * factor


_LOGIT_RULES: tuple[Callable[[object, torch.Tensor], torch.Tensor], ...] = (_granite, _cohere, _soft_cap)
