"""What vLLM can be asked for and a converted model can't give: each case is one sentence, said before weights load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
CACHES = ("auto", "bfloat16", "float32")


@dataclass
class Settings:
    """What of vLLM's configuration decides whether a converted model can run under it."""

    dtype: str = "bfloat16"
    cache_dtype: str = "auto"
    tensor_parallel: int = 1
    context_parallel: int = 1
    speculative: bool = False
    lora: bool = False
    microbatches: bool = False
    generates: bool = True
    paged: bool = True
    """Whether our own kernels attend, as on an NVIDIA GPU, or vLLM's, as elsewhere."""


def refusal(base_type: str, spec: FoxSpec, heads: int, kv_heads: int, settings: Settings) -> str | None:
    """Why a converted model can't be served with these settings, in one line; None if it can."""
    if base_type not in SERVED:
        return f"converted {base_type} models are not served yet; served are: {', '.join(SERVED)}"
    shifts = [part for part in spec.pro if part.endswith("-shift")]
    if shifts:
        return f"{' and '.join(shifts)} needs each token's unshifted predecessor, which a paged cache doesn't keep"
    if settings.dtype.removeprefix("torch.") not in CACHES[1:]:
        return f"gates need bfloat16 or float32, got {settings.dtype}: add --dtype bfloat16"
    dtype = settings.dtype.removeprefix("torch.")
    if settings.cache_dtype not in ("auto", dtype):
        return (
            f"a {settings.cache_dtype} cache would round the gates' sums away: leave --kv-cache-dtype at auto "
            f"(the model's {dtype})"
        )
    if spec.horizon is not None and not settings.paged:
        return (
            f"horizon {spec.horizon:g} is served on NVIDIA GPUs only: elsewhere vLLM's own kernels attend, which can't "
            "mask what lies beyond it; use `retrofox generate` here"
        )
    ranks = settings.tensor_parallel
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        return f"{heads} query heads and {kv_heads} kv heads don't split over {ranks} ranks of tensor parallelism"
    if settings.context_parallel > 1:
        return "context parallelism spreads one text's cache over ranks, where its running sum of gates has gaps"
    if settings.speculative:
        return "speculative decoding is not proven with gates: leave --speculative-config out"
    if settings.lora:
        return "adapters loaded at run time leave the gates they were trained with behind: `retrofox merge` them first"
    if settings.microbatches:
        return "microbatches (--enable-dbo) split what the running sum of gates reads: leave them off"
    if not settings.generates:
        return "only text generation is served, no pooling or embedding"
    return None


def rope_refusal(config: Any, spec: FoxSpec) -> str | None:
    """Why the rotary dial can't be set for this kind of RoPE, or None."""
    if spec.rope == "keep" and not spec.layer_max_wavelength:
        return None
    parameters = getattr(config, "rope_parameters", None) or {}
    sets = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    kinds = {values.get("rope_type", "default") for values in sets} - set(STATIC_ROPE)
    if not kinds:
        return None
    return f"RoPE of kind {', '.join(sorted(kinds))} changes with the text's length, so its pairs can't be faded here"
