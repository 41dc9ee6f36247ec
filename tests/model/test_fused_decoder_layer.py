"""Plain layers with fewer launches: found where they are plain, left alone elsewhere, and the same bits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import LogitsProcessorList
from transformers.models.llama import modeling_llama

from retrofox.acceleration import cuda_graph_decoding as captured
from retrofox.acceleration import fused_decoder_layer as fused


def twins(monkeypatch) -> list[str]:
    """Lets torch's expressions run on a CPU in place of the fused functions; returns what is called."""
    pytest.importorskip("triton")
    calls: list[str] = []

    def norm(x, residual, weight, eps):
        calls.append("norm" if residual is None else "sum and norm")
        x = x if residual is None else residual + x
        wide = x.float()
        return x, weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)

    def product(gate, up):
        calls.append("silu")
        return nn.functional.silu(gate) * up

    monkeypatch.setattr(fused, "takes", lambda x, weight=None: True)
    monkeypatch.setattr(fused, "add_norm", norm)
    monkeypatch.setattr(fused, "silu_mul", product)
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plain_model_gives_the_same_bits(pico_fox, monkeypatch, dtype):
    model = pico_fox().to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layernorm" in name or name.endswith("norm.weight"):
                parameter.normal_()
        ids = torch.arange(2, 20)[None]
        expected = model(ids).logits
        calls = twins(monkeypatch)
        with fused.fused_layers(model) as found:
            logits = model(ids).logits
    assert found == 2 * 2 + 1
    layer = ["sum and norm", "silu", "sum and norm"]
    assert calls == ["norm", *layer, *layer]
    assert torch.equal(logits, expected)
    assert not any("forward" in module.__dict__ for module in model.modules())
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected)


def test_what_was_touched_is_left_alone(pico_fox, monkeypatch):
    calls = twins(monkeypatch)
    model = pico_fox()
    seen = []
    model.model.layers[1].input_layernorm.register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad(), fused.fused_layers(model) as found:
        model(torch.arange(2, 20)[None])
    assert found == 2 + 4  # the MLPs, and norms one by one
    assert calls == ["norm", "norm", "silu", "norm", "silu", "norm"]
    assert seen == [1]

    class Own(type(model.model.norm)):
        def forward(self, hidden_states):
            return hidden_states * 2

    model = pico_fox()
    model.model.norm.__class__ = Own
    with fused.fused_layers(model) as found:
        assert found == 2 + 4
    model.model.layers[0].mlp.act_fn = nn.GELU()
    with fused.fused_layers(model) as found:
        assert found == 1 + 4


@pytest.mark.parametrize(("name", "left"), [("LlamaMLP", 3), ("LlamaRMSNorm", 2), ("LlamaDecoderLayer", 7)])
def test_a_patched_class_is_left_alone(pico_fox, monkeypatch, name, left):
    plain = getattr(modeling_llama, name)
    own = plain.forward
    monkeypatch.setattr(plain, "forward", lambda self, *args, **kwargs: own(self, *args, **kwargs))
    model = pico_fox()
    with fused.fused_layers(model) as found:
        assert found == left
        assert not any("forward" in x.__dict__ for x in model.modules() if type(x) is plain)


def test_hooks_of_all_modules_take_transformers_loop(pico_fox, monkeypatch):
    monkeypatch.setattr(captured, "DEVICES", ("cpu",))
    model = pico_fox()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        model.generate(torch.arange(2, 20)[None], max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=1)
    finally:
        handle.remove()
    assert "hooks on all modules" in model.decoded_by


def test_prompt_and_captured_steps_run_fused_layers(pico_fox, monkeypatch):
    model, ids = pico_fox(), torch.arange(2, 20)[None]
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
    expected = model.generate(ids, **options)
    calls = twins(monkeypatch)
    monkeypatch.setattr(captured, "DEVICES", ("cpu",))
    assert torch.equal(model.generate(ids, **options), expected)
    assert len(calls) == 12 * 7  # the prompt and eleven tokens


def test_streamers_and_processors_find_the_model_as_it_was(pico_fox, monkeypatch):
    """They run between prompt and steps: fused layers alone give other values, and other threads would wait."""
    monkeypatch.setattr(captured, "DEVICES", ("cpu",))
    model, seen = pico_fox(), []

    def free() -> bool:
        return fused.ALONE.acquire(blocking=False) and fused.ALONE.release() is None

    def look(_, scores=None):
        with ThreadPoolExecutor(1) as other:
            seen.append(other.submit(free).result() and not any("forward" in vars(x) for x in model.modules()))
        return scores

    streamer = SimpleNamespace(put=look, end=lambda: None)
    ids, options = torch.arange(2, 20)[None], {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    calls = twins(monkeypatch)
    model.generate(ids, **options, pad_token_id=1, streamer=streamer, logits_processor=LogitsProcessorList([look]))
    assert len(calls) == 8 * 7
    assert seen == [True] * 17  # the prompt and eight tokens told, eight chosen


def test_another_thread_runs_the_layers_own(pico_fox):
    """It may come between two layers, one of which left its part of the sum to the other."""
    model = pico_fox()
    x, ids = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(1)), torch.arange(5)[None]

    @torch.no_grad()
    def run():
        return model.model.layers[0](x, position_embeddings=model.model.rotary_emb(x, ids))

    expected = run()
    with fused.fused_layers(model), ThreadPoolExecutor(1) as other:
        assert not torch.equal(run(), expected)  # without what its MLP adds
        assert torch.equal(other.submit(run).result(), expected)
