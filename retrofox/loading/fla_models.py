"""Causal LMs of flash-linear-attention (HGRN2, DeltaNet, ...): columns to compare with, where that is installed."""

from __future__ import annotations

import importlib.util
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

KNOWN = ("delta_net", "forgetting_transformer", "gated_deltanet", "gla", "hgrn2")
"""Model types for which the remedy is said where it is not installed."""


def register_outside(config: dict[str, Any]) -> None:
    """Imports fla.models for a model type that transformers does not know, which registers its own types there.

    Imported here, as it is an optional package, with Triton, and takes seconds.

    Raises:
        ValueError: the type is one of its own and it is not installed.
    """
    model_type = str(config.get("model_type", ""))
    if not model_type or model_type.startswith("fox_") or model_type in CONFIG_MAPPING:
        return
    if importlib.util.find_spec("fla") is not None:
        importlib.import_module("fla.models")
    elif model_type in KNOWN:
        raise ValueError(f"a {model_type} model needs flash-linear-attention: pip install flash-linear-attention")
