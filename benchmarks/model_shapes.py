"""Shapes of the models that the benchmarks build with random weights, for transformers' configs, and adapters."""

from __future__ import annotations

from typing import Any

from retrofox.config import LoraConfig
from retrofox.training.lora import add_adapters

SMOLLM2: dict[str, Any] = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "rope_theta": 100000.0,
    "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
}  # fmt: skip
LLAMA_1B: dict[str, Any] = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": True,
}  # fmt: skip
LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False,
}  # fmt: skip
PICO: dict[str, Any] = SMOLLM2 | {"vocab_size": 288, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
                                  "num_attention_heads": 6}  # fmt: skip
"""SmolLM2's, tiny: to try a script."""


def with_adapters(model: Any, name: str) -> Any:
    """A converted model under rank-16 adapters; what trains is float32, the frozen base keeps its dtype."""
    model = add_adapters(model, LoraConfig(rank=16), name)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model
