"""Forgetting Attention inside any transformers attention class: the mixin and the attention function."""

from __future__ import annotations

import logging
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .cache import GateCache, GrowingLayer
from .configuration_fox import FoxSpec
from .fixed import decode_at, decodes_at, visible_at
from .fused import Projections, available, enterable, untouched
from .gates import ForgetGate
from .masks import first_visible, visible_keys
from .pro import PRO_MODULES, ProjectedAttention, add_pro
from .rope import RotaryFade

try:
    from fox_kernels import decode_attention, decodes, forgetting_attention

    SLOW_PATH = False
except ImportError:
    from .forgetting_eager import forgetting_attention

    SLOW_PATH = True

logger = logging.getLogger(__name__)
LN_2 = 0.6931471805599453
SHORT_SCORES = 1 << 20  # elements of one layer's score matrix: 9 heads x 340 tokens; 1024 took 652 ms, in chunks 115
MODES = ("fox", "open", "shuffled", "original")
NEW_MODULES = ("forget_gate", *PRO_MODULES)
"""Names of the modules a conversion adds to an attention layer; each has reset(), and all stay float32."""
WINDOW_IN_CONFIG = ("mistral", "ministral3", "mixtral", "olmoe", "phi3", "starcoder2")
"""Families whose attention reads its sliding window from the config at each call, in every layer."""
_warned_slow = False


class FoxMixin(nn.Module):
    """`class FoxLlamaAttention(FoxMixin, LlamaAttention)`: the native attention, its logits decayed by gates.

    s_ij = scale * q_i.k_j + (c_i - c_j), c the running sum of log f (Lin et al., ICLR 2025, eq. 3). The native
    forward keeps its projections, biases, QK-norm, windows and multipliers; this mixin adds the gates, edits
    (cos, sin), and stores the gates in the cache beside the keys.

    `mode` chooses the form: "fox"; "open" (log f = 0, the rest as fox); "shuffled" (gates permuted over heads);
    "original" (no gates, all rotary pairs, no added parts: the base model's attention through the same operator).
    """

    native_forward: Any  # the base class's forward
    unrotated_forward: Any  # the same without rotary embedding, or None
    fused_forward: Any  # the same with one kernel for the rotary embedding, or None
    plain_forward: bool  # whether it does nothing else between projections and rotary embedding
    forget_gate: Any  # ForgetGate, or None where the spec has no gate
    rotary_fade: Any  # RotaryFade, or None in a layer without RoPE
    output_norm: Any  # this and the other Pro parts: None where the spec has none
    output_gate: Any
    config: Any
    layer_idx: int
    head_dim: int

    def add_fox(self, config: Any, spec: FoxSpec, fade: RotaryFade | None) -> None:
        """Adds the new modules to a freshly built native attention; `fade` is None for a layer without RoPE."""
        if not getattr(self, "is_causal", True):
            raise ValueError("bidirectional attention can't forget: gates need a causal model")
        heads = config.num_attention_heads
        self.mode = "fox"
        self.log_n = spec.log_n
        self.prune = spec.prune
        self.sink_tokens = spec.sink_tokens
        self.window = _window(self, config)
        self.num_fox_heads = heads
        self.forget_gate = None if spec.gate == "none" else ForgetGate(config.hidden_size, heads, spec)
        add_pro(self, config, spec.pro)
        self.projects = any(x is not None for x in (self.q_norm_fox, self.k_norm_fox, self.k_shift, self.v_shift))
        self.rotary_fade = fade

    @property
    def exempt_tokens(self) -> int:
        """First tokens of a document that never decay in this layer: `sink_tokens`, or 0 under a sliding window.

        A window hides them from all but the first queries, in the base too, and its cache drops them.
        """
        return self.sink_tokens if self.window is None else 0

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ):
        _refuse_other_attention(self.config, kwargs)
        forward, cos_sin = self._rotary(position_embeddings, kwargs.get("position_ids"), hidden_states)
        projections = self._projections(forward, hidden_states, cos_sin)
        log_f = self.log_f(hidden_states) if projections is None else projections.log_f
        gates = GateCache(past_key_values, log_f, hidden_states, kwargs.get("position_ids"))
        stand_in: Any = self
        if projections is not None:
            stand_in, forward, cos_sin = projections, self.unrotated_forward, position_embeddings
        elif self.projects and self.mode != "original":
            stand_in = ProjectedAttention(self, gates, attention_mask, kwargs.get("cu_seqlens"), kwargs.get("shards"))
        return forward.__func__(
            stand_in,
            hidden_states,
            position_embeddings=cos_sin,
            attention_mask=attention_mask,
            past_key_values=gates,
            gates=gates,
            **kwargs,
        )

    def _rotary(self, cos_sin: Any, position_ids: torch.Tensor | None, hidden_states: torch.Tensor) -> tuple[Any, Any]:
        """(the native forward or a copy with another rotary embedding, the (cos, sin) it needs)."""
        fade = self.rotary_fade
        if self.mode == "original" or cos_sin is None or fade is None:
            return self.native_forward, cos_sin
        if fade.skippable and self.unrotated_forward is not None:
            return self.unrotated_forward, cos_sin
        if self.fused_forward is not None and available(hidden_states) and fade.fits(cos_sin[0], self.head_dim):
            return self.fused_forward, fade.leading(*cos_sin, position_ids)
        return self.native_forward, fade(*cos_sin, position_ids)

    def _projections(self, forward: Any, hidden_states: torch.Tensor, cos_sin: Any) -> Projections | None:
        """Queries, keys, values and gates made together by one function, where this layer is plain enough."""
        turns = forward == self.fused_forward
        if not (turns or forward == self.unrotated_forward) or not (
            self.plain_forward and enterable(self, hidden_states)
        ):
            return None
        if not turns:
            cos_sin = (hidden_states.new_empty(1, hidden_states.shape[1], 0),) * 2
        return Projections(self, hidden_states, *cos_sin)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        *,
        gates: GateCache,
        cu_seqlens: torch.Tensor | None = None,
        shards: Any = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """The attention function that the native forward calls.

        Args:
            query: (B, H, T, D); key, value: (B, Hkv, S, D), the queries being the last T of the S positions.
            attention_mask: None; (B, S) bool, False on left padding (a mask shorter than the keys cuts a static cache
                to its filled part); or (B, 1, T, S) bool, anything.
            cu_seqlens: (N + 1,) int32 document starts over the flattened B * T tokens.
            shards: where several processes hold parts of the rows (`retrofox.parallel`), the object that moves queries,
                keys, values and gates between them: shards.attend(query, key, value, log_f, options, attend_locally).

        Returns:
            (B, T, H, D) and no attention weights.

        Raises:
            ValueError: attention dropout, or attention sinks as parameters (s_aux).
        """
        if dropout:
            raise ValueError(
                f"Forgetting Attention has no attention dropout, got {dropout}; set attention_dropout to 0"
            )
        if s_aux is not None:
            raise ValueError("attention sinks as parameters (s_aux) are not supported; use fox.sink_tokens")
        _say_slow_once()
        # Under autocast the rotary's float32 (cos, sin) widen q and k but not v.
        query, key = query.to(value.dtype), key.to(value.dtype)
        if self.log_n is not None and self.mode != "original":
            position_ids = gates.position_ids
            seen = key.shape[2]
            if position_ids is None and gates.layer is not None:
                position_ids = None if gates.layer.clock is None else gates.layer.clock.position
                seen = gates.layer.get_seq_length()
            query = _log_n(query, self.log_n, position_ids, seen)
        options: dict[str, Any] = {
            "scale": scaling,
            "window": sliding_window,
            # As `exempt_tokens`, by the window that is in force.
            "sink": self.sink_tokens if sliding_window is None else 0,
            "softcap": softcap,
            "prune": None if self.mode == "original" else self.prune,
        }
        if shards is None:
            output = _attend(query, key, value, gates, attention_mask, cu_seqlens, options)
        else:
            output = shards.attend(query, key, value, gates.log_f, options, attend_locally)
        return self.finish(output, gates.hidden_states), None

    def finish(self, output: torch.Tensor, hidden_states: torch.Tensor | None) -> torch.Tensor:
        """Output norm and output gate on the attention's output (B, T, H, D), where the spec has them."""
        if self.mode == "original":
            return output
        norm, gate = self.output_norm, self.output_gate
        if norm is not None and gate is not None and not norm.calibrating and untouched(norm) and untouched(gate):
            return gate.gated(output, hidden_states, norm)
        if norm is not None:
            output = norm(output)
        return output if self.output_gate is None else self.output_gate(output, hidden_states)

    def new_modules(self) -> list[tuple[str, Any]]:
        """(name, module) of everything the conversion added to this layer and that a checkpoint holds."""
        return [(name, module) for name, module in self.named_children() if name in NEW_MODULES]

    def log_f(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """log f (B, T, H) float32 in the current mode."""
        if self.forget_gate is None or self.mode in ("open", "original"):
            return hidden_states.new_zeros((*hidden_states.shape[:-1], self.num_fox_heads), dtype=torch.float32)
        log_f = self.forget_gate(hidden_states)
        if self.mode == "shuffled":
            log_f = log_f.roll(log_f.shape[-1] // 2, dims=-1) if log_f.shape[-1] > 1 else log_f
        return log_f


def _window(attention: Any, config: Any) -> int | None:
    """The sliding window in tokens with which a native attention calls its attention function."""
    if not getattr(attention, "is_sliding", True):
        return None
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window
    in_config = config.model_type.removeprefix("fox_") in WINDOW_IN_CONFIG
    return getattr(config, "sliding_window", None) if in_config else None


def fox_attention(module: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """The attention function registered as "fox": `FoxMixin.attend` of the module, whichever file that comes from.

    The code that travels with a checkpoint registers a copy of this function for all models of the process.

    Raises:
        ValueError: no gates arrived, so the module is not a converted attention.
    """
    if kwargs.get("gates") is None:
        raise ValueError(
            "the attention function 'fox' needs a converted model: no forget gates reached this "
            f"{type(module).__name__}. A trainer that loads its reference by the model's path (TRL) has loaded the "
            "base: give it ref_model=copy.deepcopy(model), or save the converted model and train what retrofox.load "
            "opens"
        )
    return module.attend(*args, **kwargs)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gates: GateCache,
    attention_mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """Takes the masked path, the kernels for decoding or the operator; shapes as in `FoxMixin.attend`."""
    if attention_mask is not None and attention_mask.dim() == 4 and attention_mask.numel():
        if gates.layer is not None and gates.layer.parts:
            return _by_head(query, gates, attention_mask, options)
        return _masked(query, key, value, gates.cumulative(), attention_mask, options)
    if gates.layer is not None and gates.layer.parts:
        return _by_head(query, gates, attention_mask, options)
    if gates.layer is not None and gates.layer.clock is not None:
        return _at_clock(query, key, value, gates.layer, options)
    seq_start = None
    length = key.shape[2]
    if attention_mask is not None and attention_mask.dim() == 2:
        length = min(length, attention_mask.shape[1])
        seq_start = first_visible(attention_mask)
        key, value = key[:, :, :length], value[:, :, :length]
    if cu_seqlens is None and _short_on_cpu(query, key):
        high, low = (x[..., :length] for x in gates.cumulative())
        visible = visible_keys(query.shape[2], length, seq_start, options["window"], query.device)
        return _masked(query, key, value, (high, low), visible, options)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    layer = gates.layer
    if layer is not None and not SLOW_PATH and decodes(q, k, v):
        bound = None if options["prune"] is None else layer.key_bound(query.shape[-1])
        high, low = (x[..., :length] for x in layer.cumulative())
        return decode_attention(q, k, v, high, low, seq_start=seq_start, k_bound=bound, **options)
    log_f = gates.log_f[:, :length]
    if cu_seqlens is None:
        return cast(torch.Tensor, forgetting_attention(q, k, v, log_f, seq_start=seq_start, **options))
    batch, length = q.shape[:2]
    q, k, v, log_f = (x.reshape(1, batch * length, *x.shape[2:]) for x in (q, k, v, log_f))
    out = cast(torch.Tensor, forgetting_attention(q, k, v, log_f, cu_seqlens=cu_seqlens, **options))
    return out.view(batch, length, *out.shape[2:])


def attend_locally(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    log_f: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """Forgetting Attention of tensors that are whole rows, all on this device; shapes as in `FoxMixin.attend`."""
    return _attend(query, key, value, GateCache(None, log_f), None, cu_seqlens, options)


def _by_head(
    query: torch.Tensor, gates: GateCache, attention_mask: torch.Tensor | None, options: dict[str, Any]
) -> torch.Tensor:
    """Attention to a cache that has kept different keys of each kv head; then what has become irrelevant is dropped."""
    layer: Any = gates.layer
    if attention_mask is not None and attention_mask.numel():
        raise ValueError(
            "a cache that forgets takes whole rows: prompts of one length without padding, one after the other"
        )
    outputs, width = [], query.shape[-1]
    sizes = [part.keys.shape[1] for part in layer.parts]
    heads = [n * (query.shape[1] // sum(sizes)) for n in sizes]
    for part, q, log_f in zip(layer.parts, query.split(heads, 1), gates.new_log_f.split(heads, -1), strict=True):
        view = GateCache(None, log_f, gates.hidden_states, gates.position_ids)
        view.layer = part
        outputs.append(_attend(q, part.keys[..., :width], part.values, view, None, None, options))
    layer.forget()
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)


def _at_clock(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: GrowingLayer, options: dict[str, Any]
) -> torch.Tensor:
    """A decoding step whose length only the device knows: keys and values are rooms, and the clock says how full."""
    clock, (high, low) = layer.clock, layer.cumulative()
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if decodes_at(q, k):
        bound = None if options["prune"] is None else layer.key_bound(query.shape[-1])
        return decode_at(q, k, v, high, low, clock.length, seq_start=clock.seq_start, k_bound=bound, **options)
    return _masked(query, key, value, (high, low), visible_at(clock, query.shape[2], options["window"]), options)


def _log_n(query: torch.Tensor, trained: int, position_ids: torch.Tensor | None, num_keys: int) -> torch.Tensor:
    """Scales the query of position i by max(1, ln(i + 1) / ln(trained))."""
    if position_ids is None:
        position_ids = torch.arange(num_keys - query.shape[2], num_keys, device=query.device)[None]
    factor = (torch.log(position_ids.float() + 1) / torch.log(torch.tensor(float(trained)))).clamp_min(1.0)
    return query * factor[:, None, :, None].to(query.dtype)


def _masked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    c: tuple[torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """Forgetting Attention under any boolean mask (B, 1, T, S): torch's SDPA with the decay as an additive bias.

    c, two floats of (B, H, S) in base 2, is the running sum of log f. A query's own position is the last key it may
    see, sinks are the first; without a mask a single query sees all keys. With open gates the bias is 0 and the result
    is bit for bit what SDPA gives the base model, but for single queries: those of a kv head are rows of one product.
    """
    scaling, softcap, sink = options["scale"], options["softcap"], options["sink"]
    own = None
    if mask is not None:
        mask = mask if mask.dtype == torch.bool else mask >= 0  # additive: 0 lets through, a large negative does not
        own = mask.shape[-1] - 1 - mask.flip(-1).int().argmax(-1)  # (B, 1, T)
    high, low = (x.to(torch.promote_types(query.dtype, x.dtype)) for x in c)
    if own is None:  # a single query, the last
        decay, lost = ((x[..., -1:] - x)[:, :, None] for x in (high, low))
    else:
        own = own.expand(*high.shape[:2], -1)
        decay, lost = (x.gather(-1, own)[..., None] - x[..., None, :] for x in (high, low))
    decay = (decay + lost) * LN_2
    if mask is None:
        decay[..., :sink] = 0.0
    elif sink:
        decay = decay.masked_fill(mask & (mask.cumsum(-1) <= sink), 0.0)
    bias = decay.to(query.dtype if softcap is None else torch.float32)
    if mask is not None:
        bias = bias.masked_fill(~mask, float("-inf"))
    if softcap is None and query.shape[2] == 1:
        rows, bias = (x.reshape(key.shape[0], key.shape[1], -1, x.shape[-1]) for x in (query, bias))
        out = F.scaled_dot_product_attention(rows, key, value, attn_mask=bias, scale=scaling).view(query.shape)
    elif softcap is None:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling, enable_gqa=True)
    else:
        groups = query.shape[1] // key.shape[1]
        scores = (query @ key.repeat_interleave(groups, 1).transpose(-1, -2)).float()
        scores = scores * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        weights = torch.softmax(softcap * torch.tanh(scores / softcap) + bias, -1)
        out = weights.to(value.dtype) @ value.repeat_interleave(groups, 1)
    if mask is not None:
        out = out.masked_fill(~mask.any(-1, keepdim=True), 0.0)
    return out.transpose(1, 2).contiguous()


def _short_on_cpu(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether to take SDPA with a bias: inference on a CPU, where the score matrix is small or one query's."""
    if query.device.type != "cpu" or (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)):
        return False
    most = SHORT_SCORES << 8 if query.shape[2] == 1 else SHORT_SCORES  # one query's bias is smaller than its keys
    return query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2] <= most


def _say_slow_once() -> None:
    global _warned_slow
    if SLOW_PATH and not _warned_slow:
        _warned_slow = True
        logger.warning("fox_kernels is not installed: Forgetting Attention takes its slow path (retrofox brings it)")


def _refuse_other_attention(config: Any, kwargs: dict[str, Any]) -> None:
    """Raises ValueError for everything that would run this layer with an attention that has no gates."""
    if config._attn_implementation != "fox":
        raise ValueError(
            f"attn_implementation={config._attn_implementation!r} would silently ignore the forget gates; "
            'load the model with attn_implementation="fox" (the default)'
        )
    if "is_causal" in kwargs:
        raise ValueError(
            "accelerate's own context parallelism (is_causal was set and the mask dropped) splits the sequence without "
            "the forget gates: `retrofox train` has one that moves them (parallel: {context: N}, or the same cp_size); "
            "elsewhere use FSDP or DDP"
        )
    if kwargs.get("cache") is not None:
        raise ValueError("continuous batching (generate_batch) pages keys without the forget gates: use generate")
    registered = ALL_ATTENTION_FUNCTIONS["fox"]
    if getattr(getattr(registered, "__code__", None), "co_name", None) != fox_attention.__name__:
        raise ValueError(
            "the attention function 'fox' was replaced (DeepSpeed sequence parallelism does that): it would move "
            "queries, keys and values between processes without the forget gates; train without sequence parallelism"
        )


AttentionInterface.register("fox", fox_attention)
