"""The parts that FoX (Pro) adds to attention: QK-norm, output norm, output gate, key and value shift."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from . import fused
from .cache import GateCache
from .gates import AddedModule


class HeadNorm(AddedModule):
    """RMS norm of each head with a gain of its own: y = gain_h * x / sqrt(mean(x^2) + eps).

    Serves QK-norm (on q and k as they leave their projections, after the shift, before RoPE) and output norm (on the
    attention's output). The gain starts at 1; `calibrate_norms` sets it to the RMS that the head has on a text, so that
    normed states have the size they had before. Not an identity: each token's own size is lost.

    Shapes: x (B, T, heads, D) any float dtype -> the same. Parameter: gain (heads, D) float32.
    Source: Lin et al., "Forgetting Transformer" (ICLR 2025), section 3.3, gains per head instead of shared.
    """

    def __init__(self, num_heads: int, head_dim: int, eps: float):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(num_heads, head_dim, dtype=torch.float32))
        self.eps = eps
        self.squares: torch.Tensor | None = None  # while calibrating: (heads + 1,) sums of squares, and the tokens
        self.calibrating = False

    def initial_values(self) -> dict[str, torch.Tensor]:
        return {"gain": torch.ones(self.gain.shape)}

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if fused.available(states) and not self.calibrating:
            return fused.head_norm(states, self.gain.float(), None, self.eps)
        wide = states.float()
        square = wide.square().mean(-1, keepdim=True)
        if self.calibrating:
            sums = F.pad(square[..., 0].double().flatten(0, 1).sum(0), (0, 1), value=square[..., 0, 0].numel())
            self.squares = sums if self.squares is None else self.squares + sums
            return states
        return (wide * torch.rsqrt(square + self.eps) * self.gain).to(states.dtype)


class OutputGate(AddedModule):
    """y = 2 sigmoid(W x_t) * o_t, a gate per channel of the attention's output; W starts at 0, which is the identity.

    The factor 2 puts the start at exactly 1 with the sigmoid at its steepest; the paper's gate has none (a constant
    that o_proj can absorb). The product W x runs in the model's dtype, the sigmoid in float32.

    Shapes: output (B, T, H, D), hidden_states (B, T, hidden) -> (B, T, H, D).
    Parameter: weight (H * D, hidden) float32. Source: Lin et al. (ICLR 2025), section 3.3.
    """

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_heads * head_dim, hidden_size, dtype=torch.float32))

    def initial_values(self) -> dict[str, torch.Tensor]:
        return {"weight": torch.zeros(self.weight.shape)}

    def forward(self, output: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.gated(output, hidden_states, None)

    def gated(self, output: torch.Tensor, hidden_states: torch.Tensor, norm: HeadNorm | None) -> torch.Tensor:
        """The gate on the output as it is or, with `norm`, on the normed output, in one kernel where there is one."""
        logit = F.linear(hidden_states, self.weight.to(hidden_states.dtype))
        if fused.available(output):
            gain, eps = (None, 0.0) if norm is None else (norm.gain.float(), norm.eps)
            return fused.head_norm(output, gain, logit, eps)
        output = output if norm is None else norm(output)
        return (output * (2 * torch.sigmoid(logit.view(output.shape).float()))).to(output.dtype)


class Shift(AddedModule):
    """Mixes a token's key (or value) with its predecessor's, by an amount a_t that depends on the data.

        y_t = k_t + a_t (k_{t-1} - k_t),   a_t = gain_h sigmoid(w_h . x_t)

    Gain and w start at 0: no shift, exactly, and a gradient from the first step. With gain 1 it is the paper's shift.
    The first token of a document has no predecessor and stays as it is.

    Shapes: states (B, T, Hkv, D); before (B, Hkv, D), the token before the first one, or None; joined (B, T) bool,
    whether a token's predecessor belongs to its document, None if all but the first do; hidden_states (B, T, hidden).
    Parameters (float32): weight (Hkv, hidden), gain (Hkv,). Source: Lin et al. (ICLR 2025), section 3.3.
    """

    def __init__(self, hidden_size: int, num_kv_heads: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_kv_heads, hidden_size, dtype=torch.float32))
        self.gain = nn.Parameter(torch.zeros(num_kv_heads, dtype=torch.float32))

    def initial_values(self) -> dict[str, torch.Tensor]:
        return {"weight": torch.zeros(self.weight.shape), "gain": torch.zeros(self.gain.shape)}

    def forward(
        self,
        states: torch.Tensor,
        before: torch.Tensor | None,
        joined: torch.Tensor | None,
        hidden_states: torch.Tensor,
    ) -> torch.Tensor:
        if before is None and fused.available(states) and fused.available(hidden_states):
            weight, gain = self.weight.float(), self.gain.float()
            amount = fused.gate(hidden_states, weight, torch.zeros_like(gain)).exp() * gain
            return fused.shift(states, amount if joined is None else amount * joined[..., None])
        first = states[:, 0] if before is None else before
        previous = torch.cat([first[:, None], states[:, :-1]], dim=1)
        with torch.autocast(hidden_states.device.type, enabled=False):
            amount = self.gain * torch.sigmoid(F.linear(hidden_states.float(), self.weight))
            if joined is not None:
                amount = amount * joined[..., None]
            return torch.lerp(states.float(), previous.float(), amount[..., None]).to(states.dtype)


def joined_tokens(
    attention_mask: torch.Tensor | None, cu_seqlens: torch.Tensor | None, hidden_states: torch.Tensor
) -> torch.Tensor | None:
    """(B, T) bool: whether the token before each of these T belongs to the same document and is visible to it.

    None where that is so for all, except for a first token that has none before it.

    Args:
        attention_mask: as the attention gets it: None, (B, S) bool or (B, 1, T, S).
        cu_seqlens: (N + 1,) document starts over the flattened tokens, or None.
        hidden_states: (B, T, hidden), for its shape and device.
    """
    batch, length = hidden_states.shape[:2]
    if cu_seqlens is not None:
        inside = torch.ones(batch * length + 1, dtype=torch.bool, device=cu_seqlens.device)
        inside[cu_seqlens[:-1].long()] = False
        return inside[:-1].view(batch, length)
    if attention_mask is None or not attention_mask.numel():  # none, or one that stands for the clock of a cache
        return None
    if attention_mask.dim() == 2:
        seen = F.pad(attention_mask, (1, 0), value=False)
        return attention_mask[:, -length:] & seen[:, -length - 1 : -1]
    mask = attention_mask if attention_mask.dtype == torch.bool else attention_mask >= 0
    mask = mask[:, 0].expand(batch, -1, -1)
    own = mask.shape[-1] - 1 - mask.flip(-1).int().argmax(-1, keepdim=True)
    return (mask.gather(-1, (own - 1).clamp_min(0)) & (own > 0))[..., 0]


class ProjectedAttention:
    """An attention module seen through its Pro parts, for one call: its projections give shifted, normed states.

    The native forward runs with this in place of `self`, so it needs no hook and no changed module: adapters that wrap
    q_proj keep working, and every other attribute is the module's own.
    """

    def __init__(
        self,
        module: Any,
        call: GateCache,
        attention_mask: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
        shards: Any = None,
    ):
        self._module, self._call, self._shards = module, call, shards
        shifts = [x for x in (module.k_shift, module.v_shift) if x is not None]
        if shifts and shards is None:
            assert call.hidden_states is not None, "the mixin gives every call its hidden states"
            before = call.previous(module.layer_idx, len(shifts) * module.head_dim)
            parts = [None] * len(shifts) if before is None else before.split(module.head_dim, dim=-1)
            self._before = dict(zip(map(id, shifts), parts, strict=True))
            self._joined = joined_tokens(attention_mask, cu_seqlens, call.hidden_states)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def q_proj(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self._queries(self._module.q_proj(hidden_states))

    def k_proj(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self._keys(self._module.k_proj(hidden_states))

    def v_proj(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self._values(self._module.v_proj(hidden_states))

    def qkv_proj(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """A fused projection (Phi-3): queries, keys and values side by side."""
        fused = self._module.qkv_proj(hidden_states)
        keys = self._module.config.num_key_value_heads * self._module.head_dim
        q, k, v = fused.split([fused.shape[-1] - 2 * keys, keys, keys], dim=-1)
        return torch.cat([self._queries(q), self._keys(k), self._values(v)], dim=-1)

    def _queries(self, flat: torch.Tensor) -> torch.Tensor:
        return flat if self._module.q_norm_fox is None else self._module.q_norm_fox(self._heads(flat)).flatten(2)

    def _keys(self, flat: torch.Tensor) -> torch.Tensor:
        keys = self._shifted(self._module.k_shift, self._heads(flat))
        return (keys if self._module.k_norm_fox is None else self._module.k_norm_fox(keys)).flatten(2)

    def _values(self, flat: torch.Tensor) -> torch.Tensor:
        return self._shifted(self._module.v_shift, self._heads(flat)).flatten(2)

    def _heads(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.unflatten(-1, (-1, self._module.head_dim))

    def _shifted(self, shift: Shift | None, states: torch.Tensor) -> torch.Tensor:
        if shift is None:
            return states
        if self._shards is not None:  # a token's predecessor may lie in another process
            return self._shards.shifted(shift, states, self._call.hidden_states, self._call.position_ids)
        self._call.carried.append(states)
        return shift(states, self._before[id(shift)], self._joined, self._call.hidden_states)


PRO_MODULES = ("q_norm_fox", "k_norm_fox", "k_shift", "v_shift", "output_norm", "output_gate")


def add_pro(module: Any, config: Any, parts: Iterable[str]) -> None:
    """Adds the named Pro parts to an attention module; a family's own QK-norm is kept in place of a second one."""
    hidden, head_dim, eps = config.hidden_size, module.head_dim, getattr(config, "rms_norm_eps", 1e-6)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    norm = "qk-norm" in parts and not hasattr(module, "q_norm")
    module.q_norm_fox = HeadNorm(heads, head_dim, eps) if norm else None
    module.k_norm_fox = HeadNorm(kv_heads, head_dim, eps) if norm else None
    module.k_shift = Shift(hidden, kv_heads) if "k-shift" in parts else None
    module.v_shift = Shift(hidden, kv_heads) if "v-shift" in parts else None
    module.output_norm = HeadNorm(heads, head_dim, eps) if "output-norm" in parts else None
    module.output_gate = OutputGate(hidden, heads, head_dim) if "output-gate" in parts else None


@torch.no_grad()
def calibrate_norms(model: nn.Module, batches: Iterable[torch.Tensor]) -> dict[str, list[float]]:
    """Sets the gain of every added norm to the RMS its heads have on a text, all norms standing aside meanwhile.

    Args:
        model: a converted model; a few thousand tokens are enough.
        batches: input_ids (B, T), without padding.

    Returns:
        Name of each norm -> the RMS of each head.

    Raises:
        ValueError: there are no batches.
    """
    norms = {name: module for name, module in model.named_modules() if isinstance(module, HeadNorm)}
    training = model.training
    with _standing_aside(norms.values()):
        for input_ids in batches:
            model.eval()(input_ids=input_ids, use_cache=False)
    model.train(training)
    result = {}
    for name, norm in norms.items():
        if norm.squares is None:
            raise ValueError("calibrate_norms needs at least one batch of input_ids")
        rms = (norm.squares[:-1] / norm.squares[-1]).sqrt()
        norm.gain.copy_(rms[:, None].to(norm.gain).expand_as(norm.gain))
        norm.squares = None
        result[name] = rms.tolist()
    return result


@contextmanager
def _standing_aside(norms: Iterable[HeadNorm]) -> Iterator[None]:
    norms = list(norms)
    for norm in norms:
        norm.calibrating, norm.squares = True, None
    try:
        yield
    finally:
        for norm in norms:
            norm.calibrating = False
