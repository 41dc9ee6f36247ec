"""Fast versions of what a converted model's code does: `attach` puts them into that code.

A checkpoint's modeling_fox.py is readable and needs no retrofox. Where retrofox is installed it calls `attach`, which
replaces functions of that module by the ones here. Each falls back to the one it replaces wherever it doesn't serve:
without a GPU, without Triton, for layers that something has touched. Nothing here imports the model's code, so the file
that travels with a checkpoint and the installed one are served alike.
"""

from __future__ import annotations

import contextlib
from typing import Any

from fox_kernels import forgetting_attention
from transformers import DynamicCache

from retrofox.acceleration import attention_dispatch, fused_attention, growing_cache
from retrofox.acceleration.cuda_graph_decoding import decode, forgets
from retrofox.acceleration.forgetting_cache import PAGE, ForgettingCache
from retrofox.acceleration.fused_decoder_layer import fused_layers

INTERFACE = 1
"""The `ACCELERATION` of a modeling_fox.py whose names and arguments are those that `attach` replaces."""


def attach(code: Any) -> None:
    """Makes a modeling_fox module fast; modules with another interface stay as they are."""
    if code.ACCELERATION != INTERFACE:
        return
    code.forgetting_attention = forgetting_attention
    code.BACKENDS.update(attention_dispatch.backends(code))
    code.choose = attention_dispatch.choosing(code.choose)
    code.with_gates = growing_cache.with_gates(code.with_gates)
    code.ForgetGate.log_f = fused_attention.gate(code.ForgetGate.log_f)
    code.HeadNorm.forward = fused_attention.head_norm(code.HeadNorm.forward)
    code.OutputGate.forward = fused_attention.output_gate(code.OutputGate.forward)
    code.Shift.forward = fused_attention.shift(code.Shift.forward)
    code.RotaryFade.forward = fused_attention.shared_edit(code.RotaryFade.forward)
    code.attention_class = fused_attention.with_copies(code.attention_class)
    code.FoxMixin.run = fused_attention.run(code)
    code.FoxMixin.finish = fused_attention.finish(code.FoxMixin.finish)
    sample = code.FoxPreTrained

    def _sample(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Greedy decoding and sampling of `generate`, replayed from a CUDA graph where it can be."""
        return decode(self, super(sample, self)._sample, *args, **kwargs)

    def _prefill(self: Any, input_ids: Any, config: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The prompt with fewer launches, before `decode`'s steps; processors, criteria and streamers run outside."""
        first = hasattr(inputs.get(code.CACHE), "tokens_to_reserve")
        with fused_layers(self) if first else contextlib.nullcontext():
            return super(sample, self)._prefill(input_ids, config, inputs, *args, **kwargs)

    def _prepare_cache_for_generation(self: Any, config: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Replaces a new plain cache by a ForgettingCache where `forgets` says so."""
        given = inputs.get(code.CACHE)
        result = super(sample, self)._prepare_cache_for_generation(config, inputs, *args, **kwargs)
        plain = given is None and config.cache_implementation is None and type(inputs.get(code.CACHE)) is DynamicCache
        drafted = max(config.prompt_lookup_num_tokens or 0, config.num_assistant_tokens or 0)  # may all be cropped
        if plain and drafted <= PAGE and forgets(self):
            inputs[code.CACHE] = ForgettingCache()
        return result

    sample._sample = _sample
    sample._prefill = _prefill
    sample._prepare_cache_for_generation = _prepare_cache_for_generation
