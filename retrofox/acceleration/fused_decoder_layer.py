"""Generation with half the launches: norms, residual sums and gated MLPs of plain decoder layers, a kernel each.

Everything here is an optimisation of what transformers' layers do anyway, for layers whose forward reads
as Llama's does and that nothing has touched (hooks, adapters in a norm, quantised norms). Others are
left alone.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers.activations import SiLUActivation
from transformers.models.llama import modeling_llama

from retrofox.acceleration.fused_projections import shipped, untouched
from retrofox.acceleration.growing_cache import CACHE
from retrofox.acceleration.installed_kernels import add_norm, silu_mul, takes


def written_like(module: nn.Module, plain: type) -> bool:
    """Whether a module runs its class's forward, one of transformers' files that reads as that of `plain`."""
    forward, other = type(module).forward, plain.forward  # type: ignore[attr-defined]
    return untouched(module) and shipped(forward) and shipped(other) and source(forward) == source(other)


@functools.cache
def source(function: Any) -> str:
    """A function's text, without what decorates it."""
    text = inspect.getsource(inspect.unwrap(function))
    return text[text.index("def ") :]


def normed(norm: Any, x: torch.Tensor, new: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + new, its norm)."""
    if takes(x, norm.weight) and (new is None or (new.dtype == x.dtype and new.shape == x.shape)):
        return add_norm(x, new, norm.weight, norm.variance_epsilon)
    x = x if new is None else x + new
    return x, type(norm).forward(norm, x)


class ResidualFusion:
    """Fuses each residual sum of a decoder's plain layers into the norm that reads it.

    A layer stores its MLP's output here instead of adding it; the next layer's first norm, or the last norm, adds it.
    """

    def __init__(self, last: Any):
        self.last = last
        self.pending: torch.Tensor | None = None

    def layer(self, module: Any) -> Any:
        def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            new, self.pending = self.pending, None
            x, h = normed(module.input_layernorm, hidden_states, new)
            del hidden_states, new  # a long prompt's need not be there during its attention and MLP
            attended, _ = module.self_attn(hidden_states=h, **dict(zip(ORDER, args, strict=False)), **kwargs)
            x, h = normed(module.post_attention_layernorm, x, attended)
            del attended
            self.pending = module.mlp(h)
            return x

        return forward

    def end(self, hidden_states: torch.Tensor) -> torch.Tensor:
        new, self.pending = self.pending, None
        return normed(self.last, hidden_states, new)[1]


ORDER = ("attention_mask", "position_ids", CACHE, "use_cache", "position_embeddings")
"""Arguments of a decoder layer after the hidden states."""


def _norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    return normed(module, x)[1]


def gated_mlp(module: Any) -> Any:
    """The forward of a Llama MLP with SiLU and product in one kernel."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        gate, up = module.gate_proj(x), module.up_proj(x)
        fits = takes(gate) and up.shape == gate.shape and up.dtype == gate.dtype and up.is_contiguous()
        h = silu_mul(gate, up) if fits else module.act_fn(gate) * up
        del gate, up
        return module.down_proj(h)

    return forward


ALONE = threading.RLock()
"""Held by the one thread that changes modules or captures; others run the modules' own forwards meanwhile."""


def for_this_thread(module: Any, forward: Any) -> Any:
    """The fused `forward` on the calling thread alone: other threads may be in the middle of the model."""
    own, thread = type(module).forward, threading.get_ident()

    def chosen(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs) if threading.get_ident() == thread else own(module, *args, **kwargs)

    return chosen


@contextlib.contextmanager
def fused_layers(model: Any) -> Iterator[int]:
    """Inside, plain layers of a causal model run with fewer launches; yields how many modules were found.

    Residual fusion needs every layer, and the last norm, to be fusable.
    """
    with ALONE:
        changed = _fused_forwards(model)
        try:  # Ctrl-C may come while they are put in
            for module, forward in changed.items():
                module.forward = for_this_thread(module, forward)
            yield len(changed)
        finally:
            take_out: Any = dict.pop
            # by functions in C alone, between which Ctrl-C can't come
            list(map(take_out, map(vars, changed), itertools.repeat("forward"), itertools.repeat(None)))


def _is_silu(activation: Any) -> bool:
    return type(activation) in (nn.SiLU, SiLUActivation) and untouched(activation) and shipped(type(activation).forward)


def _fused_forwards(model: Any) -> dict[Any, Any]:
    """Module -> its forward with fewer launches."""
    decoder = model.get_decoder()
    layers, last = list(decoder.layers), getattr(decoder, "norm", None)
    changed: dict[Any, Any] = {}
    for layer in layers:
        mlp = getattr(layer, "mlp", None)
        if mlp is not None and written_like(mlp, modeling_llama.LlamaMLP) and _is_silu(mlp.act_fn):
            changed[mlp] = gated_mlp(mlp)
    norms = [getattr(x, name, None) for x in layers for name in ("input_layernorm", "post_attention_layernorm")]
    if all(written_like(x, modeling_llama.LlamaDecoderLayer) for x in layers) and all(
        x is not None and written_like(x, modeling_llama.LlamaRMSNorm) for x in (*norms, last)
    ):
        fusion = ResidualFusion(last)
        changed |= {layer: fusion.layer(layer) for layer in layers} | {last: fusion.end}
        alone = [x for layer in layers for x in layer.self_attn.modules()]
    else:
        alone = list(decoder.modules())
    for module in alone:
        if written_like(module, modeling_llama.LlamaRMSNorm):
            changed[module] = functools.partial(_norm, module)
    return changed
