"""Which models convert, and which settings are refused. The table of families is SUPPORTED in configuration_fox.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from retrofox.model.configuration_fox import SUPPORTED

OWN_GATES = ("forgetting_transformer-project_fox", "forgetting_transformer")
"""Model types that come with forget gates: of the FoX authors' repository, and of fla."""


def check_known(source: object, values: Mapping[str, Any]) -> None:
    """Raises ValueError for a model (its config.json as a dict) that transformers can't open: one with gates, too."""
    model_type = values.get("model_type")
    if model_type in OWN_GATES:
        check_supported(values)
    if model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"{source} has model_type {model_type!r}, which this version of transformers does not know, and code beside"
            " a model is not run: open it in Python, and give the model"
        )


def check_supported(config: Any) -> None:
    """Raises ValueError, listing the supported families, for a config (object or dict) of another one."""
    model_type = config.get("model_type") if isinstance(config, dict) else config.model_type
    if model_type in OWN_GATES:
        raise ValueError(f"{model_type} models have forget gates already: `retrofox convert MODEL OUT`, then use OUT")
    if model_type not in SUPPORTED:
        raise ValueError(f"model_type {model_type!r} is not supported; families known: {', '.join(SUPPORTED)}")


def check_settings(config: Any) -> None:
    """Raises ValueError for settings of a supported family's config that its converted form would not honour."""
    if getattr(config, "is_causal", True) is False:
        raise ValueError("is_causal is false, so this model attends to what follows too: gates need a causal model")
    if config.model_type == "qwen2_moe" and "sliding_attention" in config.layer_types:
        raise ValueError(
            "this qwen2_moe model can't be converted: its sliding windows are known to its masks only, not to its "
            "attention: set use_sliding_window to false"
        )


def replaced_settings(config: Any) -> dict[str, Any]:
    """Values of a base's config that its converted form replaces: no attention dropout, no returned weights."""
    values = {"attention_dropout": 0.0, "output_attentions": False}
    return {name: value for name, value in values.items() if getattr(config, name, None)}


def has_softcap(config: Any) -> bool:
    """Whether a base model caps its attention logits: transformers before 5.23 drops the cap in sdpa, its default."""
    return getattr(config, "attn_logit_softcapping", None) is not None
