"""A model whose layers use the fused kernels against the same model without them, in Triton's interpreter."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed here")

PICO = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "pad_token_id": 1, "bos_token_id": 0,
    "eos_token_id": 1,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
PARTIAL = {"rope": "partial", "max_wavelength": 40.0}
STRETCHED = {"rope": "interpolate", "rope_factor": 4.0}
# name: (family, config, spec, how, the fused functions that a training step calls)
CASES: dict[str, tuple[str, dict, dict, str, list[str]]] = {
    "partial": ("llama", {}, PARTIAL, "plain", ["entry"]),
    "drop": ("llama", {}, {"rope": "drop", "sink_tokens": 0}, "plain", ["entry"]),
    "interpolate": ("llama", {}, STRETCHED, "plain", ["entry"]),
    "yarn": ("llama", {"rope_parameters": YARN}, PARTIAL, "plain", ["entry"]),
    "gate of biases": ("llama", {}, {**PARTIAL, "gate": "bias"}, "plain", ["rotary"]),
    "biases": ("qwen2", {}, PARTIAL, "plain", ["entry"]),
    "own norms": ("qwen3", {}, PARTIAL, "plain", ["gate", "rotary"]),
    "one projection": ("phi3", {}, PARTIAL, "plain", ["gate", "rotary"]),
    "interleaved pairs": ("cohere", {}, PARTIAL, "plain", ["gate"]),
    "everything of Pro": ("llama", {}, {**PARTIAL, "pro": "all"}, "plain", ["gate", "head_norm", "rotary", "shift"]),
    "norm and gate": ("llama", {}, {**PARTIAL, "pro": "output-norm,output-gate"}, "plain", ["entry", "head_norm"]),
    "documents": ("llama", {}, {**PARTIAL, "pro": "k-shift"}, "documents", ["gate", "rotary", "shift"]),
    "recomputed": ("llama", {}, PARTIAL, "recomputed", ["entry"]),
    "recomputed, reentrant": ("llama", {}, PARTIAL, "reentrant", ["entry"]),
    "adapters": ("llama", {}, PARTIAL, "lora", ["gate", "rotary"]),
    "hooked": ("llama", {}, PARTIAL, "hooked", ["gate", "rotary"]),
    "gates hooked": ("llama", {}, PARTIAL, "gates hooked", ["entry"]),
    "gates of kv heads": ("llama", {}, {**PARTIAL, "gate_heads": "kv"}, "plain", ["entry"]),
    "gates of kv heads hooked": (
        "llama",
        {},
        {**PARTIAL, "gate_heads": "kv", "max_half_life": 64},
        "gates hooked",
        ["entry"],
    ),
    "frozen": ("llama", {}, PARTIAL, "frozen", ["entry"]),
}


class Doubled:
    """A hook on a gate's output, of the kind that fused projections call themselves."""

    output_hook = True

    def __call__(self, module: Any, args: Any, log_f: Any) -> Any:
        return log_f * 2


def run(name: str) -> dict[str, Any]:
    """Largest differences with and without the fused functions, and which of them a step called."""
    import fox_kernels
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import retrofox
    from retrofox.acceleration import fused_projections as fused
    from retrofox.model import modeling_fox as scores

    # the kernels have tests of their own
    scores.forgetting_attention = functools.partial(fox_kernels.forgetting_attention, backend="chunked")
    family, config, spec, how, _ = CASES[name]
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **PICO, **config))
    model: Any = retrofox.convert(base, fox=retrofox.FoxSpec(half_life=(2.0, 200.0), **spec)).train()
    for key, parameter in model.named_parameters():
        if retrofox.anatomy.is_new_tensor(key):
            parameter.data.add_(torch.randn(parameter.shape) * 0.3)
    ids = torch.randint(2, 64, (2, 30))
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids, "use_cache": False}
    if how == "documents":
        batch["position_ids"] = torch.cat((torch.arange(11), torch.arange(19))).expand(2, -1)
    if how in ("recomputed", "reentrant"):
        model.gradient_checkpointing_enable({"use_reentrant": how == "reentrant"})
        model.enable_input_require_grads()
    if how == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    if how == "hooked":
        for _, module in retrofox.anatomy.attentions(model):
            module.q_proj.register_forward_hook(lambda module, args, output: output * 2)
    if how == "gates hooked":
        for _, module in retrofox.anatomy.attentions(model):
            module.forget_gate.register_forward_hook(Doubled())
    if how == "frozen":
        for key, parameter in model.named_parameters():
            parameter.requires_grad_(retrofox.anatomy.is_new_tensor(key))
    called: set[str] = set()

    def counted(key: str, function: Any) -> Any:
        return lambda *args: (called.add(key), function(*args))[1]

    for key in ("entry", "gate", "head_norm", "rotary", "shift"):
        setattr(fused, key, counted(key, getattr(fused, key)))
    found = []
    for available in (lambda x: False, fused.available):
        fused.available = available
        called.clear()
        model.zero_grad()
        output = model(**batch)
        output.loss.backward()
        grads = {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}
        found.append((output.logits.detach(), grads))
    step = sorted(called)
    (logits, grads), (fused_logits, fused_grads) = found
    assert grads.keys() == fused_grads.keys()
    gradient = max(((grads[k] - fused_grads[k]).norm() / (grads[k].norm() + 1e-4)).item() for k in grads)
    called.clear()
    with torch.no_grad(), retrofox.anatomy.attention_mode(getattr(model, "base_model", model), "original"):
        model(input_ids=ids)
    return {
        "logits": (logits - fused_logits).abs().max().item(),
        "gradient": gradient,
        "called": step,
        "called in mode original": sorted(called),
    }


@pytest.fixture(scope="module")
def report():
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parents[1] / "kernels" / "interpreted.py"), __file__],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_fused_layers_are_the_eager_ones(name, report):
    assert report[name]["logits"] < 2e-6
    assert report[name]["gradient"] < 2e-4
    assert report[name]["called"] == CASES[name][-1]
    assert report[name]["called in mode original"] == []


if __name__ == "__main__":
    print(json.dumps({name: run(name) for name in CASES}))
