"""config.json of the models that shipped recipes name: gated ones, and no network, are no obstacle to a plan."""

from __future__ import annotations

from typing import Any

from retrofox.loading.source import read_config, refuse_adapter

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
SMOLLM2_135M = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}  # fmt: skip
LLAMA_1B = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256,
    "tie_word_embeddings": True, "max_position_embeddings": 131072, "rope_scaling": {**LLAMA3, "factor": 32.0},
}  # fmt: skip
LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    "max_position_embeddings": 131072, "rope_scaling": LLAMA3,
}  # fmt: skip
QWEN3_8B = {
    "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "tie_word_embeddings": False, "max_position_embeddings": 40960,
}  # fmt: skip
KNOWN: dict[str, dict[str, Any]] = {
    "HuggingFaceTB/SmolLM2-135M": SMOLLM2_135M,
    "meta-llama/Llama-3.2-1B": LLAMA_1B,
    "meta-llama/Llama-3.1-8B": LLAMA_8B,
    "Qwen/Qwen3-8B": QWEN3_8B,
}


def config_of(model: str) -> dict[str, Any]:
    """config.json of a directory or Hub id; of a known model without asking the Hub."""
    if model.endswith(".gguf"):
        raise ValueError(f"{model} has no config.json to plan from: give the model it was made from")
    refuse_adapter(model)
    return KNOWN.get(model.removesuffix("-Instruct")) or read_config(model)
