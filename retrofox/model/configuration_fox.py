"""The families that convert, the fields of a retrofit, and the config class of each converted family."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

SUPPORTED = {
    "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "smollm3": "SmolLM3",
    "gemma2": "Gemma2", "gemma3_text": "Gemma3Text", "olmo2": "Olmo2", "phi3": "Phi3", "granite": "Granite",
    "cohere2": "Cohere2", "ministral": "Ministral", "ministral3": "Ministral3", "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3Moe", "arcee": "Arcee", "cohere": "Cohere", "ernie4_5": "Ernie4_5", "exaone4": "Exaone4",
    "gemma": "Gemma", "glm4": "Glm4", "granitemoe": "GraniteMoe", "olmo": "Olmo", "olmo3": "Olmo3", "olmoe": "Olmoe",
    "qwen2_moe": "Qwen2Moe", "seed_oss": "SeedOss", "starcoder2": "Starcoder2",
    "deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3", "glm4_moe_lite": "Glm4MoeLite", "youtu": "Youtu",
}  # fmt: skip
"""Base model_type -> prefix of its transformers classes; a converted model's type is `fox_` + the base's."""


NOT_FOR_PLAIN_CLASSES = (
    "this checkpoint has forget gates, which a plain class drops: load it with retrofox.load, or with "
    "AutoModelForCausalLM.from_pretrained and trust_remote_code=True"
)
"""Value of `transformers_weights` in config.json, where transformers looks for a file's name: a plain class,
`LlamaForCausalLM.from_pretrained(converted)`, stops and shows it. The Fox config classes leave it out."""


@dataclass
class FoxFields:
    """The `fox` section of a converted model's config.json; `retrofox.FoxSpec` explains and checks each field."""

    rope: str | None = None
    rope_factor: float | None = None
    rope_length: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    max_wavelength: float | None = None
    layer_max_wavelength: dict[int, float] = field(default_factory=dict)
    layer_pairs: dict[int, tuple[int, ...]] = field(default_factory=dict)
    anneal_to: str = "partial"
    anneal_tokens: int = 0
    annealed_tokens: int = 0
    gate: str = "data"
    gate_heads: str = "query"
    init: str = "slopes"
    half_life: tuple[float, float] | None = None
    max_half_life: float | None = None
    open_heads: int | tuple[tuple[int, int], ...] = 0
    sink_tokens: int = 1
    pro: tuple[str, ...] = ()
    log_n: int | None = None
    horizon: float | None = None
    base: str | None = None
    base_revision: str | None = None
    version: str | None = None

    @classmethod
    def read(cls, values: dict[str, Any]) -> FoxFields:
        """The fields of a config's `fox` section; ValueError for one that a later version sets."""
        known = {f.name for f in fields(FoxFields)}
        later = [name for name in values if values[name] and name not in (*known, "preset", "prune")]
        if later:
            raise ValueError(f"fox.{later[0]} = {values[later[0]]}: this retrofox has no such field, upgrade it")
        spec = FoxFields(**{name: value for name, value in values.items() if name in known})
        spec.layer_max_wavelength = {int(k): float(v) for k, v in spec.layer_max_wavelength.items()}
        spec.layer_pairs = {int(k): tuple(v) for k, v in spec.layer_pairs.items()}
        return spec

    def known(self, name: str) -> float:
        """A field that a conversion fills in."""
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"the fox section lacks {name}: in Python, FoxSpec.resolved(trained_length) fills it in")
        return value


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
