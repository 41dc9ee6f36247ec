"""A model whose layers use the fused kernels against the same model without them, in Triton's interpreter."""

import functools
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


KV = {**STRETCHED, "gate_heads": "kv", "half_life": (2.0, 30.0), "horizon": 3.0, "sink_tokens": 2}
IN_ONE = {"append": 1, "split": 1, "merge": 1, "add_norm": 2, "silu_mul": 1}
APART = IN_ONE | {"gate_rows": 1, "rotary": 1}
# name: (family, config, spec, kernels of a layer in a captured step, torch's operators in it beside views)
STEPS: dict[str, tuple[str, dict, dict, dict[str, int], dict[str, int]]] = {
    "gates of kv heads": ("llama", {}, KV, IN_ONE, {"mm": 7}),
    "a gate to a head": ("llama", {}, {**PARTIAL, "sink_tokens": 1}, IN_ONE, {"mm": 7}),
    "biases": ("qwen2", {}, KV, IN_ONE, {"mm": 4, "addmm": 3}),
    "window": ("mistral", {"sliding_window": 9}, {"rope": "keep"}, IN_ONE, {"mm": 7}),
    "no rope": ("llama", {}, {"rope": "drop", "sink_tokens": 2}, IN_ONE, {"mm": 7}),
    "bounded gates": ("llama", {}, {**PARTIAL, "max_half_life": 8}, IN_ONE, {"mm": 7}),
    "own norms": ("qwen3", {}, PARTIAL, APART | {"add_norm": 4}, {"mm": 7}),
}


def run_steps(name: str) -> dict[str, Any]:
    """How far logits of captured decoding's steps are from the whole text's, and what a layer of a step runs."""
    import collections

    import torch
    from fox_kernels.decoding import append, elementwise, planner
    from fox_kernels.layer import gate, rotary
    from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
    from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

    import retrofox
    from retrofox.acceleration import captured_step, cuda_graph_decoding
    from retrofox.acceleration.growing_cache import CACHE

    kernels: collections.Counter[str] = collections.Counter()
    operators: collections.Counter[str] = collections.Counter()

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if not function.is_view and not function.__name__.startswith(("empty", "new_empty", "_unsafe_view")):
                operators[function.__name__.split(".")[0]] += 1
            return function(*args, **kwargs or {})

    def counted(launch: Any) -> Any:
        def counting(kernel: Any, *args: Any, **named: Any) -> None:
            kernels.update([kernel.fn.__name__.removesuffix("_kernel")])
            with _disable_current_modes():  # the interpreter copies tensors
                launch(kernel, *args, **named)

        return counting

    modules: Any = append, elementwise, planner, gate, rotary
    for module in modules:
        module.launch = counted(module.launch)
    cuda_graph_decoding.DEVICES, cuda_graph_decoding.LEAST_TOKENS, captured_step.LEAST_CAPACITY = ("cpu",), 2, 32
    step, logits = captured_step.Decoding._run, []

    def noted(self: Any, sampler: Any) -> None:
        kernels.clear()
        operators.clear()
        with Operators():
            step(self, sampler)
        logits.append(self.logits)

    family, config, spec, *_ = STEPS[name]
    ran: list[tuple[Any, Any]] = []
    for layers in (2, 3):
        torch.manual_seed(0)
        shape = PICO | config | {"num_hidden_layers": layers}
        base = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape))
        model: Any = retrofox.convert(base, fox=retrofox.FoxSpec(**spec)).eval()
        for key, parameter in model.named_parameters():
            if retrofox.anatomy.is_new_tensor(key):
                parameter.data.add_(torch.randn(parameter.shape) * 0.3)
        logits.clear()
        captured_step.Decoding._run = noted
        ids, cache = torch.randint(2, 64, (2, 12)), {CACHE: DynamicCache(config=model.config)}
        text = model.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=None, **cache)
        captured_step.Decoding._run = step
        ran.append((kernels.copy(), operators.copy()))
        with torch.no_grad():
            whole = model(text, use_cache=False).logits[:, 12:-1]
        error = (torch.stack(logits, 1) - whole).abs().max().item()
    return {"error": error, "kernels": ran[1][0] - ran[0][0], "operators": ran[1][1] - ran[0][1]}


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


def in_interpreter() -> dict[str, Any]:
    found = {name: run(name) for name in CASES}
    return found | {f"steps, {name}": run_steps(name) for name in STEPS}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_fused_layers_are_the_eager_ones(name, report):
    assert report[name]["logits"] < 2e-6
    assert report[name]["gradient"] < 2e-4
    assert report[name]["called"] == CASES[name][-1]
    assert report[name]["called in mode original"] == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", STEPS)
def test_a_captured_step_of_a_layer_is_few_launches(name, report):
    found = report[f"steps, {name}"]
    assert found["error"] < 1e-5
    assert (found["kernels"], found["operators"]) == STEPS[name][3:]
