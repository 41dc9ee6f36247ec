"""A converted Llama against its base and against itself: parity, caches, documents, padding, precision, refusals."""

import json
import math
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

import retrofox
from retrofox import FoxSpec
from retrofox.anatomy import attention_mode, attentions, is_new_tensor
from retrofox.model.modeling_fox import CACHE
from tests.model.conftest import logits

LENGTH = 24


@pytest.fixture(scope="module")
def fox(pico_fox):
    return pico_fox()


def close(actual, expected, tolerance=2e-5) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def test_open_and_shuffled_modes(fox, tokens):
    chosen = logits(fox, tokens)
    with attention_mode(fox, "shuffled"):
        shuffled = logits(fox, tokens)
        for _, module in attentions(fox):
            module.forget_gate.record = True
        with attention_mode(fox, "fox"):
            logits(fox, tokens)
        for _, module in attentions(fox):
            gate = module.forget_gate
            x = torch.randn(1, 3, 32)
            assert torch.equal(module.log_f(x), gate(x).roll(2, dims=-1))
            gate.record, gate.last_log_f = False, None
    with attention_mode(fox, "open"):
        open_ = logits(fox, tokens)
        assert all(not module.log_f(torch.randn(1, 3, 32)).any() for _, module in attentions(fox))
    for a, b in ((chosen, shuffled), (chosen, open_), (shuffled, open_)):
        assert (a - b).abs().max() > 0.1
    assert torch.equal(logits(fox, tokens), chosen)


def test_pretrained_tensors_are_shared_and_untouched(pico_llama):
    base = pico_llama()
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    model = retrofox.convert(base)
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(after[name].data_ptr() == tensor.data_ptr() for name, tensor in base.state_dict().items())
    assert {name.split(".")[-2] for name in set(after) - set(before)} == {"forget_gate"}


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_the_cache_keeps_gates_exactly_in_bfloat16(pico_fox, tokens, kind):
    model = pico_fox().to(torch.bfloat16)
    cache: Any = DynamicCache(config=model.config)
    if kind == "static":
        cache = StaticCache(config=model.config, max_cache_len=LENGTH + 8)
    for _, module in attentions(model):
        module.forget_gate.record = True
    logits(model, tokens, **{CACHE: cache})
    for index, (_, module) in enumerate(attentions(model)):
        layer, log_f = cache.layers[index], module.forget_gate.last_log_f
        if kind == "dynamic":
            c = sum(x.double() for x in layer.cumulative()) * math.log(2)
            close(c, log_f.transpose(1, 2).double().cumsum(-1), 1e-9)
        else:
            assert torch.equal(layer.log_f()[:, : tokens.shape[1]], log_f)


def test_cu_seqlens_with_a_mask_or_a_filled_cache_is_refused(fox, tokens):
    cu_seqlens = torch.tensor([0, 24, 48], dtype=torch.int32)
    mask = torch.ones_like(tokens)
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="cu_seqlens"):
        fox(tokens, cu_seqlens=cu_seqlens, attention_mask=mask)
    cache = DynamicCache(config=fox.config)
    logits(fox, tokens, **{CACHE: cache})
    with pytest.raises(ValueError, match="cu_seqlens"):
        fox(tokens, cu_seqlens=cu_seqlens, **{CACHE: cache})


def test_a_custom_4d_mask_is_obeyed(fox, tokens):
    mask = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    close(logits(fox, tokens, attention_mask=mask), logits(fox, tokens))
    mask[:, :, 5:, 2] = False
    assert (logits(fox, tokens, attention_mask=mask) - logits(fox, tokens))[:, 5:].abs().max() > 1e-3


def test_a_bfloat16_model_keeps_its_gates_in_float32(pico_fox, tmp_path):
    model = pico_fox()
    model.save_pretrained(tmp_path)
    for cast in (retrofox.load(tmp_path, dtype=torch.bfloat16), model.to(torch.bfloat16)):
        kinds = {is_new_tensor(name): set() for name, _ in cast.named_parameters()}
        for name, parameter in cast.named_parameters():
            kinds[is_new_tensor(name)].add(parameter.dtype)
        assert kinds == {True: {torch.float32}, False: {torch.bfloat16}}
    assert all(
        m.log_f(torch.randn(1, 3, 32, dtype=torch.bfloat16)).dtype == torch.float32 for _, m in attentions(model)
    )


def test_fixed_gates_have_nothing_to_train(pico_fox):
    model = pico_fox(gate="fixed", stirred=False)
    assert not [name for name, _ in model.named_parameters() if is_new_tensor(name)]
    assert sum(name.endswith("forget_gate.bias") for name in model.state_dict()) == 2


def test_a_checkpoint_that_pruned_loads_and_says_that_it_no_longer_does(pico_fox, tmp_path, caplog, tokens):
    model = pico_fox()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["fox"]["prune"] = -10.0
    (tmp_path / "config.json").write_text(json.dumps(config))
    again = retrofox.load(tmp_path)
    assert "prune is gone" in caplog.text
    close(logits(again, tokens), logits(model, tokens), 1e-6)


def test_a_generation_config_that_can_not_be_saved_does_not_stop_a_save(pico_llama, tmp_path):
    base = pico_llama()
    base.generation_config.temperature = 0.6  # without do_sample, as many published checkpoints have it
    base.generation_config.pad_token_id = -1
    with pytest.raises(ValueError, match="GenerationConfig is invalid"):
        base.generation_config.save_pretrained(tmp_path / "refused")
    retrofox.convert(base, fox=FoxSpec(half_life=(2.0, 100.0))).save_pretrained(tmp_path / "saved")
    file = tmp_path / "saved" / "generation_config.json"
    saved = json.loads(file.read_text())
    assert "temperature" not in saved
    assert saved["eos_token_id"] == 1
    file.write_text(json.dumps({**saved, "temperature": 0.6, "pad_token_id": -1}))
    retrofox.load(tmp_path / "saved").save_pretrained(tmp_path / "again")
    assert retrofox.load(tmp_path / "again").generation_config.eos_token_id == 1
