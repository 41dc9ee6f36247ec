"""Converted models: for every supported family, Fox<Family>Model and Fox<Family>ForCausalLM, made on first use.

A Fox class is its transformers base class with FoxMixin attention in every layer. Names and tensors of the base are
untouched, the gates are added. This file with configuration_fox.py and attention_torch.py is the whole model, from top
to bottom: gates and Pro parts, the rotary edit, the cache, attention, models. `retrofox.load` runs the same file. Where
retrofox is installed, its `acceleration` replaces slow functions of this module by fast ones.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers import initialization as init
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.dynamic_module_utils import custom_object_save
from transformers.masking_utils import sdpa_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

from . import configuration_fox
from .attention_torch import forgetting_attention, masked_attention, of_heads, summed, two_floats, visible_keys
from .configuration_fox import SUPPORTED, FoxFields

Tensor = torch.Tensor

REMOTE_FILES = ("configuration_fox.py", "modeling_fox.py", "attention_torch.py")
ACCELERATION = 1
"""Version of what `retrofox.acceleration` replaces in this file: names, arguments, attributes."""
CACHE = "cache" if hasattr(BaseModelOutputWithPast, "cache") else "past_key_values"
"""transformers' name of a model's cache, as an argument and in outputs: "cache" from 5.24 on."""
PRO_MODULES = ("q_norm_fox", "k_norm_fox", "k_shift", "v_shift", "output_norm", "output_gate")
NEW_MODULES = ("forget_gate", *PRO_MODULES)
"""Names of the modules a conversion adds to an attention layer; each has reset(), and all stay float32."""
SHORT_SCORES = 1 << 20  # elements of one layer's score matrix: 9 heads x 340 tokens; 1024 took 652 ms, in chunks 115
ROTATES_IF: dict[str, Callable[[Any], bool]] = {
    "cohere2": lambda native: native.sliding_window is not None,
    "exaone4": lambda native: native.sliding_window is None or native.is_sliding,
    "smollm3": lambda native: bool(native.use_rope),
}
"""Families in which some layers have no RoPE: whether a native attention rotates."""


# -- Gates and Pro parts --
class AddedModule(nn.Module):
    """Base of the modules that a conversion adds to an attention layer: float32 under casts, all values `start`."""

    start = 0.0

    @torch.no_grad()
    def reset(self) -> None:
        for tensor in (*self.parameters(), *self.buffers()):
            init.constant_(tensor, self.start)  # leaves alone what transformers has loaded

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AddedModule:
        # model.to(bfloat16) and model.half() move these tensors but leave their dtype alone
        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(keep_dtype, recurse)


def zeros(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*shape, dtype=torch.float32))


class ForgetGate(AddedModule):
    """log f_t = logsigmoid(W x_t + b), x_t the hidden state that enters the attention block, in float32.

    A module of its own, not an nn.Linear: the base model's initialisation, bitsandbytes and peft's "all-linear" would
    take an nn.Linear for one of theirs.

    Shapes: x (B, T, hidden) any float dtype -> log_f (B, T, H) float32, natural log, <= 0; H gates, see `gate_heads`.
    Parameters (float32): weight (H, hidden) for gate="data"; bias (H,), a frozen buffer for gate="fixed". They start at
    0, f = 1/2, as in the paper; a conversion starts the bias where `FoxSpec.init` says. bounds: nats a token, (H,).
    Source: Lin et al., "Forgetting Transformer" (ICLR 2025), eq. 1.
    """

    weight: Tensor | None
    bias: Tensor
    last_log_f: Tensor | None

    def __init__(self, hidden_size: int, num_heads: int, spec: FoxFields):
        super().__init__()
        self.weight = zeros(num_heads, hidden_size) if spec.gate == "data" else None
        if spec.gate == "fixed":
            self.register_buffer("bias", torch.zeros(num_heads, dtype=torch.float32))
        else:
            self.bias = zeros(num_heads)
        self.record, self.last_log_f = False, None  # of the last call, where a log asks for it
        self.bounds: list[float] | None = None
        self.derived: dict[Any, Tensor] = {}  # the bounds by device

    def bounded(self, log_f: Tensor) -> Tensor:
        """log f (..., H) less the bounds: no half-life is longer than `max_half_life`."""
        if self.bounds is None:
            return log_f
        if log_f.device not in self.derived:
            self.derived[log_f.device] = torch.tensor(self.bounds, dtype=torch.float32, device=log_f.device)
        return log_f - self.derived[log_f.device]

    def forward(self, hidden_states: Tensor) -> Tensor:
        log_f = self.bounded(self.log_f(hidden_states))
        if self.record:
            self.last_log_f = log_f.detach()
        return log_f

    def log_f(self, hidden_states: Tensor) -> Tensor:
        if self.weight is None:
            return F.logsigmoid(self.bias.float()).expand(*hidden_states.shape[:-1], -1)
        with torch.autocast(hidden_states.device.type, enabled=False):
            return F.logsigmoid(F.linear(hidden_states.float(), self.weight.float(), self.bias.float()))


class HeadNorm(AddedModule):
    """RMS norm of each head, x (B, T, heads, D), with a gain of its own: y = gain_h * x / sqrt(mean(x^2) + eps).

    Serves QK-norm (on q and k as they leave their projections, after the shift, before RoPE) and output norm. Not an
    identity: each token's own size is lost. Source: Lin et al. (ICLR 2025), section 3.3, gains per head, not shared.
    """

    start = 1.0

    def __init__(self, num_heads: int, head_dim: int, eps: float):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(num_heads, head_dim, dtype=torch.float32))
        self.eps = eps

    def forward(self, states: Tensor) -> Tensor:
        return (F.rms_norm(states.float(), states.shape[-1:], eps=self.eps) * self.gain).to(states.dtype)


class OutputGate(AddedModule):
    """y = 2 sigmoid(W x_t) * o_t, a gate per channel of the attention's output; W starts at 0, which is the identity.

    Shapes: output (B, T, H, D), hidden_states (B, T, hidden) -> (B, T, H, D). Parameter: weight (H * D, hidden).
    Source: Lin et al. (ICLR 2025), section 3.3; the factor 2, absent there, puts the start at exactly 1.
    """

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int):
        super().__init__()
        self.weight = zeros(num_heads * head_dim, hidden_size)

    def forward(self, output: Tensor, hidden_states: Tensor) -> Tensor:
        logit = F.linear(hidden_states, self.weight.to(hidden_states.dtype))
        return (output * (2 * torch.sigmoid(logit.view(output.shape).float()))).to(output.dtype)


class Shift(AddedModule):
    """Mixes a token's key (or value) with its predecessor's, by an amount a_t that depends on the data.

        y_t = k_t + a_t (k_{t-1} - k_t),   a_t = gain_h sigmoid(w_h . x_t)

    Gain and w start at 0: no shift, exactly. The first token of a document has no predecessor and stays as it is, or,
    `from_zero`, takes k_{t-1} = 0 as in the authors' code.
    Shapes: states (B, T, Hkv, D); before (B, Hkv, D), the token before the first one, or None; joined (B, T) bool,
    whether a token's predecessor belongs to its document, None if all but the first do; hidden_states (B, T, hidden).
    Parameters: weight (Hkv, hidden), gain (Hkv,). Source: Lin et al. (ICLR 2025), section 3.3.
    """

    def __init__(self, hidden_size: int, num_kv_heads: int, from_zero: bool = False):
        super().__init__()
        self.weight, self.gain, self.from_zero = zeros(num_kv_heads, hidden_size), zeros(num_kv_heads), from_zero

    def forward(self, states: Tensor, before: Tensor | None, joined: Tensor | None, hidden_states: Tensor) -> Tensor:
        alone = torch.zeros_like(states) if self.from_zero else states
        first = alone[:, 0] if before is None else before
        previous = torch.cat([first[:, None], states[:, :-1]], dim=1)
        if joined is not None:
            previous = torch.where(joined[..., None, None], previous, alone)
        with torch.autocast(hidden_states.device.type, enabled=False):
            amount = self.gain * torch.sigmoid(F.linear(hidden_states.float(), self.weight))
            return torch.lerp(states.float(), previous.float(), amount[..., None]).to(states.dtype)


def joined_tokens(attention_mask: Tensor | None, cu_seqlens: Tensor | None, hidden_states: Tensor) -> Tensor | None:
    """(B, T) bool: whether each token's predecessor is visible and of its document; None: all but the first one's."""
    batch, length = hidden_states.shape[:2]
    if cu_seqlens is not None:
        return _positions_in_documents(cu_seqlens, batch, length) > 0
    if attention_mask is None or not attention_mask.numel():
        return None
    if attention_mask.dim() == 2:
        seen = F.pad(attention_mask, (1, 0), value=False)
        return attention_mask[:, -length:] & seen[:, -length - 1 : -1]
    mask = attention_mask if attention_mask.dtype == torch.bool else attention_mask >= 0
    mask = mask[:, 0].expand(batch, -1, -1)
    own = mask.shape[-1] - 1 - mask.flip(-1).int().argmax(-1, keepdim=True)
    return (mask.gather(-1, (own - 1).clamp_min(0)) & (own > 0))[..., 0]


class ProjectedAttention:
    """An attention module whose projections give shifted, normed states: `self` of the native forward for one call.

    Adapters that wrap q_proj keep working, and every other attribute is the module's own.
    """

    def __init__(self, module: Any, call: GateCache, mask: Tensor | None, cu_seqlens: Tensor | None, shards: Any):
        self._module, self._call, self._shards = module, call, shards
        shifts = [x for x in (module.k_shift, module.v_shift) if x is not None]
        if shifts and shards is None:
            assert call.hidden_states is not None, "the mixin gives every call its hidden states"
            before = call.previous(module.layer_idx, len(shifts), module.head_dim) or [None] * len(shifts)
            self._before = dict(zip(map(id, shifts), before, strict=True))
            self._joined = joined_tokens(mask, cu_seqlens, call.hidden_states)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def q_proj(self, hidden_states: Tensor) -> Tensor:
        return self._queries(self._module.q_proj(hidden_states))

    def k_proj(self, hidden_states: Tensor) -> Tensor:
        return self._keys(self._module.k_proj(hidden_states))

    def v_proj(self, hidden_states: Tensor) -> Tensor:
        return self._shifted(self._module.v_shift, self._module.v_proj(hidden_states)).flatten(2)

    def qkv_proj(self, hidden_states: Tensor) -> Tensor:
        """A fused projection (Phi-3): queries, keys and values side by side."""
        fused = self._module.qkv_proj(hidden_states)
        keys = self._module.config.num_key_value_heads * self._module.head_dim
        q, k, v = fused.split([fused.shape[-1] - 2 * keys, keys, keys], dim=-1)
        q, k = self._queries(q), self._keys(k)  # before v: what a token carries is in this order
        return torch.cat([q, k, self._shifted(self._module.v_shift, v).flatten(2)], dim=-1)

    def _queries(self, flat: Tensor) -> Tensor:
        norm = self._module.q_norm_fox
        return flat if norm is None else norm(flat.unflatten(-1, (-1, self._module.head_dim))).flatten(2)

    def _keys(self, flat: Tensor) -> Tensor:
        keys = self._shifted(self._module.k_shift, flat)
        return (keys if self._module.k_norm_fox is None else self._module.k_norm_fox(keys)).flatten(2)

    def _shifted(self, shift: Any, flat: Tensor) -> Tensor:
        states = flat.unflatten(-1, (-1, self._module.head_dim))
        if shift is None:
            return states
        if self._shards is not None:  # a token's predecessor may lie in another process
            return self._shards.shifted(shift, states, self._call.hidden_states, self._call.position_ids)
        self._call.carried.append(states)
        return shift(states, self._before[id(shift)], self._joined, self._call.hidden_states)


# -- The rotary edit --
def fades(inv_freq: list[float], spec: FoxFields, layer_idx: int) -> list[float]:
    """Fade of each rotary pair of one layer: the factor on its frequency, from 1 (as in the base) to 0 (gone).

    keep: all 1; drop: all 0; interpolate: see `interpolated`; partial: 1 where the wavelength 2 pi / inv_freq is at
    most `max_wavelength` tokens; anneal: as it stood in a model that an earlier version trained, the lowest frequencies
    gone first. A layer's own `layer_max_wavelength` replaces the mode for that layer, and its `layer_pairs`, 1 for each
    named pair, both.
    """
    named, override = spec.layer_pairs.get(layer_idx), spec.layer_max_wavelength.get(layer_idx)
    if named is not None:
        return [float(pair in named) for pair in range(len(inv_freq))]
    if override is not None:
        return _up_to(inv_freq, override)
    if spec.rope in ("keep", "drop"):
        return [float(spec.rope == "keep")] * len(inv_freq)
    if spec.rope == "interpolate":
        return interpolated(inv_freq, spec)
    dropped = spec.rope == "anneal" and spec.anneal_to == "drop"
    target = [0.0] * len(inv_freq) if dropped else _up_to(inv_freq, spec.known("max_wavelength"))
    if spec.rope == "anneal":
        going = sorted((i for i, keep in enumerate(target) if not keep), key=lambda i: inv_freq[i])
        progress = min(1.0, spec.annealed_tokens / spec.anneal_tokens) * len(going)
        for rank, pair in enumerate(going):
            target[pair] = min(1.0, max(0.0, 1.0 - (progress - rank)))
    return target


def interpolated(inv_freq: list[float], spec: FoxFields) -> list[float]:
    """Fades that stretch slow pairs: g + (1 - g) / rope_factor, g = (r - beta_slow) / (beta_fast - beta_slow), in 0..1.

    r = rope_length * inv_freq / (2 pi) is how often a pair turns within the trained length; one that turns less than
    once would meet unseen angles. Equal betas: no ramp, g = 1 above them and 0 below.
    Source: NTK-by-parts of YaRN (Peng et al., arXiv 2309.00071, section 3.2; beta and alpha there), no temperature.
    """
    turns = [spec.known("rope_length") * w / (2 * math.pi) for w in inv_freq]
    width = max(spec.beta_fast - spec.beta_slow, 1e-9)
    kept = [min(1.0, max(0.0, (r - spec.beta_slow) / width)) for r in turns]
    return [g + (1.0 - g) / spec.known("rope_factor") for g in kept]


def _up_to(inv_freq: list[float], max_wavelength: float) -> list[float]:
    # 1e-6: a wavelength given back by the tool in rounded decimals must select the pair it was read from
    return [1.0 if 2 * math.pi / w <= max_wavelength * (1 + 1e-6) else 0.0 for w in inv_freq]


def layer_frequencies(rotary: Any, layer_type: str | None) -> tuple[Tensor, float]:
    """(inverse frequencies, attention scaling) that a family's rotary module uses now for one layer type.

    Read at each use: dynamic and longrope RoPE change them with the length of the text.
    """
    prefix = "" if hasattr(rotary, "inv_freq") else f"{layer_type}_"
    return getattr(rotary, f"{prefix}inv_freq"), float(getattr(rotary, f"{prefix}attention_scaling", 1.0))


class RotaryFade(nn.Module):
    """Edits a layer's (cos, sin): faded pairs turn by fade * angle, gone pairs not at all.

    cos'_p = cos(fade_p * position * w_p), so a pair stays a rotation. Gone pairs keep the attention scaling that yarn
    and longrope put on cos, which is a temperature of the logits.
    rotary is the family's module in the running model, where current frequencies are read; it is built again on the
    CPU, since from_pretrained builds models on the meta device.
    Shapes: cos, sin (B, T, 2 P) for P pairs, halves stacked or interleaved as the family has it; position_ids (B, T).
    """

    derived: Any

    def __init__(self, rotary: nn.Module, config: Any, layer_type: Any, spec: FoxFields, layer_idx: int):
        super().__init__()
        self.layer_type = layer_type
        self._rotary = [rotary]  # in a list: the module belongs to the model
        with torch.device("cpu"):
            twin = type(rotary)(config)
            inv_freq, self.attention_scaling = layer_frequencies(twin, layer_type)
            turn = twin(torch.zeros(1), torch.tensor([[1]]), *([] if hasattr(twin, "inv_freq") else [layer_type]))
            cos = turn.real if isinstance(turn, Tensor) else turn[0]
            halves = torch.arange(len(inv_freq)).repeat(cos.shape[-1] // len(inv_freq))
            expected = (inv_freq.cos() * self.attention_scaling).to(cos.dtype)
            self.stacked = torch.allclose(cos[0, 0], expected[halves])
            self.channel_pair = (halves if self.stacked else halves.sort().values).tolist()
        self.inv_freq = inv_freq.tolist()
        self.fade = fades(self.inv_freq, spec, layer_idx)
        self.kept = all(f == 1.0 for f in self.fade)
        self.gone = all(f == 0.0 for f in self.fade)
        self.skippable = self.gone and self.attention_scaling == 1.0  # applying the rotary would multiply by one
        self.derived = {}  # what is worked out from the fades once, by device

    def edited(self, turn: Any, position_ids: Tensor | None) -> Any:
        """A layer's rotary embedding, edited: (cos, sin), or DeepSeek V2's cos + i sin, complex (B, T, P)."""
        if not isinstance(turn, Tensor):
            return self(*turn, position_ids)
        return turn if self.kept else torch.complex(*self(turn.real, turn.imag, position_ids))

    def forward(self, cos: Tensor, sin: Tensor, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.kept:
            return cos, sin
        if self.skippable:
            return cos.new_ones(1).expand_as(cos), sin.new_zeros(1).expand_as(sin)
        if cos.device not in self.derived:
            pair = torch.tensor(self.channel_pair, device=cos.device)
            fade = torch.tensor(self.fade, device=cos.device)[pair]
            self.derived[cos.device] = fade, pair, (fade > 0.0) & (fade < 1.0), fade == 0.0
        fade, pair, part, gone = self.derived[cos.device]
        inv_freq, scaling = layer_frequencies(self._rotary[0], self.layer_type)
        if any(0.0 < f < 1.0 for f in self.fade):
            assert position_ids is not None, "every supported decoder layer passes them on"
            angle = position_ids[..., None].float() * (inv_freq.to(cos.device).float()[pair] * fade)
            cos = torch.where(part, (angle.cos() * scaling).to(cos.dtype), cos)
            sin = torch.where(part, (angle.sin() * scaling).to(sin.dtype), sin)
        if 0.0 not in self.fade:
            return cos, sin
        return cos.masked_fill(gone, scaling), sin.masked_fill(gone, 0.0)


# -- The cache --
class GatedLayer:
    """A transformers cache layer with the gates of its keys in a twin, a layer of the same class.

    What happens to the keys (windows, beams, crops, offloading) happens to the twin, whose keys are log f
    (B, 1, S, gates), and whose values are the projections that key and value shift need of a token's predecessor,
    (B, 1, S, width). `incoming` holds both for the tokens of the running call.
    """

    twin: Any
    layers: Any  # of the cache
    whole = True  # but within a change, and after one that was interrupted
    incoming: tuple[Tensor, list[Tensor]] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any):
        incoming, self.incoming = self.incoming, None
        if incoming is None:
            raise ValueError("this cache holds the forget gates of a converted model: give another model a new cache")
        first: Any = self.layers[0] if isinstance(self, DynamicLayer) else self
        lags = first is not self and first.get_seq_length() != self.twin.get_seq_length() + key_states.shape[2]
        if lags or not self.whole:
            raise ValueError("an interrupted call left some layers of this cache without its tokens: start a new one")
        log_f, carried = incoming
        values = torch.cat([log_f[..., :0], *(x.flatten(2) for x in carried)], -1)[:, None].to(key_states.dtype)
        self.whole = False
        self.gates = self.twin.update(log_f[:, None], values, *args, **kwargs)[0][:, 0]
        shown = super().update(key_states, value_states, *args, **kwargs)  # type: ignore[misc]
        self.whole = True
        return shown

    def log_f(self) -> Tensor:
        """(B, S, gates) float32 of the keys that `update` returned."""
        return self.gates

    def cumulative(self) -> tuple[Tensor, Tensor]:
        """c (B, gates, S) in base 2, as two floats."""
        return two_floats(summed(self.gates))

    def previous(self, count: int, head_dim: int) -> list[Tensor] | None:
        """`count` projections (B, Hkv, D) that the newest cached token carries, None where there is no token."""
        held = self.twin.values.shape[2] if self.twin.is_initialized else 0
        newest = min(int(self.get_seq_length()), held) - 1  # type: ignore[attr-defined]
        if newest < 0:
            return None
        return list(self.twin.values[:, 0, newest].unflatten(-1, (count, -1, head_dim)).unbind(1))


def _on_both(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = getattr(super(GatedLayer, self), name)(*args, **kwargs)
        if self.twin.is_initialized:
            getattr(self.twin, name)(*args, **kwargs)
        return result

    return method


for _name in (
    *("crop", "reorder_cache", "batch_repeat_interleave", "batch_select_indices"),
    *("reset", "offload", "prefetch", "activate_past_recording"),
):
    setattr(GatedLayer, _name, _on_both(_name))

GATED: dict[type, type] = {
    layer: type(f"Gated{layer.__name__}", (GatedLayer, layer), {})
    for layer in (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)
}


def gated_layer(cache: Any, layer_idx: int) -> Any:
    """The cache's layer with gates, put in the place of an empty one of transformers."""
    replicated = getattr(cache, "layer_class_to_replicate", None)
    while replicated is not None and len(cache.layers) <= layer_idx:
        cache.layers.append(replicated())
    layer = cache.layers[layer_idx]
    if hasattr(layer, "incoming"):
        return layer
    if type(layer) not in GATED:
        raise ValueError(
            f"a key/value cache of {type(layer).__name__} can't hold the forget gates beside its keys: "
            'use the default cache, "static" or "offloaded"'
        )
    if layer.get_seq_length():
        raise ValueError("the cache holds keys without forget gates (of another model): start with an empty one")
    cache.layers[layer_idx] = with_gates(layer, cache)
    return cache.layers[layer_idx]


def with_gates(layer: Any, cache: Any) -> Any:
    """An empty layer of transformers as a layer with gates."""
    twin = copy.deepcopy(layer)
    twin.is_initialized = False
    gated = object.__new__(GATED[type(layer)])
    gated.__dict__.update(vars(layer), twin=twin, layers=cache.layers)
    return gated


class GateCache:
    """One attention call's view of a transformers cache (or of none) that gives each key its gates.

    hidden_states (B, T, hidden) entered the attention block; position_ids (B or 1, T), which native forwards don't all
    pass on; carried: (B, T, Hkv, D) for the next call; layer: where `update` appended; expand: a latent's keys, values.
    """

    def __init__(self, cache: Any, log_f: Tensor, hidden_states: Tensor | None = None, position_ids: Any = None):
        self._cache = cache
        self.new_log_f = log_f
        self.hidden_states, self.position_ids = hidden_states, position_ids
        self.carried: list[Tensor] = []
        self.layer: Any = None
        self.expand: Any = None
        self.shared = 1  # query heads to a gate; the cache keeps a gate once

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    @property
    def log_f(self) -> Tensor:
        """(B, S, H or gates) float32 for all keys that `update` returned."""
        return self.new_log_f if self.layer is None else self.layer.log_f()

    def cumulative(self) -> tuple[Tensor, Tensor]:
        """log2(e) times the running sum of log_f, (B, H or gates, S) as two floats (rounded, residual)."""
        return two_floats(summed(self.new_log_f)) if self.layer is None else self.layer.cumulative()

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        if self._cache is None:
            return keys, values
        self.layer = gated_layer(self._cache, layer_idx)
        self.layer.incoming = self.new_log_f if self.shared == 1 else self.new_log_f[..., :: self.shared], self.carried
        # Under autocast the rotary's float32 widens keys, which the attention takes in the values' dtype.
        return self._cache.update(keys.to(values.dtype), values, layer_idx, *args, **kwargs)

    def previous(self, layer_idx: int, count: int, head_dim: int) -> list[Tensor] | None:
        """`count` projections (B, Hkv, D) of the newest cached token, None when the cache is empty."""
        if self._cache is None:
            return None
        layer = gated_layer(self._cache, layer_idx)
        if layer.get_seq_length() and getattr(self._cache, "offloading", False):
            raise ValueError(
                "key and value shift can't run with an offloaded cache: the previous token's keys may be in flight; "
                'use the default cache or "static"'
            )
        return layer.previous(count, head_dim)


# -- Attention --
def fox_mask(
    q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0, attention_mask: Any = None, **kwargs: Any
) -> Tensor | None:
    """The mask function registered as "fox": None or a (B, S) padding mask where causality, a window and left
    padding describe it fully; a 4D boolean mask for everything else (custom masks, holes, compiled static caches).
    """
    plain = kwargs.pop("allow_is_causal_skip", True) and not kwargs.get("use_vmap")

    def full() -> Tensor | None:
        places = {"q_length": q_length, "kv_length": kv_length, "q_offset": q_offset, "kv_offset": kv_offset}
        return sdpa_mask(**places, attention_mask=attention_mask, allow_is_causal_skip=False, **kwargs)

    if not plain or (isinstance(q_offset, Tensor) and torch.compiler.is_compiling()):
        return full()
    length = int(q_offset) + q_length - kv_offset  # keys that exist by now
    if length > kv_length:
        return full()
    if attention_mask is None:
        if length == kv_length:
            return None
        return torch.ones(kwargs["batch_size"], length, dtype=torch.bool, device=kwargs.get("device", "cpu"))
    mask = attention_mask[:, kv_offset : kv_offset + length].bool()
    if mask.shape[1] < length:
        return full()
    if length == kv_length and bool(mask.all()):
        return None
    # Trailing padding is out of sight of every real query (causality); a gap in between is not.
    seen = mask.cumsum(1)
    gap = ~mask & (seen > 0) & (seen < seen[:, -1:])
    return full() if bool(gap.any()) else mask


class Call(NamedTuple):
    """The inputs of one layer's attention.

    query (B, H, T, D); key (B, Hkv, S, D); value (B, Hkv, S, DV); the queries are the last T of the S positions;
    seq_start (B,) the first visible position of each row; mask (B, 1, T, S), anything; cu_seqlens (N + 1,) over
    flattened tokens; options: scale, window, sink, softcap, horizon.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    gates: GateCache
    seq_start: Tensor | None
    mask: Tensor | None
    cu_seqlens: Tensor | None
    options: dict[str, Any]


def attend(call: Call) -> Tensor:
    """(B, T, H, DV): the attention of a layer by the backend that `choose` names."""
    backend, _ = choose(call)
    return BACKENDS[backend](call)


def choose(call: Call) -> tuple[str, str]:
    """(name of a backend in BACKENDS, the reason): what computes a layer's attention."""
    query, key = call.query, call.key
    if call.mask is not None:
        return "bias", "the mask is one that only a bias can hold"
    if call.cu_seqlens is not None:
        return "operator", "documents are packed"
    trains = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
    most = SHORT_SCORES << 8 if query.shape[2] == 1 else SHORT_SCORES  # one query's bias is smaller than its keys
    scores = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
    if query.device.type == "cpu" and not trains and scores <= most:
        return "bias", "the score matrix is small"
    return "operator", "nothing else is faster"


def by_bias(call: Call) -> Tensor:
    """torch's SDPA with the decay as a bias."""
    length, mask, window = call.key.shape[2], call.mask, call.options["window"]
    single = call.query.shape[2] == 1 and call.seq_start is None and (window is None or window >= length)
    if mask is None and not single:
        queries = torch.arange(length - call.query.shape[2], length, device=call.query.device)
        mask = visible_keys(queries, length, None if call.seq_start is None else call.seq_start[:, None], window)
    options = {name: call.options[name] for name in ("scale", "sink", "softcap", "horizon")}
    c = tuple(x[..., :length] for x in call.gates.cumulative())
    return masked_attention(call.query, call.key, call.value, c, mask, **options)  # type: ignore[arg-type]


def by_operator(call: Call) -> Tensor:
    """The operator `forgetting_attention`."""
    q, k, v = (x.transpose(1, 2) for x in (call.query, call.key, call.value))
    batch, length = k.shape[:2]
    log_f = of_heads(call.gates.log_f[:, :length], q.shape[2], -1)
    if call.cu_seqlens is None:
        return forgetting_attention(q, k, v, log_f, seq_start=call.seq_start, **call.options)
    q, k, v, log_f = (x.reshape(1, batch * length, *x.shape[2:]) for x in (q, k, v, log_f))
    out = forgetting_attention(q, k, v, log_f, cu_seqlens=call.cu_seqlens, **call.options)
    return out.view(batch, length, *out.shape[2:])


BACKENDS: dict[str, Callable[[Call], Tensor]] = {"bias": by_bias, "operator": by_operator}


def attend_locally(q: Tensor, k: Tensor, v: Tensor, log_f: Tensor, cu_seqlens: Any, options: dict[str, Any]) -> Tensor:
    """The attention of tensors that are whole rows, all on this device; shapes as in `Call`."""
    return attend(Call(q, k, v, GateCache(None, log_f), None, None, cu_seqlens, options))


def scale_by_position(query: Tensor, trained: int, position_ids: Tensor | None, num_keys: int) -> Tensor:
    """Scales the query of position i by max(1, ln(i + 1) / ln(trained))."""
    if position_ids is None:
        position_ids = torch.arange(num_keys - query.shape[2], num_keys, device=query.device)[None]
    factor = (torch.log(position_ids.float() + 1) / torch.log(torch.tensor(float(trained)))).clamp_min(1.0)
    return query * factor[:, None, :, None].to(query.dtype)


class FoxMixin(nn.Module):
    """`class FoxLlamaAttention(FoxMixin, LlamaAttention)`: the native attention, its logits decayed by gates.

    s_ij = scale * q_i.k_j + (c_i - c_j), c the running sum of log f (Lin et al., ICLR 2025, eq. 3). The native
    forward keeps its projections, biases, QK-norm, windows and multipliers; this mixin adds the gates, edits
    (cos, sin), and stores the gates in the cache beside the keys.

    `mode` chooses the form: "fox"; "open" (log f = 0, the rest as fox); "shuffled" (gates permuted over heads);
    "original" (no gates, all rotary pairs, no added parts: the base model's attention through the same operator).
    """

    native_forward: Any  # the base class's forward, a plain function
    forget_gate: Any  # this and the others: None where the spec, or the base's layer, has none
    rotary_fade: Any
    output_norm: Any
    output_gate: Any
    config: Any
    layer_idx: int
    head_dim: int

    def add_fox(self, config: Any, spec: FoxFields, fade: RotaryFade | None) -> None:
        """Adds the new modules to a freshly built native attention; `fade` is None for a layer without RoPE."""
        heads, kv_heads, hidden = config.num_attention_heads, config.num_key_value_heads, config.hidden_size
        self.head_dim = getattr(self, "qk_head_dim", None) or self.head_dim  # MLA: its rotary part and the other
        width = getattr(self, "v_head_dim", self.head_dim)
        self.mode, self.rotary_fade = "fox", fade
        self.log_n, self.horizon, self.sink_tokens = spec.log_n, spec.horizon, spec.sink_tokens
        gates = kv_heads if spec.gate_heads == "kv" else heads
        self.num_fox_heads, self.heads_per_gate = heads, heads // gates
        self.forget_gate = None if spec.gate == "none" else ForgetGate(hidden, gates, spec)
        self.bound_gates(spec)
        eps, parts = getattr(config, "rms_norm_eps", 1e-6), spec.pro
        norm = "qk-norm" in parts and not hasattr(self, "q_norm")  # a family's own QK-norm takes its place
        official = "official" in parts
        self.q_norm_fox = HeadNorm(heads, self.head_dim, 1e-5 if official else eps) if norm else None
        self.k_norm_fox = HeadNorm(kv_heads, self.head_dim, 1e-5 if official else eps) if norm else None
        self.k_shift = Shift(hidden, kv_heads, official) if "k-shift" in parts else None
        self.v_shift = Shift(hidden, kv_heads, official) if "v-shift" in parts else None
        self.output_norm = HeadNorm(heads, width, eps) if "output-norm" in parts else None
        self.output_gate = OutputGate(hidden, heads, width) if "output-gate" in parts else None
        self.projects = any(x is not None for x in (self.q_norm_fox, self.k_norm_fox, self.k_shift, self.v_shift))

    def bound_gates(self, spec: FoxFields) -> None:
        """Gives the gates of heads that are not open the bound that `max_half_life` sets."""
        gate = self.forget_gate
        if gate is not None and spec.max_half_life is not None:
            named = [] if isinstance(spec.open_heads, int) else [tuple(head) for head in spec.open_heads]
            group, per_token = len(gate.bias) // self.config.num_key_value_heads, math.log(2.0) / spec.max_half_life
            gate.bounds = [per_token * ((self.layer_idx, h // group) not in named) for h in range(len(gate.bias))]

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any = None, attention_mask: Any = None,
        past_key_values: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        cache = kwargs.pop("cache", past_key_values)
        refuse_other_attention(self.config, kwargs)
        hidden_tokens = kwargs.pop("hidden_tokens", None)
        return self.run(hidden_states, position_embeddings, attention_mask, cache, hidden_tokens, kwargs)

    def run(
        self, hidden_states: Tensor, cos_sin: Any, attention_mask: Any, cache: Any, hidden_tokens: Any, kwargs: Any
    ) -> Any:
        """The native forward with gates, an edited rotary embedding, and the Pro parts in its projections."""
        log_f = self.log_f(hidden_states)
        if hidden_tokens is not None:
            log_f = log_f.masked_fill(hidden_tokens[..., None], 0.0)
        gates = GateCache(cache, log_f, hidden_states, kwargs.get("position_ids"))
        gates.shared = self.heads_per_gate
        stand_in: Any = self
        if self.mode != "original":
            if cos_sin is not None and self.rotary_fade is not None:
                cos_sin = self.rotary_fade.edited(cos_sin, kwargs.get("position_ids"))
            if self.projects:
                told = kwargs.get("cu_seqlens"), kwargs.get("shards")
                stand_in = ProjectedAttention(self, gates, attention_mask, *told)
        given = {"position_embeddings": cos_sin, "attention_mask": attention_mask, CACHE: gates, **kwargs}
        return self.native_forward(stand_in, hidden_states, gates=gates, **given)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None = None,
        dropout: float = 0.0, *, gates: GateCache, cu_seqlens: Tensor | None = None, shards: Any = None,
        sliding_window: int | None = None, softcap: float | None = None, trailing: bool = False, **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """The attention function that the native forward calls: (B, T, H, DV), and no attention weights.

        attention_mask: None; (B, S) bool, False on left padding (a mask shorter than the keys cuts a static cache to
        its filled part); or (B, 1, T, S) bool, anything. shards: see `FoxModelMixin.forward`. trailing: the (B, S) mask
        may hide the newest token, whose logits matter. The rest is as in `Call`.
        """
        if dropout:
            raise ValueError(f"Forgetting Attention has no dropout: set attention_dropout to 0, got {dropout}")
        # Under autocast the rotary's float32 (cos, sin) widen q and k but not v.
        query, key = query.to(value.dtype), key.to(value.dtype)
        gates.expand = getattr(self, "expand_kv", None)
        if self.log_n is not None and self.mode != "original":
            seen = key.shape[2] if gates.layer is None else int(gates.layer.get_seq_length())
            position_ids = gates.position_ids
            if position_ids is None and gates.layer is not None:
                position_ids = getattr(gates.layer, "position", None)
            query = scale_by_position(query, self.log_n, position_ids, seen)
        options: dict[str, Any] = {
            "scale": scaling,
            "window": sliding_window,
            "sink": self.sink_tokens if sliding_window is None else 0,  # a window hides them from later queries
            "softcap": softcap,
            "horizon": self.horizon if self.mode in ("fox", "shuffled") else None,
        }
        seq_start = mask = last = None
        if attention_mask is not None and attention_mask.dim() == 4 and attention_mask.numel():
            mask = attention_mask
        elif attention_mask is not None and attention_mask.dim() == 2:
            first = attention_mask.view(torch.uint8).argmax(1)  # the row's length where there is no True
            seq_start = torch.where(attention_mask.any(1), first, attention_mask.shape[1]).to(torch.int32)
            length = min(key.shape[2], attention_mask.shape[1])
            key, value = key[:, :, :length], value[:, :, :length]
            if trailing:
                seen = visible_keys(torch.tensor([length - 1], device=key.device), length, None, sliding_window)
                seen = seen & attention_mask[:, None, None, :length]
                last = attend(Call(query[:, :, -1:], key, value, gates, None, seen, None, options))
        if shards is None:
            output = attend(Call(query, key, value, gates, seq_start, mask, cu_seqlens, options))
            output = output if last is None else torch.cat([output[:, :-1], last], 1)
        else:
            output = shards.attend(query, key, value, gates.log_f, options, attend_locally)
        return (output if self.mode == "original" else self.finish(output, gates.hidden_states)), None

    def finish(self, output: Tensor, hidden_states: Tensor | None) -> Tensor:
        """Output norm and output gate on the attention's output (B, T, H, DV), where the spec has them."""
        if self.output_norm is not None:
            output = self.output_norm(output)
        return output if self.output_gate is None else self.output_gate(output, hidden_states)

    def log_f(self, hidden_states: Tensor) -> Tensor:
        """log f (B, T, H) float32 of every query head in the current mode."""
        if self.forget_gate is None or self.mode in ("open", "original"):
            return hidden_states.new_zeros((*hidden_states.shape[:-1], self.num_fox_heads), dtype=torch.float32)
        log_f = self.forget_gate(hidden_states)
        log_f = log_f.roll(log_f.shape[-1] // 2, dims=-1) if self.mode == "shuffled" else log_f
        return of_heads(log_f, self.num_fox_heads, -1)


def fox_attention(module: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """The attention function registered as "fox": `FoxMixin.attend` of the module, whichever file that comes from."""
    if kwargs.get("gates") is None:
        raise ValueError(
            f"the attention function 'fox' needs a converted model: no forget gates reached this "
            f"{type(module).__name__}. Where a trainer loads its reference by the model's path (TRL), give it "
            "ref_model=copy.deepcopy(model), or save the converted model and train what retrofox.load opens"
        )
    return module.attend(*args, **kwargs)


def refuse_other_attention(config: Any, kwargs: dict[str, Any]) -> None:
    """Raises ValueError for everything that would run a layer with an attention that has no gates."""
    if config._attn_implementation != "fox":
        raise ValueError(ignores_gates(config._attn_implementation))
    if "is_causal" in kwargs:
        raise ValueError(
            "accelerate's own context parallelism splits the sequence without the forget gates: `retrofox train` has "
            "one that moves them (parallel: {context: N}); elsewhere use FSDP or DDP"
        )
    if ALL_ATTENTION_FUNCTIONS["fox"].__name__ != "fox_attention":
        raise ValueError(
            "the attention function 'fox' was replaced (DeepSpeed sequence parallelism does that), which would leave "
            "out the forget gates: train without sequence parallelism"
        )


def ignores_gates(attention: str) -> str:
    return (
        f"attn_implementation={attention!r} would silently ignore the forget gates; "
        'load the model with attn_implementation="fox" (the default)'
    )


AttentionInterface.register("fox", fox_attention)
AttentionMaskInterface.register("fox", fox_mask)


# -- Models --
class FoxPreTrained:
    """Mixin of the Fox classes, beside their base's PreTrainedModel: float32 gates, one attention, own code on disk."""

    _supports_attention_backend = False  # vLLM and SGLang would swap the attention function and drop the gates
    _supports_flash_attn = False
    _supports_flex_attn = False
    _can_compile_fullgraph = False  # the documents of a batch and a static cache's length are read on the host
    create_masks_for_generate = staticmethod(lambda attention_mask, **_: attention_mask)  # 2D: it says what is hidden
    config: Any

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, and never with tensors that the checkpoint lacks."""
        parallel: Any = kwargs.get("distributed_config") or {}
        asked = {**getattr(parallel, "__dict__", parallel), **kwargs}
        if asked.get("tp_plan") or (asked.get("tp_size") or 1) > 1:
            raise ValueError(
                "tensor parallelism (tp_plan, tp_size) splits the heads of attention without their forget gates: load "
                "the model with device_map, with FSDP or whole"
            )
        told = kwargs.pop("output_loading_info", False)
        model, loaded = super().from_pretrained(*args, output_loading_info=True, **kwargs)  # type: ignore[misc]
        lost = sorted(loaded["missing_keys"], key=lambda name: (not set(name.split(".")) & set(NEW_MODULES), name))
        if lost:
            raise ValueError(
                f"the checkpoint lacks {len(lost)} of its model's tensors, such as {lost[0]}: it is incomplete and "
                "would run with others in their place; download it, convert its base, or save the whole model, again"
            )
        return (model, loaded) if told else model

    def init_continuous_batching(self, *_: Any, **__: Any) -> Any:
        raise ValueError("continuous batching (generate_batch) pages keys without the forget gates: use generate")

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        if requested_attention not in (None, "fox"):
            raise ValueError(ignores_gates(requested_attention))
        return "fox"

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, AddedModule):
            module.reset()
        else:
            super()._init_weights(module)  # type: ignore[misc]

    def save_pretrained(self, save_directory: str | Path, *args: Any, **kwargs: Any) -> None:
        """As in transformers, and the remote code beside the weights."""
        self.config.auto_map = auto_map(self.config.model_type)
        super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        if kwargs.get("is_main_process", True):
            write_remote_code(Path(save_directory))


def write_remote_code(directory: Path) -> None:
    """Writes this file, and those it imports, into a checkpoint directory as transformers does for custom code."""
    custom_object_save(FoxMixin, directory)


def auto_map(model_type: str) -> dict[str, str]:
    """The `auto_map` of config.json for a converted model type such as "fox_llama"."""
    prefix = SUPPORTED[model_type.removeprefix("fox_")]
    return {
        "AutoConfig": f"configuration_fox.Fox{prefix}Config",
        "AutoModel": f"modeling_fox.Fox{prefix}Model",
        "AutoModelForCausalLM": f"modeling_fox.Fox{prefix}ForCausalLM",
    }


def _install(model: Any, config: Any) -> None:
    """Puts a Fox attention of the native class in each decoder layer of a freshly built inner model."""
    spec = FoxFields.read(config.fox)
    rotates = ROTATES_IF.get(config.model_type.removeprefix("fox_"), lambda native: True)
    layer_types = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    for layer in model.layers:
        native, number = layer.self_attn, layer.self_attn.layer_idx
        attention = attention_class(type(native))(config=config, layer_idx=number)
        fade = RotaryFade(model.rotary_emb, config, layer_types[number], spec, number) if rotates(native) else None
        attention.add_fox(config, spec, fade)
        layer.self_attn = attention


@functools.cache
def attention_class(native: Any) -> type:
    body = {"__module__": __name__, "native_forward": staticmethod(inspect.unwrap(native.forward))}
    return type(f"Fox{native.__name__}", (FoxMixin, native), body)


class FoxModelMixin(FoxPreTrained):
    """Base of the inner models: the native forward, told where documents start."""

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        past_key_values: Any = None, inputs_embeds: Tensor | None = None, use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None, shards: Any = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """As the base model's forward; packed documents by restarting position_ids or by `cu_seqlens`.

        Tokens that a 2D attention mask hides don't decay what lies before them: their log f is 0.

        Args:
            past_key_values: the cache; `cache`, as transformers calls it from 5.24 on, says the same.
            position_ids: (B, T); where they restart, p[t + 1] <= p[t], a new document starts, unless there is a cache.
                Positions that skip forward stay in their document. None = counted from each document's start.
            cu_seqlens: (N + 1,) int32, document starts over the flattened B * T tokens, row boundaries included; or as
                transformers' collators tell it, `cu_seq_lens_q`, `cu_seq_lens_k` or `seq_idx` (B, T), which changes
                where a document starts.
            shards: what this process holds of rows that several processes share, and how attention finds the rest
                (`retrofox.parallel.shards.Shards`); it knows the documents, position_ids count from their starts.
        """
        if kwargs.get("output_attentions", getattr(self.config, "output_attentions", False)):
            raise ValueError("Forgetting Attention never forms attention weights: output_attentions must be False")
        cache = kwargs.pop("cache", past_key_values)
        past = 0 if cache is None else int(cache.get_seq_length())
        cu_seqlens = _told_documents(cu_seqlens, kwargs)
        source: Any = input_ids if input_ids is not None else inputs_embeds
        batch, length = source.shape[:2]
        padded = isinstance(attention_mask, Tensor) and attention_mask.dim() == 2
        hidden = _hidden_tokens(attention_mask, past, length) if padded else None  # type: ignore[arg-type]
        flat = attention_mask is None or padded
        if cu_seqlens is not None and (past or hidden is not None or not flat):
            raise ValueError("cu_seqlens (packed documents) excludes a mask that hides tokens and a filled cache")
        # A 4D mask is taken as ready-made by every family; an empty one says that cu_seqlens or shards tell it all.
        no_mask = torch.empty(0, 0, 0, 0, dtype=torch.bool, device=source.device)
        if shards is not None:
            assert attention_mask is cu_seqlens is cache is None, "shards know the documents"
            assert position_ids is not None, "counted from each document's start"
            kwargs["shards"], use_cache, attention_mask, flat = shards, False, no_mask, False
        if cu_seqlens is None and flat and position_ids is not None and cache is None:
            cu_seqlens = _document_starts(position_ids, batch, hidden)
            if attention_mask is None:  # transformers takes positions that skip for documents where it gets no mask
                attention_mask = torch.ones(batch, length, dtype=torch.bool, device=source.device)
        if position_ids is None and cu_seqlens is not None:
            position_ids = _positions_in_documents(cu_seqlens, batch, length)
        if position_ids is None and padded and self.config.fox["log_n"] is not None:
            # A rotary angle can count from the padding on, the logit scaling of a position can't.
            position_ids = (attention_mask.long().cumsum(1) - 1).clamp_min(0)[:, -length:]  # type: ignore[union-attr]
        if cu_seqlens is not None:
            attention_mask, kwargs["cu_seqlens"] = no_mask, cu_seqlens.to(torch.int32)
        if hidden is not None:
            kwargs["hidden_tokens"] = hidden
            if cache is not None or (cu_seqlens is None and not torch.is_grad_enabled()):  # generate reads its logits
                kwargs["trailing"] = bool((hidden[:, -1] & attention_mask[:, : past + length].any(1)).any())  # type: ignore[index]
        given = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, "use_cache": use_cache, CACHE: cache}
        return super().forward(attention_mask=attention_mask, position_ids=position_ids, **given, **kwargs)  # type: ignore[misc]


def _told_documents(cu_seqlens: Tensor | None, kwargs: dict[str, Any]) -> Tensor | None:
    """`cu_seqlens`, or the same by one of transformers' names, which are popped from `kwargs`."""
    told = [cu_seqlens, *(kwargs.pop(f"cu_seq_lens{of}", None) for of in ("", "_q", "_k"))]
    seq_idx = kwargs.pop("seq_idx", None)
    if seq_idx is not None:
        told.append(_bounds(seq_idx[:, 1:] != seq_idx[:, :-1]))
    told = [x for x in told if x is not None]
    if any(not torch.equal(told[0], x.to(told[0])) for x in told[1:]):
        raise ValueError(
            "cu_seqlens, cu_seq_lens_q, cu_seq_lens_k and seq_idx must name the same documents: give one of them"
        )
    return told[0] if told else None


def _bounds(starts: Tensor) -> Tensor:
    """cu_seqlens (N + 1,) int32 from (B, T - 1), whether a document starts at each token but a row's first."""
    starts = F.pad(starts, (1, 0), value=True).flatten()
    return F.pad(starts.nonzero()[:, 0], (0, 1), value=starts.numel()).to(torch.int32)


def _hidden_tokens(attention_mask: Tensor, past: int, length: int) -> Tensor | None:
    """(B, T) bool: which of the newest T tokens a 2D mask hides; None where it hides none."""
    start = past if attention_mask.shape[1] >= past + length else attention_mask.shape[1] - length
    hidden = ~attention_mask[:, start : start + length].bool()
    return hidden if bool(hidden.any()) else None


def _document_starts(position_ids: Tensor, batch: int, hidden: Tensor | None) -> Tensor | None:
    """cu_seqlens (N + 1,) int32 over flattened tokens where positions restart, and where tokens are hidden; or None."""
    position_ids = position_ids.expand(batch, -1)
    restart = position_ids[:, 1:] <= position_ids[:, :-1]
    if hidden is not None:
        begun = (~hidden).cumsum(1)[:, :-1] > 0
        restart = restart & ~hidden[:, 1:] & begun  # a row's first token after its padding restarts nothing
    if not bool(restart.any()):
        return None
    if hidden is not None:
        ends = hidden[:, 1:] != hidden[:, :-1]
        if bool((ends & ~hidden[:, 1:] & begun & ~restart).any()):
            raise ValueError(
                "attention_mask hides tokens within a packed document: leave them out, or give a 4D attention mask"
            )
        restart = restart | ends
    return _bounds(restart)


def _positions_in_documents(cu_seqlens: Tensor, batch: int, length: int) -> Tensor:
    """(B, T) int64: each token's place in its document."""
    starts = cu_seqlens[:-1].long().repeat_interleave(cu_seqlens.diff().long())
    return (torch.arange(batch * length, device=starts.device) - starts).view(batch, length)


def make_classes(model_type: str) -> tuple[type, type]:
    """(Fox<Family>Model, Fox<Family>ForCausalLM) for a base model_type such as "llama"."""
    base_config, prefix = CONFIG_MAPPING[model_type], SUPPORTED[model_type]
    native_lm: Any = MODEL_FOR_CAUSAL_LM_MAPPING[base_config]
    native: Any = MODEL_MAPPING[base_config]
    config_class = getattr(configuration_fox, f"Fox{prefix}Config")
    checkpoint_names = get_checkpoint_conversion_mapping(model_type)
    if checkpoint_names is not None:  # how the base's checkpoints fit its modules (fused experts) holds here too
        register_checkpoint_conversion_mapping(config_class.model_type, checkpoint_names, overwrite=True)

    def init_model(self: Any, config: Any) -> None:
        native.__init__(self, config)
        _install(self, config)
        native.post_init(self)

    def init_lm(self: Any, config: Any) -> None:
        native_lm.__init__(self, config)
        setattr(self, self.base_model_prefix, inner(config))
        native_lm.post_init(self)

    whole = (*NEW_MODULES, *(native._keep_in_fp32_modules_strict or ()))  # and the base's: a router's correction
    body = {"config_class": config_class, "__module__": __name__, "_keep_in_fp32_modules_strict": whole}
    inner: Any = type(f"Fox{prefix}Model", (FoxModelMixin, native), {**body, "__init__": init_model})
    return inner, type(f"Fox{prefix}ForCausalLM", (FoxPreTrained, native_lm), {**body, "__init__": init_lm})


def __getattr__(name: str) -> type:
    """Classes are made on first use; attentions are found by name where a pickled model is read again."""
    for model_type, prefix in SUPPORTED.items():
        if name == f"Fox{prefix.removesuffix('Text')}Attention":
            native: Any = MODEL_MAPPING[CONFIG_MAPPING[model_type]]
            return attention_class(getattr(sys.modules[native.__module__], name.removeprefix("Fox")))
        if name in (f"Fox{prefix}Model", f"Fox{prefix}ForCausalLM"):
            inner, lm = make_classes(model_type)
            globals()[inner.__name__], globals()[lm.__name__] = inner, lm
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


try:  # the one place where the installed package comes in
    from retrofox.acceleration import attach
except ImportError:
    logging.getLogger(__name__).warning("retrofox is not installed: Forgetting Attention takes its slow path")
else:
    attach(sys.modules[__name__])
