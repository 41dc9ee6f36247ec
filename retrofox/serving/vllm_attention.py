"""Wraps an attention backend of vLLM to carry the gate sums.

On a GPU (`paged_attention.PagedImpl`) our own kernels compute the gates from the states that come beside the
keys, keep c in the cache beside keys and values, and attend to what decodes; `forgetting_attention` reads long pieces
of text (`prefill.py`). On a CPU (`lanes.LanesImpl`) queries, keys and values get lanes, and vLLM's own kernels do the
rest. log f becomes c where vLLM calls the backend: only there is a token's place in its text known.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.utils.torch_utils import _encode_layer_name
from vllm.v1.attention.backend import AttentionCGSupport

from retrofox.serving.lanes import LanesImpl, plan_lanes
from retrofox.serving.paged_attention import PagedImpl
from retrofox.serving.paged_rows import Paged
from retrofox.serving.prefill import StepBuilder
from retrofox.serving.vllm_blocks import ReachingAttention

BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN")
"""Backends whose cache is known to be (blocks, kv heads, tokens, key and value), or on a CPU keys before values."""


def with_gates(native: Attention, gate: Any, exempt_tokens: int, horizon: float | None, reach: int | None) -> Attention:
    """A vLLM attention like `native`, under its name, of heads that have room for c; its `impl.layout` says how.

    Args:
        gate: the layer's forget gate, with a weight (H, hidden) and a bias (H,) in float32 where it reads the states,
            which our own kernels do by themselves.
        horizon: nats of decay at which a key is masked; lanes can't, so `refusal` lets only a GPU have one.
        reach: `retrofox.anatomy.reach` of the layer.
    """
    config = get_current_vllm_config()
    chosen, paged = native.attn_backend, current_platform.is_cuda()
    if chosen.get_name() not in BACKENDS or chosen.forward_includes_kv_cache_update:
        raise ValueError(
            f"the attention backend {chosen.get_name()} has a cache layout without room for the gates: add "
            "--attention-backend FLASH_ATTN or TRITON_ATTN"
        )
    dtype, groups = native.kv_cache_torch_dtype, native.num_heads // native.num_kv_heads
    softcap = getattr(native.impl, "logits_soft_cap", None) or None
    layout: Any = plan_lanes(groups, native.head_size, dtype, chosen.supports_head_size)
    assert paged or horizon is None
    if paged:
        layout = Paged(groups, native.head_size, dtype)
    context: Any = config.compilation_config.static_forward_context
    del context[native.layer_name]
    made = ReachingAttention(
        native.num_heads,
        native.head_size + (layout.extra if paged else layout.width),
        native.impl.scale,  # type: ignore[attr-defined]
        num_kv_heads=native.num_kv_heads,
        cache_config=config.cache_config,
        logits_soft_cap=softcap,
        per_layer_sliding_window=native.sliding_window,
        prefix=native.layer_name,
        attn_backend=_backend(chosen, paged, softcap is not None),
    )
    impl: Any = made.impl
    impl.layout, impl.gate, impl.reach = layout, gate if paged and hasattr(gate, "weight") else None, reach
    impl.options = {
        "scale": impl.scale,
        "window": native.sliding_window,
        "sink": exempt_tokens,
        "softcap": softcap,
        "horizon": horizon,
    }
    return made


def attend(
    attention: Attention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, gates: torch.Tensor
) -> torch.Tensor:
    """Forgetting Attention (T, H, D) of an attention that `with_gates` made.

    Shapes: query (T, H, D), key, value (T, Hkv, D), of other widths than the attention's own heads; gates: the states
    (T, hidden) that its `impl.gate` reads, where it has one, else log f (T, H) float32. They travel as vLLM's
    `output_scale`, a tensor for backends that quantize their outputs.
    """
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    name = _encode_layer_name(attention.layer_name)
    torch.ops.vllm.unified_attention_with_output(query, key, value, output, name, gates)
    return output


@functools.cache
def _backend(native: Any, paged: bool, softcap: bool) -> Any:
    """The backend with an implementation that knows c; no CUDA graph holds what `forgetting_attention` reads."""
    impl, builder = native.get_impl_cls(), native.get_builder_cls()
    way = PagedImpl if paged else LanesImpl
    fox = type(f"{way.__name__}{impl.__name__}", (way, impl), {"__module__": __name__})
    every = softcap and not paged  # `forgetting_attention` reads every request
    most = (AttentionCGSupport.UNIFORM_BATCH, builder._cudagraph_support)
    changes: dict[str, Any] = {
        "_cudagraph_support": min(most, key=lambda support: support.value),
        "supports_update_block_table": False,  # `Step` knows the table too
        "paged": paged,
        "every": every,
        "__module__": __name__,
    }
    made = type(f"Fox{builder.__name__}", (StepBuilder, builder), changes)
    body = {
        "get_impl_cls": staticmethod(lambda: fox),
        "get_builder_cls": staticmethod(lambda: made),
        "forward_includes_kv_cache_update": True,
        "__module__": __name__,
    }
    return type(f"{way.__name__}{native.__name__}{'Softcap' if every else ''}", (native,), body)
