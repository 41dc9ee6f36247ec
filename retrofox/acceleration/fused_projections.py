"""fox_kernels' fused functions in place of a native rotary embedding and native projections, on a GPU.

Without Triton and a GPU `available` is false and nothing else is called. A native function is replaced only where it
was found to compute the same thing.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

from retrofox.acceleration.installed_kernels import (
    append_step,
    appends_step,
    available,
    entry,
    gate,
    head_norm,
    rotary,
    shift,
)
from retrofox.acceleration.static_cache import SharedLength

__all__ = ["gate", "head_norm", "shift"]
ROTARY = "apply_rotary_pos_emb"
PLAIN = (
    *("LlamaAttention", "MistralAttention", "Qwen2Attention", "GraniteAttention", "MinistralAttention"),
    *("MixtralAttention", "ArceeAttention", "Ernie4_5Attention", "GemmaAttention", "Glm4Attention"),
    *("GraniteMoeAttention", "Qwen2MoeAttention"),
)
"""Attentions whose forward does nothing but project, turn, cache and attend."""


def with_rotary(forward: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any] | None:
    """A copy of a native attention forward with `replacement` for apply_rotary_pos_emb; None where it calls none.

    The copy has globals of its own, so nothing else sees the change. They carry no __name__: torch.compile would
    look names up in the module of that name and find the real function.
    """
    if not isinstance(forward, types.FunctionType):
        return None
    if [name for name in forward.__code__.co_names if name.startswith(ROTARY)] != [ROTARY]:  # or one of two, by config
        return None
    names = {**forward.__globals__, ROTARY: replacement}
    names.pop("__name__", None)
    copy = types.FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy


def unrotated(query: torch.Tensor, key: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """apply_rotary_pos_emb for layers that rotate no pair, or whose pairs are rotated already."""
    return query, key


def fused_rotary(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """apply_rotary_pos_emb by one kernel; cos and sin (B or 1, T, P) are those of the pairs that turn."""
    return rotary(query, key, cos, sin)


@functools.cache
def pairs_halves(native: Callable[..., Any]) -> bool:
    """Whether an apply_rotary_pos_emb pairs channel p with p + D/2, found by trying it."""
    with torch.device("cpu"), torch.no_grad():
        generator = torch.Generator().manual_seed(0)  # its own: looking must not move the random numbers of a run
        q, k = torch.randn(1, 3, 5, 8, generator=generator).split((2, 1), 1)
        angle = torch.randn(1, 5, 4, generator=generator).repeat(1, 1, 2)
        cos, sin = angle.cos() * 1.5, angle.sin() * 1.5
        try:
            found = native(q, k, cos, sin)
        except (TypeError, RuntimeError, ValueError):  # another signature or shape
            return False
        for x, y in zip((q, k), found, strict=True):
            half = torch.cat((-x[..., 4:], x[..., :4]), -1)
            if y.shape != x.shape or not torch.allclose(y, x * cos[:, None] + half * sin[:, None], atol=1e-6):
                return False
    return True


def is_plain(forward: Callable[..., Any]) -> bool:
    """Whether a native forward, from transformers' own file, is one of PLAIN."""
    name = forward.__qualname__.removesuffix(".forward")
    return forward.__module__.startswith("transformers.models.") and name in PLAIN and shipped(forward)


class Copies(NamedTuple):
    """A native attention forward, and copies with other rotary embeddings (None where it has none)."""

    forward: Callable[..., Any]
    unrotated: Callable[..., Any] | None
    fused: Callable[..., Any] | None
    plain: bool


@functools.cache
def copies_of(forward: Callable[..., Any]) -> Copies:
    """The copies of a native forward, made once; the fused rotary's only where the native one is the same function."""
    fused = with_rotary(forward, fused_rotary)
    if entry is None or (fused is not None and not pairs_halves(forward.__globals__[ROTARY])):  # type: ignore[attr-defined]
        fused = None
    return Copies(forward, with_rotary(forward, unrotated), fused, is_plain(forward))


LIBRARIES = tuple(library.__path__[0] for library in (torch, transformers))


def shipped(function: Any) -> bool:
    """Whether a function, and each that it wraps, is written in torch's or transformers' files: no patch."""
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is None or not code.co_filename.startswith(LIBRARIES):
            return False
        function = getattr(function, "__wrapped__", None)
    return True


class Projections:
    """Stands in for an attention module whose q, k and v (B, T, width) have been computed, turned and all.

    The native forward, without its rotary embedding, runs with this in place of `self`. log_f (B, T, H), or None where
    it is in the cache already.
    """

    def __init__(self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_f: torch.Tensor | None):
        self._module, self.log_f = module, log_f
        self.q_proj, self.k_proj, self.v_proj = lambda _: q, lambda _: k, lambda _: v

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def entered(module: Any, hidden_states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Projections:
    """The projections and gates of an `enterable` layer, by one function."""
    linears = [module.q_proj, module.k_proj, module.v_proj]
    bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
    gates, group = module.forget_gate, getattr(module, "heads_per_gate", 1)  # as in fused_attention
    weight, shift = gates.weight, gates.bias
    if group > 1:  # `entry` takes a gate per query head
        weight, shift = weight.repeat_interleave(group, 0), shift.repeat_interleave(group, 0)
    wq, wk, wv = (linear.weight for linear in linears)
    q, k, v, log_f = entry(hidden_states, wq, wk, wv, bias, weight, shift, cos, sin, module.head_dim)
    log_f = gates.bounded(log_f[..., ::group])
    if gates.record:
        gates.last_log_f = log_f.detach()
    for hook in gates._forward_hooks.values():  # of outputs alone, else this layer isn't `enterable`
        log_f = hook(gates, (hidden_states,), log_f)
    return Projections(module, q, k, v, log_f if group == 1 else log_f.repeat_interleave(group, -1))


def appended(module: Any, hidden_states: torch.Tensor, cos_sin: Any, cache: Any) -> Any:
    """A step's projections, appended to fixed buffers together with the gates, in one kernel; None where that can't be.

    The projections are the modules' own, adapters included.
    """
    layers, gates = getattr(cache, "layers", ()), module.forget_gate
    layer = layers[module.layer_idx] if module.layer_idx < len(layers) else None
    length: Any = getattr(layer, "length", None)
    if not isinstance(length, SharedLength) or module.mode != "fox" or module.projects or gates is None:
        return None
    if gates.weight is None or gates.record or not untouched(gates):
        return None
    bounds = None if gates.bounds is None else gates.derived.get(hidden_states.device)
    if gates.bounds is not None and bounds is None:
        return None
    buffers, offset = layer._buffers, layer.offset  # type: ignore[union-attr]
    if not appends_step(buffers, hidden_states, gates.weight, gates.bias):
        return None
    q, k, v = (linear(hidden_states).contiguous() for linear in (module.q_proj, module.k_proj, module.v_proj))
    given = (hidden_states, q, k, v, gates.weight, gates.bias, *cos_sin)
    turned = append_step(buffers, length.on_device, *given, bounds=bounds, offset=offset)
    return Projections(module, turned, k, v, None)


def enterable(module: Any, hidden_states: torch.Tensor) -> bool:
    """Whether `entered` may do this layer's projections: training, eager, linear layers, a data-dependent gate."""
    if not module.training or module.mode != "fox" or module.projects or torch.compiler.is_compiling():
        return False
    parts = module._modules
    gates, q, k, v = (parts.get(name) for name in ("forget_gate", "q_proj", "k_proj", "v_proj"))
    if not (type(q) is type(k) is type(v) is nn.Linear and gates is not None and available(hidden_states)):
        return False
    if gates.weight is None or gates.weight.dtype != torch.float32:
        return False
    if (q.bias is None) != (k.bias is None) or (k.bias is None) != (v.bias is None):
        return False
    device = hidden_states.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else q.weight.dtype
    whole = all(map(untouched, (q, k, v))) and untouched(gates, but_output_hooks=True)
    return hidden_states.dtype == dtype and hidden_states.dim() == 3 and whole


def untouched(module: nn.Module, but_output_hooks: bool = False) -> bool:
    """No hooks (FSDP, ZeRO and offloading gather weights by them), no replaced forward, ordinary tensors.

    Args:
        but_output_hooks: forward hooks with an attribute `output_hook` are allowed: they read no weights and return the
            output to go on with.
    """
    others = [hook for hook in module._forward_hooks.values() if not getattr(hook, "output_hook", False)]
    hooks = others if but_output_hooks else module._forward_hooks
    if hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return False
    for parameter in module._parameters.values():
        if not (parameter is None or type(parameter) is nn.Parameter or type(parameter) is torch.Tensor):
            return False
    return "forward" not in module.__dict__
