"""The families that convert, and the config class of each: its base's, with the retrofit's description in `fox`."""

from __future__ import annotations

from typing import Any

from .half_lives import alibi_half_lives, bias_from_half_life
from .spec import IDLE, PRESETS, PRO_PARTS, FoxSpec, default_rope, idle_fields

__all__ = [
    "IDLE",
    "NOT_FOR_PLAIN_CLASSES",
    "PRESETS",
    "PRO_PARTS",
    "SUPPORTED",
    "FoxSpec",
    "alibi_half_lives",
    "bias_from_half_life",
    "default_rope",
    "idle_fields",
    "make_config_class",
]

SUPPORTED = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "smollm3": "SmolLM3",
    "gemma2": "Gemma2",
    "gemma3_text": "Gemma3Text",
    "olmo2": "Olmo2",
    "phi3": "Phi3",
    "granite": "Granite",
    "cohere2": "Cohere2",
    "ministral": "Ministral",
    "ministral3": "Ministral3",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3Moe",
    "arcee": "Arcee",
    "cohere": "Cohere",
    "ernie4_5": "Ernie4_5",
    "exaone4": "Exaone4",
    "gemma": "Gemma",
    "glm4": "Glm4",
    "granitemoe": "GraniteMoe",
    "olmo": "Olmo",
    "olmo3": "Olmo3",
    "olmoe": "Olmoe",
    "qwen2_moe": "Qwen2Moe",
    "seed_oss": "SeedOss",
    "starcoder2": "Starcoder2",
}
"""Base model_type -> prefix of its transformers classes; a converted model's type is `fox_` + the base's."""


NOT_FOR_PLAIN_CLASSES = (
    "this checkpoint has forget gates, which a plain class drops: load it with retrofox.load, or with "
    "AutoModelForCausalLM.from_pretrained and trust_remote_code=True"
)
"""Value of `transformers_weights` in a converted model's config.json, where transformers looks for a file's name.

A plain class, `LlamaForCausalLM.from_pretrained(converted)`, then stops and shows it, where it would otherwise run
without gates. The Fox config classes, which look for the weights where they always are, leave it out.
"""


def make_config_class(model_type: str) -> type:
    """The config class of a converted family: its base's, plus `fox`, the FoxSpec as a dict."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    base = CONFIG_MAPPING[model_type]
    name = f"Fox{SUPPORTED[model_type]}Config"

    def to_diff_dict(self: Any) -> dict[str, Any]:
        return {**base.to_diff_dict(self), "transformers_weights": NOT_FOR_PLAIN_CLASSES}

    body = {
        "model_type": f"fox_{model_type}",
        "__annotations__": {"fox": dict | None},
        "fox": None,
        "transformers_weights": property(lambda self: None, lambda self, value: None),
        "to_diff_dict": to_diff_dict,
        "__module__": __name__,
    }
    return type(name, (base,), body)


def __getattr__(name: str) -> type:
    """Config classes are made on first use: FoxLlamaConfig, FoxQwen3Config, ..."""
    for model_type, prefix in SUPPORTED.items():
        if name == f"Fox{prefix}Config":
            globals()[name] = make_config_class(model_type)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
