"""A layer's attention around its kernel: projections, rotary embedding, added modules and output in fewer launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from retrofox.acceleration import fused_projections as fused
from retrofox.acceleration.installed_kernels import gate_rows, takes_few


def with_copies(make: Callable[[type], Any]) -> Callable[[type], Any]:
    """`attention_class`, whose classes hold copies of their native forward with other rotary embeddings."""

    def attention_class(native: type) -> Any:
        made = make(native)
        made.copies = fused.copies_of(made.native_forward)
        return made

    return attention_class


def run(code: Any) -> Callable[..., Any]:
    """`FoxMixin.run` with a fused rotary embedding; in training, and in a step of fixed buffers, fused projections."""

    def run(self: Any, x: torch.Tensor, cos_sin: Any, mask: Any, cache: Any, hidden_tokens: Any, kwargs: Any) -> Any:
        native = self.copies
        forward, edited = _rotary(self, native, cos_sin, kwargs.get("position_ids"), x)
        projections = _projections(self, native, forward, x, edited, None if hidden_tokens is not None else cache)
        log_f = self.log_f(x) if projections is None else projections.log_f
        if hidden_tokens is not None:
            log_f = log_f.masked_fill(hidden_tokens[..., None], 0.0)
        gates = code.GateCache(cache, log_f, x, kwargs.get("position_ids"))
        gates.shared = 1 if log_f is None else getattr(self, "heads_per_gate", 1)  # code of older checkpoints lacks it
        stand_in: Any = self
        if projections is not None:
            stand_in, forward, edited = projections, native.unrotated, cos_sin
        elif self.projects and self.mode != "original":
            shards = kwargs.get("shards")
            stand_in = code.ProjectedAttention(self, gates, mask, kwargs.get("cu_seqlens"), shards)
        cached = {code.CACHE: gates}
        return forward(stand_in, x, position_embeddings=edited, attention_mask=mask, gates=gates, **cached, **kwargs)

    return run


def _rotary(module: Any, native: Any, cos_sin: Any, position_ids: Any, x: torch.Tensor) -> tuple[Any, Any]:
    """(the native forward or a copy with another rotary embedding, the (cos, sin) it needs)."""
    fade = module.rotary_fade
    if module.mode == "original" or cos_sin is None or fade is None:
        return native.forward, cos_sin
    if fade.skippable and native.unrotated is not None:
        return native.unrotated, cos_sin
    if isinstance(cos_sin, torch.Tensor):
        return native.forward, fade.edited(cos_sin, position_ids)
    cos, sin = cos_sin
    whole = fade.stacked and cos.dim() == 3 and cos.shape[-1] == module.head_dim
    if native.fused is not None and whole and fused.available(x):
        return native.fused, leading(fade, cos, sin, position_ids)
    return native.forward, fade(cos, sin, position_ids)


def leading(
    fade: Any, cos: torch.Tensor, sin: torch.Tensor, position_ids: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin (B, T, P) of the first P pairs, for the fused rotary, which leaves the others alone."""
    pairs = sum(f == 1.0 for f in fade.fade)
    if fade.attention_scaling != 1.0 or fade.fade != [1.0] * pairs + [0.0] * (len(fade.fade) - pairs):
        cos, sin = fade(cos, sin, position_ids)
        pairs = len(fade.fade)
    return cos[..., :pairs], sin[..., :pairs]


def _projections(module: Any, native: Any, forward: Any, x: torch.Tensor, cos_sin: Any, cache: Any) -> Any:
    """Queries, keys, values and gates made together by one function, where this layer is plain enough."""
    rotates = forward is native.fused
    if not (rotates or forward is native.unrotated) or not native.plain:
        return None
    if not rotates:
        cos_sin = (x.new_empty(1, x.shape[1], 0),) * 2
    if fused.enterable(module, x):
        return fused.entered(module, x, *cos_sin)
    return fused.appended(module, x, cos_sin, cache)


def finish(slow: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`FoxMixin.finish` with output norm and output gate in one kernel."""

    def finish(self: Any, output: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        norm, gate = self.output_norm, self.output_gate
        if norm is None or gate is None or not fused.available(output):
            return slow(self, output, hidden_states)
        if not (fused.untouched(norm) and fused.untouched(gate)):
            return slow(self, output, hidden_states)
        return fused.head_norm(output, norm.gain.float(), gate_logit(gate, hidden_states), norm.eps)

    return finish


def shared_edit(slow: Callable[..., Any]) -> Callable[..., Any]:
    """`RotaryFade.forward` once for all layers that fade alike; edits are kept on cos, which every layer gets."""

    def forward(self: Any, cos: torch.Tensor, sin: torch.Tensor, position_ids: torch.Tensor | None) -> Any:
        if self.kept or torch.compiler.is_compiling():
            return slow(self, cos, sin, position_ids)
        made: dict[Any, Any] = getattr(cos, "_fox_faded", None) or {}
        cos._fox_faded = made  # type: ignore[attr-defined]
        kind = tuple(self.fade), self.layer_type
        if kind not in made or made[kind][0] is not position_ids:
            made[kind] = position_ids, slow(self, cos, sin, position_ids)
        return made[kind][1]

    return forward


Forward = Callable[..., torch.Tensor]


def gate(slow: Forward) -> Forward:
    def log_f(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.weight is None or not fused.available(hidden_states):
            return slow(self, hidden_states)
        weight, bias = self.weight.float(), self.bias.float()
        return (gate_rows if takes_few(hidden_states) else fused.gate)(hidden_states, weight, bias)

    return log_f


def head_norm(slow: Forward) -> Forward:
    def forward(self: Any, states: torch.Tensor) -> torch.Tensor:
        if not fused.available(states):
            return slow(self, states)
        return fused.head_norm(states, self.gain.float(), None, self.eps)

    return forward


def output_gate(slow: Forward) -> Forward:
    def forward(self: Any, output: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        if not fused.available(output):
            return slow(self, output, hidden_states)
        return fused.head_norm(output, None, gate_logit(self, hidden_states), 0.0)

    return forward


def gate_logit(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """W x of an output gate, (B, T, H * D), in the model's dtype."""
    return F.linear(hidden_states, module.weight.to(hidden_states.dtype))


def shift(slow: Forward) -> Forward:
    def forward(self: Any, states: Any, before: Any, joined: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.from_zero or before is not None or not (fused.available(states) and fused.available(hidden_states)):
            return slow(self, states, before, joined, hidden_states)
        weight, gain = self.weight.float(), self.gain.float()
        amount = fused.gate(hidden_states, weight, torch.zeros_like(gain)).exp() * gain
        return fused.shift(states, amount if joined is None else amount * joined[..., None])

    return forward
