"""The families that convert, the description of a retrofit, and the config class of each converted family."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

OPEN_BIAS = 30.0
"""Gate bias of `init="open"`: log f = -1e-13 a token, below float32's resolution of a logit at any length."""

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


@dataclass
class FoxFields:
    """The `fox` section of a converted model's config.json; `retrofox.FoxSpec` explains and checks each field."""

    rope: str | None = None
    rope_factor: float | None = None
    rope_length: float | None = None
    max_wavelength: float | None = None
    layer_max_wavelength: dict[int, float] = field(default_factory=dict)
    layer_pairs: dict[int, tuple[int, ...]] = field(default_factory=dict)
    anneal_to: str = "partial"
    anneal_tokens: int = 0
    annealed_tokens: int = 0
    gate: str = "data"
    init: str = "slopes"
    half_life: tuple[float, float] | None = None
    open_heads: int | tuple[tuple[int, int], ...] = 0
    sink_tokens: int = 1
    pro: tuple[str, ...] = ()
    log_n: int | None = None
    prune: float | None = None
    horizon: float | None = None
    base: str | None = None
    base_revision: str | None = None
    version: str | None = None
    preset: str | None = field(default=None, init=False, compare=False)

    @classmethod
    def read(cls, values: dict[str, Any]) -> FoxFields:
        """The fields of a config's `fox` section; later versions' own fields are left out."""
        known = {f.name for f in fields(FoxFields) if f.init}
        spec = FoxFields(**{name: value for name, value in values.items() if name in known})
        spec.layer_max_wavelength = {int(k): float(v) for k, v in spec.layer_max_wavelength.items()}
        spec.layer_pairs = {int(k): tuple(v) for k, v in spec.layer_pairs.items()}
        if not isinstance(spec.open_heads, int):
            spec.open_heads = tuple((layer, kv_head) for layer, kv_head in spec.open_heads)
        return spec

    def to_dict(self) -> dict[str, Any]:
        """The JSON form: plain lists, numbers and strings, layer numbers as strings."""
        values = asdict(self)
        values["pro"] = list(self.pro)
        values["half_life"] = None if self.half_life is None else list(self.half_life)
        if not isinstance(self.open_heads, int):
            values["open_heads"] = [list(head) for head in self.open_heads]
        values["layer_max_wavelength"] = {str(k): v for k, v in self.layer_max_wavelength.items()}
        values["layer_pairs"] = {str(k): list(v) for k, v in self.layer_pairs.items()}
        return values

    def initial_bias(self, num_heads: int) -> list[float]:
        """The gate biases a layer starts with: open, ALiBi's, or half-lives log-spaced over its heads."""
        if self.init == "open":
            return [OPEN_BIAS] * num_heads
        if self.init == "alibi":
            return [bias_from_half_life(x) for x in alibi_half_lives(num_heads)]
        if self.half_life is None:
            raise ValueError("the fox section lacks half_life: in Python, FoxSpec.resolved(trained_length) fills it in")
        low, high = self.half_life
        shares = [h / (num_heads - 1) for h in range(num_heads)] if num_heads > 1 else [1.0]
        return [bias_from_half_life(low ** (1 - share) * high**share) for share in shares]


def bias_from_half_life(half_life_tokens: float) -> float:
    """Gate bias b with sigmoid(b)^half_life = 1/2: b = -ln(expm1(ln 2 / half_life))."""
    decay = math.log(2.0) / half_life_tokens
    return -decay - math.log(-math.expm1(-decay))  # without e^decay, which is too large a number under a thousandth


def alibi_half_lives(num_heads: int) -> list[float]:
    """Half-lives in tokens, ln 2 / slope, of ALiBi's slopes 2^(-8h/H), h = 1..H (Press et al. 2022).

    Where H is no power of two, the slopes of the largest power M below it come first, then every second one of 2M.
    """

    def slopes(heads: int) -> list[float]:
        return [2.0 ** (-8.0 * h / heads) for h in range(1, heads + 1)]

    below = 1 << (num_heads.bit_length() - 1)
    chosen = slopes(below) + slopes(2 * below)[0::2][: num_heads - below]
    return [math.log(2.0) / slope for slope in chosen]


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
