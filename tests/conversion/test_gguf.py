"""Converting a .gguf file: the model it was made from, proven, its tokenizer along; what would change it is refused."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import retrofox
from retrofox.fox_spec import FoxSpec
from retrofox.loading.base import load_base
from retrofox.loading.configs import _read_header, gguf_config
from retrofox.loading.tokenizers import load_tokenizer
from tests import conftest
from tests.conversion.gguf_writer import KEYS, write

PICO = {name: value for name, value in conftest.PICO.items() if name != "head_dim"}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 16}),
    "llama, with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3": ("qwen3", {"head_dim": 16}),
}


def made(model_type: str, values: dict[str, Any]) -> Any:
    """A model of random weights, every one of them: norms and biases that start as 1 and 0, too."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**PICO, **values})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight.add_(0.3 * torch.randn_like(weight))
    return model


def logits(model: Any, length: int = 128) -> torch.Tensor:
    """At `length` positions spread over those that the model was trained to."""
    positions = torch.arange(length)[None] * (model.config.max_position_embeddings // length)
    tokens = torch.randint(2, 288, (1, length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(tokens, position_ids=positions).logits


@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_gives_the_model_that_it_was_made_from(name, pico_tokenizer, tmp_path):
    model = made(*FAMILIES[name])
    read, _ = load_base(write(model, pico_tokenizer, tmp_path / "pico.gguf"))
    torch.testing.assert_close(logits(read), logits(model), atol=2e-4, rtol=0)


YARN_KEYS = {
    "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32,
}  # fmt: skip
ATTENTION = {"rope.scaling.attn_factor": 1.3}
FACTORS = torch.tensor([1.0, 3.0, 2.0, 5.0])


@pytest.mark.parametrize(
    ("model_type", "keys", "tensors", "said"),
    [
        ("llama", {"attention.scale": 0.5}, {}, "attention.scale = 0.5"),
        ("llama", {"attention.sliding_window": 16}, {}, "attention.sliding_window = 16"),
        ("llama", {"expert_count": 8}, {}, "expert_count = 8"),
        ("llama", {"logit_scale": 4.0}, {}, "logit_scale = 4.0"),
        ("llama", {"rope.dimension_count": 4}, {}, "rope.dimension_count = 4"),
        ("llama", {"rope.scaling.type": "longrope"}, {}, "rope.scaling.type = longrope"),
        ("llama", {"some.new_key": 1}, {}, "some.new_key = 1"),
        ("qwen3", {"attn_logit_softcapping": 50.0}, {}, "attn_logit_softcapping = 50.0"),
        ("gemma2", {}, {}, "general.architecture = gemma2"),
        (
            "llama",
            {"rope.scaling.factor": 4.0},
            {},
            "rope.scaling.type = linear, with factor 4",
        ),  # as llama.cpp reads it
        ("llama", YARN_KEYS, {}, "rope.scaling.type = yarn, with factor 4"),
        ("llama", {}, {"rope_freqs.weight": FACTORS}, "rope_freqs.weight = factors of RoPE's frequencies"),  # Llama 3's
        ("llama", {}, {"rope_factors_long.weight": FACTORS}, "rope_factors_long.weight = factors of"),
        ("llama", ATTENTION, {}, "rope.scaling.attn_factor = 1.29"),
        ("llama", {}, {"blk.1.attn_q.bias": torch.ones(32)}, "1 of its tensors, such as blk.1.attn_q.bias"),
    ],
)
def test_what_transformers_would_drop_is_refused_by_name(model_type, keys, tensors, said, pico_tokenizer, tmp_path):
    model = made(model_type, {"head_dim": 8})
    file = write(model, pico_tokenizer, tmp_path / "pico.gguf", extra_keys=keys, extra_tensors=tensors)
    with pytest.raises(ValueError, match=f"{said}.*convert the model that the file was made from"):
        load_base(file)


@pytest.mark.parametrize("key", ["attention.head_count_kv", "attention.layer_norm_rms_epsilon", "context_length"])
def test_a_file_without_a_key_that_transformers_would_guess_is_refused(key, pico_tokenizer, tmp_path, monkeypatch):
    monkeypatch.delitem(KEYS, key)  # models of 2023 have no num_key_value_heads: their queries would stay permuted
    model = made("llama", {"head_dim": 8, "num_key_value_heads": 4})
    file = write(model, pico_tokenizer, tmp_path / "pico.gguf")
    with pytest.raises(ValueError, match=f"{key} = missing can't be read"):
        load_base(file)


@pytest.fixture(scope="module")
def file(pico_llama, pico_tokenizer, tmp_path_factory) -> Path:
    return write(pico_llama(), pico_tokenizer, tmp_path_factory.mktemp("gguf") / "pico.gguf")


def test_a_gguf_file_is_converted_and_proven(file, tmp_path):
    before = _read_header.cache_info().misses
    base, tokenizer = load_base(file)
    assert _read_header.cache_info().misses == before + 1
    (tmp_path / "another.gguf").write_bytes(file.read_bytes())
    shutil.copystat(file, tmp_path / "another.gguf")
    (tmp_path / "another.gguf").replace(file)
    gguf_config(file)
    assert _read_header.cache_info().misses == before + 2
    report = retrofox.convert(file, tmp_path / "out", fox=FoxSpec(rope="keep", init="open", pro=("output-gate",)))
    assert report["weights"] == "dequantised from GGUF"
    assert report["parity"]["equal"]
    assert report["parity"]["text"] == "a fixed text"
    model = retrofox.load(tmp_path / "out")
    assert not hasattr(model.config, "quantization_config")
    torch.testing.assert_close(logits(model), logits(base), atol=1e-5, rtol=0)
    text = "the fox forgets the gate"
    assert load_tokenizer(tmp_path / "out")(text).input_ids == tokenizer(text).input_ids


@pytest.mark.parametrize("damage", ["cut in its header", "cut in its weights", "something else"])
def test_a_damaged_gguf_file_is_refused(file, tmp_path, damage):
    whole = file.read_bytes()
    kept = {"cut in its header": whole[:2000], "cut in its weights": whole[:-5000], "something else": b"GIF89a" * 99}
    (tmp_path / "bad.gguf").write_bytes(kept[damage])
    with pytest.raises(ValueError, match=r"bad\.gguf can't be opened in transformers .*download it again"):
        retrofox.convert(tmp_path / "bad.gguf", tmp_path / "out", verify=False)
    assert [entry.name for entry in tmp_path.iterdir()] == ["bad.gguf"]
