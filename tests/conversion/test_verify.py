"""What the parity proof refuses to call a proof."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import retrofox
from retrofox.conversion import verify


@pytest.fixture
def converted(tmp_path):
    """converted(base) -> the directory of its converted form, gates open and every rotary pair kept."""

    def make(base) -> Path:
        retrofox.convert(base, tmp_path / "out", fox=retrofox.FoxSpec(rope="keep", init="open"), verify=False)
        return tmp_path / "out"

    return make


def test_one_logit_that_differs_is_no_parity(pico_llama, converted, monkeypatch):
    base, own = pico_llama(), verify.load

    def with_one_other(*args, **options):
        model = own(*args, **options)
        model.lm_head.register_forward_hook(lambda module, given, out: out + 0.003 * (torch.arange(288) == 7))
        return model

    out = converted(base)
    assert verify.compare(base, out)["equal"]
    monkeypatch.setattr(verify, "load", with_one_other)
    found = verify.compare(base, out)
    assert found["max_difference"] == pytest.approx(0.003, rel=0.1)
    assert not found["equal"]


def test_a_base_that_gives_all_tokens_one_score_proves_nothing(pico_llama, converted):
    base = pico_llama()
    with torch.no_grad():
        base.lm_head.weight.zero_()
    found = verify.compare(base, converted(base))
    assert found["equal"]
    assert not found["base_tells_tokens_apart"]


def test_a_live_base_is_left_as_it_was(pico_llama, converted):
    base = pico_llama().to(torch.bfloat16).train()
    before = {name: (value.data_ptr(), value.dtype) for name, value in base.state_dict(keep_vars=True).items()}
    buffers = {name: value.clone() for name, value in base.named_buffers()}
    assert verify.compare(base, converted(base))["equal"]  # by frequencies that were not rounded to bfloat16
    assert base.training
    assert {name: (value.data_ptr(), value.dtype) for name, value in base.state_dict(keep_vars=True).items()} == before
    for name, value in base.named_buffers():
        torch.testing.assert_close(value, buffers[name], atol=0, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_files_of_more_bits_than_config_json_says_are_proven(pico_base, tmp_path, family):
    pico_base(family).save_pretrained(tmp_path / "base")
    file = tmp_path / "base" / "config.json"
    file.write_text(file.read_text().replace('"float32"', '"bfloat16"'))
    parity = retrofox.convert(tmp_path / "base", tmp_path / "out")["parity"]
    assert parity["equal"]
    assert parity["dtype"] == "float32"
