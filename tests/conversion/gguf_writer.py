"""Writes pico models as llama.cpp's convert_hf_to_gguf does: its keys, names and layouts, float32."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import torch

KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
}
"""Keys that every family writes where its config has the value."""


def tensors(model: Any, architecture: str) -> dict[str, torch.Tensor]:
    """GGUF name -> tensor: rotary channels of Llamas interleaved."""
    config = model.config
    (arch,) = (arch for arch, known in gguf.MODEL_ARCH_NAMES.items() if known == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    made: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, kind = name.rpartition(".")
        if architecture == "llama" and re.search(r"self_attn\.[qk]_proj", stem):
            heads = config.num_attention_heads if "q_proj" in stem else config.num_key_value_heads
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        made[f"{names.get_name(stem)}.{kind}"] = tensor
    return made


def keys(config: Any) -> dict[str, Any]:
    """Keys of the architecture, without its prefix, as the converter writes them."""
    values = {key: getattr(config, name) for key, name in KEYS.items() if getattr(config, name, None) is not None}
    rope = config.rope_parameters
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values["rope.freq_base"] = float(rope["rope_theta"])
    if config.model_type == "llama":
        values["rope.dimension_count"] = head
        values["vocab_size"] = config.vocab_size
    return values


def write(
    model: Any,
    tokenizer: Any,
    file: Path,
    *,
    extra_keys: dict[str, Any] | None = None,
    extra_tensors: dict[str, torch.Tensor] | None = None,
) -> Path:
    """Writes a model's config, weights and tokenizer to a .gguf file, with more keys and tensors or others."""
    architecture = model.config.model_type
    writer = gguf.GGUFWriter(file, architecture)
    for key, value in {**keys(model.config), **(extra_keys or {})}.items():
        full = f"{architecture}.{key}"
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](full, value)
    vocabulary = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    known = sorted(vocabulary["vocab"], key=vocabulary["vocab"].get)
    writer.add_token_list(known + [f"[PAD{i}]" for i in range(len(known), model.config.vocab_size)])
    writer.add_token_scores([0.0] * model.config.vocab_size)  # transformers 5.10 wants Gemma's
    writer.add_token_merges([" ".join(pair) for pair in vocabulary["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(1)
    for name, tensor in {**tensors(model, architecture), **(extra_tensors or {})}.items():
        writer.add_tensor(name, tensor.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
