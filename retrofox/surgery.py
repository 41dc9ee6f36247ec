"""Surgery: the plan of a conversion, and a live model converted by it, which shares the base's tensors.

A directory is converted without loading it, by `conversion.directory`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from retrofox.anatomy import attentions, exempt_tokens, is_new_tensor, on_meta, sliding_window
from retrofox.config_values import kv_heads_of, rope_types, trained_length
from retrofox.families import check_settings, check_supported, replaced_settings
from retrofox.fox_spec import FoxSpec
from retrofox.half_lives import bias_from_half_life, half_life_tokens, initial_bias, open_half_life
from retrofox.loading.converted import savable
from retrofox.loading.errors import opening
from retrofox.model import configuration_fox, modeling_fox
from retrofox.model.configuration_fox import SUPPORTED
from retrofox.spec_values import require_places
from retrofox.version import __version__

NO_LIMIT = 1e12
"""Tokens, longer than any wavelength: stands for inf, which JSON lacks."""
DROPPED = (
    *("model_type", "architectures", "auto_map", "transformers_version", "quantization_config", "dtype", "fox"),
    *("transformers_weights", "_attn_implementation", "attn_implementation"),
)
"""Keys of a base's config that are not copied to the converted model's."""


@dataclass
class Plan:
    """The plan of a conversion, known before a tensor is touched.

    Attributes:
        spec: the resolved spec.
        layers: number of attention layers that get gates.
        tensors: name -> shape of every tensor that is added, all float32.
        kept_pairs: rotary pairs that turn as before in each layer; `slowed_pairs`: more slowly; `pairs`: all there are.
        exempt_tokens: first tokens of a document that never decay, for each layer: none where it has a sliding window.
        half_lives: half-lives in tokens that the heads of a layer start with, but for `spec.open_heads`; with init
            "measured" each layer has an order of its own.
        base_tensors: name -> shape of the base model's own tensors; `tied` are those a checkpoint may lack.
        settings_replaced: values of the base's config that the conversion changes.
        own_gates: the model_type of a checkpoint that came with gates, which are renamed and not added.
    """

    model_type: str
    spec: FoxSpec
    config: Any
    layers: int
    heads: int
    tensors: dict[str, tuple[int, ...]]
    kept_pairs: list[int]
    slowed_pairs: list[int]
    pairs: int
    half_lives: list[float]
    exempt_tokens: list[int] = field(default_factory=list)
    base_tensors: dict[str, tuple[int, ...]] = field(default_factory=dict)
    tied: tuple[str, ...] = ()
    settings_replaced: dict[str, Any] = field(default_factory=dict)
    own_gates: str | None = None

    @property
    def parameters(self) -> int:
        return sum(torch.Size(shape).numel() for shape in self.tensors.values())

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain JSON values."""
        return {
            "model_type": self.model_type,
            "spec": self.spec.to_dict(),
            "layers": self.layers,
            "heads": self.heads,
            "tensors_added": len(self.tensors),
            "parameters_added": self.parameters,
            "bytes_added": 4 * self.parameters,
            "rotary_pairs": self.pairs,
            "rotary_pairs_kept": self.kept_pairs,
            "rotary_pairs_slowed": self.slowed_pairs,
            "half_lives_tokens": self.half_lives,
            "exempt_tokens": self.exempt_tokens,
            "settings_replaced": self.settings_replaced,
        }


def make_plan(config: Any, spec: FoxSpec, base: str | None = None, revision: str | None = None) -> Plan:
    """Plans the conversion of a model with this config; raises ValueError for one that can't be converted."""
    check_supported(config)
    check_settings(config)
    spec = spec.resolved(trained_length(config))
    spec.base, spec.base_revision, spec.version = spec.base or base, spec.base_revision or revision, __version__
    assert spec.max_wavelength is not None  # resolved
    spec.max_wavelength = min(spec.max_wavelength, NO_LIMIT)
    spec.layer_max_wavelength = {i: min(tokens, NO_LIMIT) for i, tokens in spec.layer_max_wavelength.items()}
    _check_places(config, spec)
    fox_config = fox_config_of(config, spec)
    with opening(f"the {config.model_type} config"):
        model = on_meta(config.model_type, fox_config)
    found = [module for _, module in attentions(model)]
    shapes = {n: tuple(t.shape) for n, t in model.state_dict().items()}
    added = {n: shape for n, shape in shapes.items() if is_new_tensor(n)}
    windowed = all(sliding_window(m) is not None for m in found)
    if windowed and spec.sink_tokens not in (0, FoxSpec.sink_tokens):
        raise ValueError(
            f"sink_tokens {spec.sink_tokens} has no effect in this {config.model_type}: each of its layers has a "
            "sliding window, which hides the first tokens; drop it, or set it to 0"
        )
    if windowed:
        spec.sink_tokens = fox_config.fox["sink_tokens"] = 0
    gates = [m.forget_gate for m in found if m.forget_gate is not None]
    biases = torch.tensor(initial_bias(spec, len(gates[0].bias)) if gates else [], dtype=torch.float64, device="cpu")
    fade = [m.rotary_fade.fade for m in found if m.rotary_fade is not None]
    return Plan(
        model_type=config.model_type,
        spec=spec,
        config=fox_config,
        layers=len(found),
        heads=config.num_attention_heads,
        tensors=added,
        kept_pairs=[sum(f == 1.0 for f in layer) for layer in fade],
        slowed_pairs=[sum(0.0 < f < 1.0 for f in layer) for layer in fade],
        pairs=len(fade[0]) if fade else 0,
        half_lives=half_life_tokens(F.logsigmoid(biases) - math.log(2.0) / (spec.max_half_life or math.inf)).tolist(),
        exempt_tokens=[exempt_tokens(m) for m in found if m.forget_gate is not None],
        base_tensors={n: shape for n, shape in shapes.items() if n not in added},
        tied=tuple(model._tied_weights_keys or ()) if config.tie_word_embeddings else (),
        settings_replaced=replaced_settings(config),
    )


def _check_places(config: Any, spec: FoxSpec) -> None:
    """Raises ValueError for layers, heads and projections that a model with this config lacks."""
    per_head = [part for part in ("qk-norm", "k-shift", "v-shift") if part in spec.pro]
    if per_head and getattr(config, "kv_lora_rank", None):
        raise ValueError(
            f"{', '.join(per_head)}: heads of a {config.model_type} have no key and value projections of their own, "
            "but one latent for all (MLA); of the Pro parts output-norm and output-gate can be had"
        )
    require_places(spec, config.num_hidden_layers, kv_heads_of(config))


def with_new_modules(plan: Plan, device: Any = "cpu") -> Any:
    """A converted model on the meta device, but for its added modules, which are real and at their starting values."""
    model = on_meta(plan.model_type, plan.config)
    for _, attention in attentions(model):
        for name, module in attention.named_children():
            if name in modeling_fox.NEW_MODULES:
                module.to_empty(device=device)
                module.reset()  # type: ignore[operator]
    start_gates(model, plan.spec)
    return model


@torch.no_grad()
def start_gates(model: Any, spec: FoxSpec) -> None:
    """Gives every gate the half-life that it starts with, as far as no text decides it."""
    kv_heads = kv_heads_of(model.config)
    gates = [attention.forget_gate for _, attention in attentions(model)]
    for gate in gates:
        if gate is not None:
            gate.bias.copy_(torch.tensor(initial_bias(spec, len(gate.bias))))
    for layer, kv_head in () if isinstance(spec.open_heads, int) else spec.open_heads:
        bias = gates[layer].bias.view(kv_heads, -1)  # type: ignore[union-attr]
        bias[kv_head] = bias_from_half_life(open_half_life(spec, trained_length(model.config)))


def fox_config_of(config: Any, spec: FoxSpec) -> Any:
    """The converted model's config: the base's values under the fox class, with the spec."""
    values = config.to_dict()
    for key in DROPPED:
        values.pop(key, None)
    values |= replaced_settings(config)
    fox_config = getattr(configuration_fox, f"Fox{SUPPORTED[config.model_type]}Config")(**values, fox=spec.to_dict())
    fox_config.architectures = [f"Fox{SUPPORTED[config.model_type]}ForCausalLM"]
    fox_config.auto_map = modeling_fox.auto_map(fox_config.model_type)
    if getattr(config, "dtype", None) is not None:
        fox_config.dtype = config.dtype
    if spec.rope == "interpolate" and rope_types(config) == {"default"}:  # other kinds count with this length
        reach = round(spec.known("rope_length") * spec.known("rope_factor"))
        fox_config.max_position_embeddings = max(reach, trained_length(config))
    return fox_config


def apply(base: PreTrainedModel, plan: Plan) -> PreTrainedModel:
    """The converted form of a live model. It shares the base's parameters, frozen ones too; the gates are new."""
    model = with_new_modules(plan, next(base.parameters()).device)
    state = base.state_dict(keep_vars=True)
    frozen = [tensor for tensor in state.values() if not tensor.requires_grad]
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    for tensor in frozen:  # assign=True makes them trainable
        tensor.requires_grad_(False)
    if wrong := unexpected + [n for n in missing if not is_new_tensor(n)]:
        raise ValueError(
            f"the tensors of this {type(base).__name__} don't fit {type(model).__name__}, such as {wrong[0]}: give the "
            "language model with its head, as AutoModelForCausalLM opens it"
        )
    _fill_buffers(base, model)
    model.tie_weights()
    if base.generation_config is not None:
        model.generation_config = savable(base.generation_config)
    return model.train(base.training)


def _fill_buffers(base: torch.nn.Module, model: torch.nn.Module) -> None:
    """Takes over the base's buffers that no checkpoint holds (the rotary frequencies)."""
    buffers = dict(base.named_buffers())
    for name, module in model.named_modules():
        for key, value in list(module._buffers.items()):
            if value is not None and value.is_meta and f"{name}.{key}" in buffers:
                module._buffers[key] = buffers[f"{name}.{key}"]
