"""Forgetting Attention inside any transformers attention class: the mixin and the attention function."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .cache import CACHE, GateCache
from .configuration_fox import FoxFields
from .fused import Projections, available, enterable, untouched
from .gates import ForgetGate
from .pro import PRO_MODULES, ProjectedAttention, add_pro
from .rope import RotaryFade
from .scores import SLOW_PATH, attend, attend_locally, scale_by_position

logger = logging.getLogger(__name__)
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

    def add_fox(self, config: Any, spec: FoxFields, fade: RotaryFade | None) -> None:
        """Adds the new modules to a freshly built native attention; `fade` is None for a layer without RoPE."""
        if not getattr(self, "is_causal", True):
            raise ValueError("bidirectional attention can't forget: gates need a causal model")
        heads = config.num_attention_heads
        self.mode = "fox"
        self.log_n = spec.log_n
        self.prune, self.horizon = spec.prune, spec.horizon
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
        hidden_tokens = kwargs.pop("hidden_tokens", None)
        if hidden_tokens is not None:
            log_f = log_f.masked_fill(hidden_tokens[..., None], 0.0)
        cache = kwargs.pop("cache", past_key_values)
        gates = GateCache(cache, log_f, hidden_states, kwargs.get("position_ids"))
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
            gates=gates,
            **{CACHE: gates},
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
            query = scale_by_position(query, self.log_n, position_ids, seen)
        options: dict[str, Any] = {
            "scale": scaling,
            "window": sliding_window,
            # As `exempt_tokens`, by the window that is in force.
            "sink": self.sink_tokens if sliding_window is None else 0,
            "softcap": softcap,
            "prune": None if self.mode == "original" else self.prune,
            "horizon": self.horizon if self.mode in ("fox", "shuffled") else None,
        }
        if shards is None:
            output = attend(query, key, value, gates, attention_mask, cu_seqlens, options)
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


def _say_slow_once() -> None:
    global _warned_slow
    if SLOW_PATH and not _warned_slow:
        _warned_slow = True
        logger.warning("fox_kernels is not installed: Forgetting Attention takes its slow path (retrofox brings it)")


PAGED = "continuous batching (generate_batch) pages keys without the forget gates: use generate"


def refuse_paged(cache: Any) -> None:
    """Raises ValueError for the cache of continuous batching, which is no Cache."""
    if cache is not None and not hasattr(cache, "get_seq_length"):
        raise ValueError(PAGED)


def _refuse_other_attention(config: Any, kwargs: dict[str, Any]) -> None:
    """Raises ValueError for everything that would run this layer with an attention that has no gates."""
    if config._attn_implementation != "fox":
        raise ValueError(
            f"attn_implementation={config._attn_implementation!r} would silently ignore the forget gates; "
            'load the model with attn_implementation="fox" (the default)'
        )
    refuse_paged(kwargs.get("cache"))
    if "is_causal" in kwargs:
        raise ValueError(
            "accelerate's own context parallelism (is_causal was set and the mask dropped) splits the sequence without "
            "the forget gates: `retrofox train` has one that moves them (parallel: {context: N}, or the same cp_size); "
            "elsewhere use FSDP or DDP"
        )
    registered = ALL_ATTENTION_FUNCTIONS["fox"]
    if getattr(getattr(registered, "__code__", None), "co_name", None) != fox_attention.__name__:
        raise ValueError(
            "the attention function 'fox' was replaced (DeepSpeed sequence parallelism does that): it would move "
            "queries, keys and values between processes without the forget gates; train without sequence parallelism"
        )


AttentionInterface.register("fox", fox_attention)
