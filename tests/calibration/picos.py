"""Pico models of several families whose attention is worth calibrating."""

from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from retrofox.fox_spec import FoxSpec

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
HALF_ROTARY = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
MIXED = ["sliding_attention", "full_attention"]
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SHAPE, pad_token_id=0, rope_parameters=HALF_ROTARY)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=11)),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SHAPE, head_dim=8, attn_logit_softcapping=5.0, sliding_window=9, layer_types=MIXED)
    ),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, head_dim=8, sliding_window=9, layer_types=MIXED)),
}
SPEC = FoxSpec(rope="partial", max_wavelength=20.0, sink_tokens=1)


def sharp(family: str = "llama") -> Any:
    """A pico model whose attention is far from uniform, so that there is something to fit."""
    torch.manual_seed(0)
    model = FAMILIES[family]()
    for name, parameter in model.named_parameters():
        if "_proj" in name or "embed" in name:
            torch.nn.init.normal_(parameter, std=0.25)
    return model.eval()
