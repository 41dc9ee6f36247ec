"""One token through plain decoder layers on a CPU, in fewer operations than transformers' layers take.

A decoding step on a CPU reads every weight once; beside that, some hundred small operations a layer cost a few
microseconds each. Here a layer that is written like Llama's, byte for byte, and that nothing has touched takes its one
token through about thirty: norms of four operations, one rotary embedding for queries and keys, keys and gates written
where they belong, and the queries of a kv head as rows of one product, so that keys are read once for all of them.
Prompts, padded rows, other layers and other caches go through the layer's own forward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.llama import modeling_llama

from .cache import LOG_F_MIN, GrowingLayer
from .fused import turns_halves, untouched
from .lean import written_like

LN_2 = 0.6931471805599453


def plain(layer: Any) -> bool:
    """Whether a decoder layer does what `Step.layer` does and nothing else."""
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    if attention is None or mlp is None or not getattr(attention, "plain_forward", False):
        return False
    norms = [getattr(layer, name, None) for name in ("input_layernorm", "post_attention_layernorm")]
    linears = [getattr(attention, f"{name}_proj", None) for name in "qkvo"]
    linears += [getattr(mlp, f"{name}_proj", None) for name in ("gate", "up", "down")]
    if not all(type(x) is nn.Linear and untouched(x) for x in linears):
        return False
    if not written_like(layer, modeling_llama.LlamaDecoderLayer) or not written_like(mlp, modeling_llama.LlamaMLP):
        return False
    if not all(x is not None and written_like(x, modeling_llama.LlamaRMSNorm) for x in norms):
        return False
    gate, fade, config = attention.forget_gate, attention.rotary_fade, attention.config
    added = (attention.output_norm, attention.output_gate)
    return (
        untouched(attention)
        and attention.mode == "fox"
        and config._attn_implementation == "fox"
        and not attention.projects
        and attention.log_n is None
        and attention.window is None
        and all(x is None for x in added)
        and gate is not None
        and gate.weight is not None
        and not gate.record
        and untouched(gate)
        and (fade is None or (fade.stacked and turns_halves(type(attention).native_forward)))
    )


class Step:
    """Runs one token's pass through plain layers; what all layers of a step share is made once."""

    def __init__(self) -> None:
        self._turned: dict[Any, tuple[Any, torch.Tensor, torch.Tensor]] = {}

    def layer(self, module: Any) -> Any:
        """The forward of a plain decoder layer."""
        attention, native = module.self_attn, type(module).forward
        mlp, first, second = module.mlp, module.input_layernorm, module.post_attention_layernorm
        gate, up, down, act = mlp.gate_proj, mlp.up_proj, mlp.down_proj, mlp.act_fn

        def forward(
            hidden_states: torch.Tensor,
            attention_mask: torch.Tensor | None = None,
            position_ids: torch.Tensor | None = None,
            past_key_values: Any = None,
            use_cache: bool | None = False,
            position_embeddings: Any = None,
            **kwargs: Any,
        ) -> torch.Tensor:
            cache = _room_for_one(past_key_values, attention.layer_idx, hidden_states)
            if cache is None or attention_mask is not None or kwargs:
                return native(
                    module, hidden_states, attention_mask=attention_mask, position_ids=position_ids,
                    past_key_values=past_key_values, use_cache=use_cache, position_embeddings=position_embeddings,
                    **kwargs,
                )  # fmt: skip
            cos_sin = self._cos_sin(attention.rotary_fade, position_embeddings, position_ids)
            attended = attend(attention, norm(first, hidden_states), cos_sin, cache)
            x = F.linear(attended, attention.o_proj.weight, attention.o_proj.bias).add_(hidden_states)
            h = norm(second, x)
            h = act(F.linear(h, gate.weight, gate.bias)).mul_(F.linear(h, up.weight, up.bias))
            return F.linear(h, down.weight, down.bias).add_(x)

        return forward

    def _cos_sin(self, fade: Any, cos_sin: Any, position_ids: torch.Tensor | None) -> Any:
        """cos and sin (B or 1, 1, 1, D), the first half of sin negated; None where nothing turns."""
        if fade is None or fade.skippable or cos_sin is None:
            return None
        made = self._turned.get(fade._shared_by)
        if made is None or made[0] is not cos_sin[0]:
            cos, sin = fade(*cos_sin, position_ids)
            half = sin.shape[-1] // 2
            signed = torch.cat([-sin[..., :half], sin[..., half:]], -1)
            made = self._turned[fade._shared_by] = (cos_sin[0], cos[:, None], signed[:, None])
        return made[1:]


def norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    """LlamaRMSNorm: w * x / sqrt(mean(x^2) + eps), in float32; the size of a single row is a number of the host's."""
    if x.numel() != x.shape[-1]:
        return type(module).forward(module, x)
    wide = x.float()
    row = wide.view(-1)
    size = (torch.dot(row, row).item() / len(row) + module.variance_epsilon) ** -0.5
    return (wide * size).to(x.dtype) * module.weight


def attend(attention: Any, x: torch.Tensor, cos_sin: Any, cache: GrowingLayer) -> torch.Tensor:
    """Forgetting Attention of one token a row, before o_proj: x (B, 1, hidden) -> (B, 1, H D); the cache grows by it.

    The decay is formed as in `attention._masked`: from differences of two floats.
    """
    batch, width, heads = x.shape[0], attention.head_dim, attention.num_fox_heads
    q, k, v = (F.linear(x, p.weight, p.bias) for p in (attention.q_proj, attention.k_proj, attention.v_proj))
    kv = k.shape[-1] // width
    both = torch.cat([q.view(batch, kv, -1, width), k.view(batch, kv, 1, width)], 2)
    if cos_sin is not None:
        cos, sin = cos_sin
        both = torch.addcmul(both * cos, both.roll(width // 2, -1), sin)
    gate = attention.forget_gate
    log_f = F.logsigmoid(F.linear(x.float(), gate.weight, gate.bias)).clamp_min_(LOG_F_MIN)
    group = both.shape[2] - 1
    keys, values, sums = cache.append_one(both[:, :, group:], v.view(batch, kv, 1, width), log_f)
    decay = sums.narrow(2, sums.shape[2] - 1, 1) - sums
    bias = decay.narrow(1, 0, heads).add_(decay.narrow(1, heads, heads)).mul_(LN_2)
    if attention.sink_tokens:
        bias[..., : attention.sink_tokens].zero_()
    bias = bias.view(batch, kv, group, -1).to(x.dtype)
    out = F.scaled_dot_product_attention(both[:, :, :group], keys, values, attn_mask=bias, scale=attention.scaling)
    return out.reshape(batch, 1, heads * width)


def _room_for_one(cache: Any, index: int, x: torch.Tensor) -> Any:
    """The cache layer, if it is one that grows in place and takes one more token a row as it is."""
    if x.shape[1] != 1 or cache is None or index >= len(cache.layers) or getattr(cache, "offloading", False):
        return None
    layer = cache.layers[index]
    return layer if type(layer) is GrowingLayer and layer.takes_one(x) else None


@contextlib.contextmanager
def brief(model: Any) -> Iterator[int]:
    """Inside, decoding steps of a causal model's plain layers run in fewer operations; yields how many there are."""
    step = Step()
    found = [layer for layer in model.get_decoder().layers if plain(layer)]
    for layer in found:
        layer.forward = step.layer(layer)
    try:
        yield len(found)
    finally:
        for layer in found:
            del layer.forward
