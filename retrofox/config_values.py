"""Values of a model's config that families and versions write in several ways. Importing it imports no torch.

A config is one of transformers, or its config.json as a dict.
"""

from __future__ import annotations

from typing import Any


def value_of(config: Any, name: str) -> Any:
    """A value of a config; None where it has none of that name."""
    return config.get(name) if isinstance(config, dict) else getattr(config, name, None)


def kv_heads_of(config: Any) -> int:
    """Key/value heads of a model's layers: as many as query heads where nothing is said of them."""
    return value_of(config, "num_key_value_heads") or value_of(config, "num_attention_heads")


def horizon_of(config: Any) -> float | None:
    """A converted model's horizon in nats; None without one, and for any other model."""
    return (value_of(config, "fox") or {}).get("horizon")


def rope_sets(config: Any) -> list[dict[str, Any]]:
    """The sets of RoPE parameters of a model: one, and one for each type of layer where these differ."""
    parameters = value_of(config, "rope_parameters") or value_of(config, "rope_scaling") or {}
    return [parameters, *(values for values in parameters.values() if isinstance(values, dict))]


def rope_type(values: dict[str, Any]) -> str:
    """The kind of scaling of a set of RoPE parameters; older configs call it `type`."""
    return values.get("rope_type", values.get("type", "default"))


def rope_types(config: Any) -> set[str]:
    """The kinds of rotary scaling of a model's layers."""
    return {rope_type(values) for values in rope_sets(config)}


def depends_on_length(config: Any) -> bool:
    """Whether rotary frequencies depend on the length of the text, its padding counted."""
    return bool(rope_types(config) & {"dynamic", "longrope"})


def trained_length(config: Any) -> int:
    """The length in tokens that a base model was trained to: before any RoPE scaling, or a conversion, stretched it.

    A converted model's `rope_length`; else the longest `original_max_position_embeddings` among the RoPE parameters
    (one set, or one per layer type), where one is given; otherwise `max_position_embeddings`. With its scaling of type
    llama3, Llama 3.1 was trained to that.
    """
    known = (value_of(config, "fox") or {}).get("rope_length")
    if known is not None:
        return int(known)
    name = "original_max_position_embeddings"
    scaled = [values for values in rope_sets(config) if rope_type(values) not in ("default", "llama3")]
    originals = [values.get(name) or 0 for values in scaled]
    if "longrope" in map(rope_type, scaled):  # Phi-3's config.json has it beside the RoPE parameters
        originals.append(value_of(config, name) or 0)
    return int(max(originals, default=0) or value_of(config, "max_position_embeddings") or 2048)
