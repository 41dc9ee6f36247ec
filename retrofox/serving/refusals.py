"""Requests to vLLM that a converted model can't serve: one sentence each, raised before weights load."""

from __future__ import annotations

from typing import Any

from retrofox.config_values import rope_types
from retrofox.fox_spec import FoxSpec

NATIVE = {
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma": ("gemma", "GemmaForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3_text": ("gemma3", "Gemma3ForCausalLM"),
    "mixtral": ("mixtral", "MixtralForCausalLM"),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
}
"""model_type of the base -> vLLM's module and class of it, whose attention the plug-in gives lanes."""
THROUGH_TRANSFORMERS = ("olmo2", "smollm3")
"""model_types whose base vLLM serves through its Transformers backend, and the plug-in so too."""
SERVED = (*NATIVE, *THROUGH_TRANSFORMERS)
STATIC_ROPE = ("default", "linear", "llama3", "yarn", "proportional")
"""Kinds of RoPE whose frequencies don't change with the length of the text, so that faded ones fit one table."""


def refusal(base_type: str, spec: FoxSpec, paged: bool = True) -> str | None:
    """Why a converted model can't be served, in one line, or None; `paged`: by our own kernels, as on an NVIDIA GPU."""
    if base_type not in SERVED:
        return f"converted {base_type} models are not served yet; served are: {', '.join(SERVED)}"
    shifts = [part for part in spec.pro if part.endswith("-shift")]
    if shifts:
        needs = f"{' and '.join(shifts)} need{'s' if len(shifts) == 1 else ''}"
        return f"{needs} each token's unshifted predecessor, which a paged cache doesn't keep"
    if spec.horizon is not None and not paged:
        return (
            f"horizon {spec.horizon:g} is served on NVIDIA GPUs only: elsewhere vLLM's own kernels attend, which can't "
            "mask what lies beyond it; use `retrofox generate` here"
        )
    return None


def settings_refusal(vllm_config: Any) -> str | None:
    """Why gates would be lost or wrong under vLLM's settings, in one line; None where they are served."""
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    dtype, ranks = str(model.dtype).removeprefix("torch."), parallel.tensor_parallel_size
    heads, kv_heads = model.hf_config.num_attention_heads, model.hf_config.num_key_value_heads
    if dtype not in ("bfloat16", "float32"):
        return f"gates need bfloat16 or float32, got {dtype}: add --dtype bfloat16"
    if cache.cache_dtype not in ("auto", dtype):
        return (
            f"a {cache.cache_dtype} cache would round the gates' sums away: leave --kv-cache-dtype at auto "
            f"(the model's {dtype})"
        )
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        return f"{heads} query heads and {kv_heads} kv heads don't split over {ranks} ranks of tensor parallelism"
    if max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1:
        return "context parallelism spreads one text's cache over ranks, where its running sum of gates has gaps"
    if vllm_config.speculative_config is not None:
        return "speculative decoding is not proven with gates: leave --speculative-config out"
    if vllm_config.quant_config is not None:
        return "quantised weights (AWQ, compressed-tensors, fp8, ...) are not proven with gates: serve it in bfloat16"
    if vllm_config.lora_config is not None:
        return "adapters loaded at run time leave the gates they were trained with behind: `retrofox merge` them first"
    if parallel.enable_dbo:
        return "microbatches (--enable-dbo) split what the running sum of gates reads: leave them off"
    if model.runner_type != "generate":
        return "only text generation is served, no pooling or embedding"
    return None


def rope_refusal(config: Any, spec: FoxSpec) -> str | None:
    """Why the rotary dial can't be set for this kind of RoPE, or None."""
    if spec.rope == "keep" and not spec.layer_max_wavelength:
        return None
    kinds = rope_types(config) - set(STATIC_ROPE)
    if not kinds:
        return None
    return f"RoPE of kind {', '.join(sorted(kinds))} changes with the text's length, so its pairs can't be faded here"
