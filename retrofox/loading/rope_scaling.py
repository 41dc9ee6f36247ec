"""Another rotary embedding for an unconverted model: transformers' own RoPE scaling, or another base frequency."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retrofox.config_values import rope_type, trained_length

ORIGINAL = "original_max_position_embeddings"


def set_rope(model: Any, scaling: Mapping[str, Any] | None = None, theta: float | None = None) -> None:
    """Changes the rotary embedding of a live model in place: its config, and the modules that hold the frequencies.

    transformers reads the config, so a model saved afterwards loads with the same frequencies anywhere.
    Arguments and errors are those of `set_rope_config`.
    """
    parents = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child).__name__.endswith("RotaryEmbedding") and hasattr(child, "rope_type")
    ]
    if set_rope_config(model.config, scaling, theta):
        for parent, name in parents:
            old = getattr(parent, name)
            setattr(parent, name, type(old)(model.config).to(next(old.buffers()).device))


def set_rope_config(config: Any, scaling: Mapping[str, Any] | None = None, theta: float | None = None) -> bool:
    """Changes the RoPE parameters of a config in place; False where they are so already.

    Layers with a sliding window keep theirs where a family has a set of parameters for them: they never see beyond it.

    Args:
        scaling: {"rope_type": "linear" | "dynamic" | "yarn" | "llama3", "factor": F, ...} as in transformers'
            `rope_scaling`; the length that yarn and llama3 count from is the one the model was trained to.
        theta: RoPE's base, 10000 in most small models.

    Raises:
        ValueError: the config has no RoPE parameters, or its RoPE is scaled already.
    """
    if scaling is None and theta is None:
        return False
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        raise ValueError(f"a {config.model_type} model has no rotary embedding that can be scaled")
    length = trained_length(config)
    if any(isinstance(values, dict) for values in parameters.values()):  # a set for each type of layer
        scaled = {layers for layers, values in parameters.items() if values and not layers.startswith("sliding")}
        wanted = {
            layers: _scaled(values, scaling, theta, length) if layers in scaled else values
            for layers, values in parameters.items()
        }
    else:
        wanted = _scaled(parameters, scaling, theta, length)
    if wanted == parameters:
        return False
    config.rope_parameters = wanted
    if scaling is not None and scaling["rope_type"] == "llama3":  # transformers takes it for scaled by this alone
        config.max_position_embeddings = round(scaling["factor"] * length)
    return True


def _scaled(
    values: Mapping[str, Any], scaling: Mapping[str, Any] | None, theta: float | None, length: int
) -> dict[str, Any]:
    """One set of rope_parameters with another base and scaling."""
    result = {**values, **({} if theta is None else {"rope_theta": float(theta)})}
    if scaling is None:
        return result
    given = {key: value for key, value in scaling.items() if value is not None}
    if given["rope_type"] in ("yarn", "llama3"):
        given.setdefault(ORIGINAL, values.get(ORIGINAL, length))
    result.update(given)
    already = rope_type(dict(values))
    if already != "default" and result != values:
        raise ValueError(
            f"this model's RoPE is scaled already (rope_type {already}), and {given['rope_type']} would replace what "
            "it was trained with: take a base without scaling"
        )
    return result
