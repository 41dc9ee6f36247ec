"""Attention within a window, for baselines: sliding windows, and StreamingLLM's window with its first tokens kept.

    W window, S sinks kept; query i, keys j <= i; R(p) the rotation of position p, queries and keys not yet rotated

    sliding window   s_ij = (R(i) q_i) . (R(j) k_j)                    for i - j < W
    StreamingLLM     the same for j >= S and i - j < W, and
                     s_ij = (R(min(i, S + W - 1)) q_i) . (R(j) k_j)    for j < S

StreamingLLM numbers positions within its cache of S + W tokens, the query being the last of them. Distances within the
window are what they are in the text, so only the query that meets the sinks turns to another position: both parts run
over the whole text at once, and their softmaxes are joined by their log-sum-exps. The result is that of reading the
text token by token with such a cache. Nothing of size T x T is formed: the window runs in Forgetting Attention's
kernels with open gates.

Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", ICLR 2024, arXiv 2309.17453. Its code
counts the current token beside the window; here, as in transformers, the window holds it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from fox_kernels import forgetting_attention
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from retrofox.anatomy import decoder_layers, inner_model
from retrofox.model.fused import ROTARY
from retrofox.model.masks import first_visible, fox_mask
from retrofox.model.modeling_fox import ROTATES_IF
from retrofox.model.rope import layer_frequencies

Tensor = torch.Tensor


@dataclass(frozen=True)
class Windowed:
    """The attention function of one baseline, which transformers calls in every layer in place of its own.

    `turns` are, by layer, the functions that move queries (B, H, T, D) by (B, T) positions; empty without sinks.
    """

    window: int
    sinks: int = 0
    turns: tuple[Callable[[Tensor, Tensor], Tensor], ...] = ()

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        *,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """query (B, H, T, D), key and value (B, Hkv, S, D) -> (B, T, H, D) and no weights.

        Raises:
            ValueError: a mask other than left padding's, dropout, or sinks as parameters.
        """
        if attention_mask is not None and attention_mask.dim() == 4:
            raise ValueError("window and streaming baselines read whole texts, or left-padded ones: no other masks")
        if dropout or kwargs.get("s_aux") is not None:
            raise ValueError("window and streaming baselines have neither attention dropout nor sinks as parameters")
        query, key = query.to(value.dtype), key.to(value.dtype)
        length = key.shape[2] if attention_mask is None else min(key.shape[2], attention_mask.shape[1])
        start = None if attention_mask is None else first_visible(attention_mask)
        q, k, v = (x.transpose(1, 2) for x in (query, key[:, :, :length], value[:, :, :length]))
        options: dict[str, Any] = {"scale": scaling, "softcap": softcap}
        options["window"] = self.window if sliding_window is None else min(self.window, sliding_window)
        open_gates = torch.zeros(q.shape[0], length, q.shape[2], device=q.device)
        if not self.sinks:
            return forgetting_attention(q, k, v, open_gates, seq_start=start, **options), None  # type: ignore[return-value]
        if start is None:
            start = torch.zeros(q.shape[0], dtype=torch.int32, device=q.device)
        behind = (start + self.sinks).clamp_max(length)
        near, near_lse = forgetting_attention(q, k, v, open_gates, seq_start=behind, return_lse=True, **options)
        position = torch.arange(length - q.shape[1], length, device=q.device) - start[:, None]  # (B, T)
        moved = position.clamp_max(self.sinks + self.window - 1) - position
        turned = self.turns[module.layer_idx](query, moved)
        far, far_lse = _attend_sinks(turned, k, v, start, position, self.sinks, scaling, softcap)
        return _joined(near, near_lse, far, far_lse), None


def _attend_sinks(
    query: Tensor, k: Tensor, v: Tensor, start: Tensor, position: Tensor, sinks: int, scale: float | None, softcap: Any
) -> tuple[Tensor, Tensor]:
    """Attention of query (B, H, T, D) to the first `sinks` keys of each row: o (B, T, H, D), lse (B, T, H), float32."""
    B, H, T, D = query.shape
    place = start[:, None].long() + torch.arange(sinks, device=k.device)  # (B, sinks)
    index = place.clamp_max(k.shape[1] - 1)[:, :, None, None].expand(-1, -1, *k.shape[2:])
    k, v = (x.gather(1, index).float() for x in (k, v))  # (B, sinks, Hkv, D)
    grouped = query.float().view(B, k.shape[2], -1, T, D)
    scores = torch.einsum("bhgtd,bshd->bthgs", grouped, k).reshape(B, T, H, sinks) * (
        D**-0.5 if scale is None else scale
    )
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    visible = torch.arange(sinks, device=k.device) <= position[:, :, None, None]
    scores = scores.masked_fill(~visible, float("-inf"))
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None]).exp()
    out = torch.einsum("bthgs,bshd->bthgd", weights.view(B, T, k.shape[2], -1, sinks), v)
    return out.reshape(B, T, H, v.shape[-1]), lse


def _joined(one: Tensor, one_lse: Tensor, two: Tensor, two_lse: Tensor) -> Tensor:
    """The attention over two disjoint sets of keys, from the attention over each; 0 where neither has any."""
    lse = torch.logaddexp(one_lse, two_lse)
    lse = lse.masked_fill(lse == float("-inf"), 0.0)
    out = one.float() * (one_lse - lse).exp()[..., None] + two * (two_lse - lse).exp()[..., None]
    return out.to(one.dtype)


def use_window(model: PreTrainedModel, name: str, window: int, sinks: int = 0) -> None:
    """Runs every attention layer of an unconverted model within `window` tokens, and the first `sinks`; in place.

    Args:
        name: of the attention function, as it is registered and as config._attn_implementation then has it.

    Raises:
        ValueError: sinks in a model whose own sliding layers drop the first tokens from the cache.
    """
    turns: tuple[Callable[[Tensor, Tensor], Tensor], ...] = ()
    if sinks:
        types = getattr(model.config, "layer_types", None) or ()
        if "sliding_attention" in types or (not types and getattr(model.config, "sliding_window", None)):
            raise ValueError(
                f"streaming keeps the first tokens in every layer, and this {model.config.model_type} model has layers "
                "with a sliding window of their own, which drop them: take a window baseline, or another base"
            )
        turns = tuple(_turn(model, layer.self_attn) for layer in decoder_layers(model))
    AttentionInterface.register(name, Windowed(window, sinks, turns))
    AttentionMaskInterface.register(name, fox_mask)
    model.set_attn_implementation(name)


def _turn(model: PreTrainedModel, attention: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """The function that moves a layer's rotated queries by some positions: R(p + m) q = R(m) (R(p) q)."""
    rotates_if = ROTATES_IF.get(model.config.model_type)
    if rotates_if is not None and not rotates_if(attention):
        return lambda query, moved: query
    rotary: Any = inner_model(model).rotary_emb
    layer_types = getattr(model.config, "layer_types", None)
    layer_type = layer_types[attention.layer_idx] if layer_types else None  # type: ignore[index]
    extra = [] if hasattr(rotary, "inv_freq") else [layer_type]
    # Without its decorators: a dynamic RoPE takes the largest position for the length of the text.
    angles = inspect.unwrap(type(rotary).forward)
    rotate = inspect.unwrap(type(attention).forward).__globals__[ROTARY]

    def turn(query: Tensor, moved: Tensor) -> Tensor:
        wide = query.float()
        cos, sin = angles(rotary, wide, moved, *extra)
        scaling = layer_frequencies(rotary, layer_type)[1]
        return rotate(wide, wide[:, :1], cos / scaling, sin / scaling)[0]

    return turn
