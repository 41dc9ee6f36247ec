"""Converting a .gguf file: dequantised, proven against itself, its tokenizer along; damaged ones are refused."""

import json
from pathlib import Path

import gguf
import pytest
import torch

import retrofox
from retrofox import FoxSpec
from retrofox.loading.base import load_base
from retrofox.loading.tokenizers import load_tokenizer

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOKENS = torch.arange(2, 34)[None]


def write_gguf(model, tokenizer, file: Path) -> None:
    """A pico Llama as llama.cpp writes it: float32, rotary channels interleaved."""
    config, state = model.config, model.state_dict()
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    vocabulary = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(vocabulary["vocab"], key=vocabulary["vocab"].get))
    writer.add_token_merges([" ".join(pair) for pair in vocabulary["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)

    def add(name: str, tensor: torch.Tensor, heads: int = 0) -> None:
        if heads:
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        writer.add_tensor(f"{name}.weight", tensor.contiguous().numpy())

    add("token_embd", state["model.embed_tokens.weight"])
    add("output_norm", state["model.norm.weight"])
    add("output", state["lm_head.weight"])
    for layer in range(config.num_hidden_layers):
        for ours, theirs in NAMES.items():
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(theirs, 0)
            add(f"blk.{layer}.{theirs}", state[f"model.layers.{layer}.{ours}.weight"], heads)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def file(pico_llama, pico_tokenizer, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "pico.gguf"
    write_gguf(pico_llama(), pico_tokenizer, path)
    return path


def test_a_gguf_file_is_converted_and_proven(file, pico_llama, pico_tokenizer, tmp_path):
    base, tokenizer = load_base(file)
    with torch.no_grad():
        expected = base(TOKENS).logits
        torch.testing.assert_close(expected, pico_llama()(TOKENS).logits, atol=1e-4, rtol=0)
    report = retrofox.convert(file, tmp_path / "out", fox=FoxSpec(rope="keep", init="open", pro=("output-gate",)))
    assert report["weights"] == "dequantised from GGUF"
    assert report["parity"]["equal"]
    assert report["parity"]["text"] == "a fixed text"
    model = retrofox.load(tmp_path / "out")
    assert not hasattr(model.config, "quantization_config")
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, expected, atol=1e-5, rtol=0)
    text = "the fox forgets the gate"
    ids = load_tokenizer(tmp_path / "out")(text).input_ids
    assert ids == tokenizer(text).input_ids
    assert ids[-5:] == pico_tokenizer(text).input_ids[-5:]


@pytest.mark.parametrize("damage", ["cut in its header", "cut in its weights", "something else"])
def test_a_damaged_gguf_file_is_refused(file, tmp_path, damage):
    whole = file.read_bytes()
    kept = {"cut in its header": whole[:2000], "cut in its weights": whole[:-5000], "something else": b"GIF89a" * 99}
    (tmp_path / "bad.gguf").write_bytes(kept[damage])
    with pytest.raises(ValueError, match=r"bad\.gguf can't be read as a model .*download it again"):
        retrofox.convert(tmp_path / "bad.gguf", tmp_path / "out", verify=False)
    assert [entry.name for entry in tmp_path.iterdir()] == ["bad.gguf"]
