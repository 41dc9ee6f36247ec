"""Surgery: plan -> apply -> verify, on a live model and on a checkpoint directory.

A live model shares its tensors with the converted one. A directory is converted without loading it: weights are
linked or copied, new tensors go into one new shard, index and config are rewritten.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import retrofox
from retrofox.families import check_settings, check_supported, replaced_settings, trained_length
from retrofox.loading import load_base
from retrofox.model import configuration_fox, modeling_fox
from retrofox.model.attention import MODES, FoxMixin
from retrofox.model.configuration_fox import SUPPORTED, FoxSpec
from retrofox.model.gates import half_life_tokens
from retrofox.shards import find
from retrofox.source import read_config, understood

logger = logging.getLogger(__name__)
NO_LIMIT = 1e12
"""Tokens, longer than any wavelength: stands for inf, which JSON lacks."""
ATTENTION = ("_attn_implementation", "attn_implementation")
"""Keys of a config.json by which it asks for an attention function, of which a converted model has one."""
DROPPED = (
    *("model_type", "architectures", "auto_map", "transformers_version", "quantization_config", "dtype", "fox"),
    *ATTENTION,
)
"""Keys of a base's config that are its own and not its converted model's."""


@dataclass
class Plan:
    """What a conversion will do: everything that can be said before a tensor is touched.

    Attributes:
        spec: the resolved spec.
        layers: number of attention layers that get gates.
        tensors: name -> shape of every tensor that is added, all float32.
        kept_pairs: rotary pairs kept in each layer, and `pairs`, how many there are.
        half_lives: half-lives in tokens that the heads of a layer start with; none where they are yet to be fitted.
        base_tensors: name -> shape of the base model's own tensors; `tied` are those a checkpoint may lack.
        settings_replaced: values of the base's config that the conversion changes.
    """

    model_type: str
    spec: FoxSpec
    config: Any
    layers: int
    heads: int
    tensors: dict[str, tuple[int, ...]]
    kept_pairs: list[int]
    pairs: int
    half_lives: list[float]
    base_tensors: dict[str, tuple[int, ...]] = field(default_factory=dict)
    tied: tuple[str, ...] = ()
    settings_replaced: dict[str, Any] = field(default_factory=dict)

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
            "half_lives_tokens": self.half_lives,
            "settings_replaced": self.settings_replaced,
        }


def make_plan(config: Any, spec: FoxSpec, base: str | None = None, revision: str | None = None) -> Plan:
    """Plans the conversion of a model with this config; raises ValueError for what can't be converted."""
    check_supported(config)
    check_settings(config)
    spec = replace(
        spec.resolved(trained_length(config)),
        base=spec.base or base,
        base_revision=spec.base_revision or revision,
        version=retrofox.__version__,
    )
    assert spec.max_wavelength is not None  # resolved
    spec.max_wavelength = min(spec.max_wavelength, NO_LIMIT)
    spec.layer_max_wavelength = {i: min(tokens, NO_LIMIT) for i, tokens in spec.layer_max_wavelength.items()}
    too_deep = [i for i in spec.layer_max_wavelength if not 0 <= i < config.num_hidden_layers]
    if too_deep:
        raise ValueError(
            f"layer_max_wavelength names layers {too_deep[:5]}; the model has 0..{config.num_hidden_layers - 1}"
        )
    fox_config = fox_config_of(config, spec)
    with torch.device("meta"), understood(f"the {config.model_type} config"):
        model = lm_class(config.model_type)(fox_config)
    found = [module for _, module in attentions(model)]
    shapes = {n: tuple(t.shape) for n, t in model.state_dict().items()}
    added = {n: shape for n, shape in shapes.items() if is_new_tensor(n)}
    gates = [m.forget_gate for m in found if m.forget_gate is not None]
    fade = [m.rotary_fade.fade for m in found if m.rotary_fade is not None]
    return Plan(
        model_type=config.model_type,
        spec=spec,
        config=fox_config,
        layers=len(found),
        heads=config.num_attention_heads,
        tensors=added,
        kept_pairs=[sum(f > 0 for f in layer) for layer in fade],
        pairs=len(fade[0]) if fade else 0,
        half_lives=starting_half_lives(gates[0].initial_bias) if gates and spec.init != "calibrated" else [],
        base_tensors={n: shape for n, shape in shapes.items() if n not in added},
        tied=tuple(model._tied_weights_keys or ()) if config.tie_word_embeddings else (),
        settings_replaced=replaced_settings(config),
    )


def starting_half_lives(biases: list[float]) -> list[float]:
    """Half-lives in tokens of gates with these biases and weights of 0."""
    log_f = torch.nn.functional.logsigmoid(torch.tensor(biases, dtype=torch.float64, device="cpu"))
    return half_life_tokens(log_f).tolist()


def is_new_tensor(name: str) -> bool:
    """Whether a parameter name belongs to what a conversion adds (gates and Pro parts), not to the base model."""
    return any(part in modeling_fox.NEW_MODULES for part in name.split("."))


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
    return fox_config


def lm_class(model_type: str) -> Any:
    """The Fox...ForCausalLM class of a base model_type such as "llama"."""
    return getattr(modeling_fox, f"Fox{SUPPORTED[model_type]}ForCausalLM")


def attentions(model: torch.nn.Module) -> Iterator[tuple[str, FoxMixin]]:
    """(name, module) of every converted attention, in layer order.

    Raises:
        ValueError: there is none, so the model is not a converted one.
    """
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, FoxMixin)]
    if not found:
        remote = type(model).__module__.startswith("transformers_modules")
        what_to_do = (
            "it runs its own code (trust_remote_code): open it with retrofox.load"
            if remote
            else "convert it first (retrofox convert)"
        )
        raise ValueError(f"no Forgetting Attention found in a {type(model).__name__}: {what_to_do}")
    return iter(found)


@contextlib.contextmanager
def attention_mode(model: torch.nn.Module, mode: str) -> Iterator[None]:
    """Runs every attention of a converted model in `mode` ("fox", "open", "shuffled", "original"), then restores."""
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}; got {mode!r}")
    modules = [module for _, module in attentions(model)]
    before = [module.mode for module in modules]
    for module in modules:
        module.mode = mode
    try:
        yield
    finally:
        for module, old in zip(modules, before, strict=True):
            module.mode = old


def apply(base: PreTrainedModel, plan: Plan) -> PreTrainedModel:
    """The converted form of a live model. It shares the base's parameters, frozen ones too; the gates are new."""
    with torch.device("meta"):
        model = lm_class(plan.model_type)(plan.config)
    state = base.state_dict(keep_vars=True)
    frozen = [tensor for tensor in state.values() if not tensor.requires_grad]
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    for tensor in frozen:  # assign=True makes them trainable
        tensor.requires_grad_(False)
    if wrong := unexpected + [n for n in missing if not is_new_tensor(n)]:
        raise ValueError(f"the base model's tensors don't fit its converted class: {wrong[:5]}")
    _fill_buffers(base, model)
    device = next(base.parameters()).device
    for _, attention in attentions(model):
        for _, module in attention.new_modules():
            module.to_empty(device=device)
            module.reset()
    model.tie_weights()
    if base.generation_config is not None:
        model.generation_config = base.generation_config
    return model.train(base.training)


def _fill_buffers(base: torch.nn.Module, model: torch.nn.Module) -> None:
    """Takes over the base's buffers that no checkpoint holds (the rotary frequencies)."""
    buffers = dict(base.named_buffers())
    for name, module in model.named_modules():
        for key, value in list(module._buffers.items()):
            if value is not None and value.is_meta and f"{name}.{key}" in buffers:
                module._buffers[key] = buffers[f"{name}.{key}"]


def convert(
    source: str | Path | PreTrainedModel,
    out: str | Path | None = None,
    *,
    fox: FoxSpec | None = None,
    link: bool = False,
    verify: bool = True,
    revision: str | None = None,
    calibrate: Sequence[str] = (),
) -> Any:
    """Retrofits forget gates into a pretrained model.

    Args:
        source: a live transformers model, a Hub id, a local directory or a .gguf file.
        out: directory to write; None returns the converted model instead.
        fox: what to convert to; None = FoxSpec(): partial RoPE, data-dependent gates on a ladder of half-lives, one
            sink token.
        link: hard-link the weight files instead of copying them (same file system).
        verify: prove on the written artefact, in a fresh process, that gates open + RoPE kept is the base model.
        revision: Hub revision of `source`.
        calibrate: text files to fit gates and query projections on (needs `out`; see `retrofox.calibrate`).

    Returns:
        The converted model, sharing the tensors of a live `source` (out is None), or the report that is also written
        to retrofox.json in `out`: plan, seconds, peak memory, parity proof.

    Raises:
        ValueError: unsupported family, already converted, quantised, an adapter, or `out` exists.
        FileNotFoundError: `source` is not there.
    """
    spec = FoxSpec() if fox is None else fox
    if not isinstance(spec, FoxSpec):
        raise ValueError(f"fox must be a FoxSpec, got a {type(fox).__name__}: FoxSpec.from_dict makes one of a dict")
    if not isinstance(source, (str, Path, PreTrainedModel)):
        raise ValueError(
            f"source must be a transformers model, a Hub id, a directory or a .gguf file, got a {type(source).__name__}"
            "; of a peft model, give what merge_and_unload() returns"
        )
    if isinstance(calibrate, (str, Path)):
        raise ValueError(f"calibrate takes a list of files, got {str(calibrate)!r}: give a list")
    if revision is not None and isinstance(source, PreTrainedModel):
        raise ValueError(f"revision {revision!r} belongs to a Hub id, and a live model has none: drop it")
    if out is not None:
        from retrofox.artefact import write

        return write(source, Path(out), spec, link=link, verify=verify, revision=revision, calibrate=calibrate)
    if calibrate:
        raise ValueError("calibration writes a checkpoint: give OUT, or use retrofox.calibrate on the live model")
    if spec.init == "calibrated" and spec.version is None:  # a spec with a version says how a model was converted
        raise ValueError("init 'calibrated' measures the base on text: give OUT and calibrate=[FILES]")
    if link:
        raise ValueError("link=True shares the weight files of a directory with OUT: give OUT, or drop it")
    from retrofox.artefact import plan_for
    from retrofox.norm_gains import has_norms, set_gains, tokenizer_of_live

    places = sorted({str(place) for place in (getattr(source, "hf_device_map", None) or {}).values()})
    if len(places) > 1:
        raise ValueError(
            f"this {type(source).__name__} is spread over {', '.join(places)} by hooks that its converted form would "
            "lack: load it on one device, or convert its directory and load that"
        )
    plan = plan_for(source, spec, revision)
    base, tokenizer = (source, None) if isinstance(source, PreTrainedModel) else load_base(source, revision=revision)
    model = apply(base, plan)
    if has_norms(plan) and not model.get_input_embeddings().weight.is_meta:  # type: ignore[union-attr]
        set_gains(model, tokenizer or tokenizer_of_live(base))
    return model


def check_live(model: PreTrainedModel) -> None:
    """Raises ValueError, saying what to do instead, for a model in memory that can't be converted."""
    if model.config.model_type.startswith("fox_"):
        raise ValueError("this model is already converted; start from its base model")
    if getattr(model, "is_quantized", False) or getattr(model.config, "quantization_config", None):
        raise ValueError(f"this {type(model).__name__} is quantised: load the unquantised model, or dequantize() it")
    if getattr(model, "peft_config", None):
        raise ValueError(f"this {type(model).__name__} carries a LoRA adapter: merge it in (merge_and_unload) first")


def load(path: str | Path, *, dtype: Any = None, device: Any = None, revision: str | None = None) -> PreTrainedModel:
    """Loads a converted checkpoint (directory or Hub id) with the installed kernels.

    Args:
        dtype: torch dtype or its name, None = as stored; gates stay float32 in any case.
        device: where to put the model, None = CPU.

    Raises:
        ValueError: it is not a converted checkpoint (a plain model, or an adapter whose base is a plain model), or the
            device is not there.
        FileNotFoundError: no such directory or Hub id, or a file of weights is missing.
    """
    from retrofox.opening import resolve_device

    directory = Path(path)
    place = None if device is None else resolve_device(device)
    if (directory / "adapter_config.json").exists():
        return _load_adapter(directory, dtype=dtype, device=device)
    config_dict = read_config(path, revision)
    model_type = config_dict.get("model_type", "")
    if not model_type.startswith("fox_"):
        raise ValueError(
            f"{path} is a plain {model_type or 'model'}, not a converted one: run `retrofox convert {path} OUT`"
        )
    base_type = model_type.removeprefix("fox_")
    if base_type not in SUPPORTED:
        raise ValueError(
            f"{path} has model_type {model_type}; this version knows {', '.join('fox_' + t for t in SUPPORTED)}"
        )
    options: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    if directory.is_dir():
        find(directory)  # says which file is missing or cut short
    with understood(f"config.json of {path}"):
        model = lm_class(base_type).from_pretrained(path, revision=revision or "main", **options)
    return model if place is None else model.to(place)


def _load_adapter(directory: Path, *, dtype: Any, device: Any) -> PreTrainedModel:
    from retrofox.lora import base_of, with_adapter

    base = base_of(directory)
    try:
        model = load(base, dtype=dtype, device=device)
    except ValueError as error:
        raise ValueError(f"the adapter {directory} needs a converted base model: {error}") from error
    return with_adapter(model, directory)
