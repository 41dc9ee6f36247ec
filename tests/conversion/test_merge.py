"""What a merge writes, and which differences of the logits it lets pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import retrofox
from retrofox.anatomy import is_new_tensor
from retrofox.config import LoraConfig
from retrofox.conversion import merge as merging
from retrofox.conversion.merge import merge
from retrofox.training.lora import add_adapters

# peft 0.21 asks transformers 5.23 by a name that it deprecates
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")


@pytest.fixture
def adapter(pico_fox, saved, tmp_path):
    """adapter(dtype) -> the directory of a random adapter of a converted base stored in that dtype."""

    def make(dtype: torch.dtype) -> Path:
        model = pico_fox()
        for name, parameter in model.named_parameters():
            if not is_new_tensor(name):
                parameter.data = parameter.data.to(dtype)
        model.config.dtype = dtype
        base = saved(model, tmp_path / "base")
        adapted = add_adapters(retrofox.load(base, dtype=torch.float32), LoraConfig(rank=2), str(base))
        torch.manual_seed(0)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        adapted.save_pretrained(tmp_path / "adapter")
        return tmp_path / "adapter"

    return make


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_weights_keep_the_bases_dtype_and_gates_float32(dtype, limit, adapter, tmp_path):
    report = merge(adapter(dtype), tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {value.dtype for name, value in tensors.items() if is_new_tensor(name)} == {torch.float32}
    assert {value.dtype for name, value in tensors.items() if not is_new_tensor(name)} == {dtype}
    assert (report["dtype"], report["limit"]) == (str(dtype).removeprefix("torch."), limit)


def test_a_model_inside_its_adapter_would_be_pushed_with_it_and_is_refused(adapter, tmp_path):
    place = adapter(torch.float32)
    with pytest.raises(ValueError, match=r"merged lies inside the model .*adapter: choose"):
        merge(place, place / "merged")


def test_a_quantised_base_is_refused(adapter, tmp_path):
    place, config = adapter(torch.float32), tmp_path / "base" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": "torchao"}}))
    with pytest.raises(ValueError, match="base is quantised, and merging needs whole weights"):
        merge(place, tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))


@pytest.mark.parametrize("factor", [1.001, float("nan")])
def test_other_logits_than_the_adapters_are_refused_and_nothing_is_left(factor, adapter, tmp_path, monkeypatch):
    place, logits, factors = adapter(torch.float32), merging.probe_logits, iter([1.0, factor])
    monkeypatch.setattr(merging, "probe_logits", lambda model: logits(model) * next(factors))
    with pytest.raises(ValueError, match="merged logits differ by"):
        merge(place, tmp_path / "out")
    assert not list(tmp_path.glob("*out*"))
