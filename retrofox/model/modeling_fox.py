"""Converted models: for every supported family, Fox<Family>Model and Fox<Family>ForCausalLM, made on first use.

A Fox class is its transformers base class with FoxMixin attention in every layer; names and tensors of the base are
untouched, the gates are added. `FoxLlamaForCausalLM.from_pretrained(directory)` and
`AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)` load the same thing.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

from . import configuration_fox
from .attention import NEW_MODULES, PAGED, FoxMixin, refuse_paged
from .cache import CACHE
from .captured import decode
from .configuration_fox import SUPPORTED, FoxFields
from .fused import fused_forward, is_plain, unrotated, with_rotary
from .gates import AddedModule
from .pro import calibrate_norms
from .rope import Fades, RotaryFade

REMOTE_FILES = (
    "configuration_fox.py",
    "modeling_fox.py",
    "attention.py",
    "cache.py",
    "captured.py",
    "fixed.py",
    "forgetting_eager.py",
    "fused.py",
    "gates.py",
    "lean.py",
    "masks.py",
    "pro.py",
    "rope.py",
    "scores.py",
)

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Settings of a generation config that only sampling reads."""

ROTATES_IF: dict[str, Callable[[Any], bool]] = {
    "cohere2": lambda native: native.sliding_window is not None,
    "exaone4": lambda native: native.sliding_window is None or native.is_sliding,
    "smollm3": lambda native: bool(native.use_rope),
}
"""Families in which some layers have no RoPE: whether a native attention rotates."""


class FoxPreTrained:
    """Mixin of the Fox classes, beside their base's PreTrainedModel: float32 gates, one attention, own code on disk."""

    _keep_in_fp32_modules_strict = NEW_MODULES
    _supports_attention_backend = False  # vLLM and SGLang would swap the attention function and drop the gates
    _supports_flash_attn = False
    _supports_flex_attn = False
    _can_compile_fullgraph = False  # the documents of a batch and a static cache's length are read on the host
    config: Any

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, and never with tensors that the checkpoint lacks.

        Raises:
            ValueError: a tensor is missing, or an added one is not finite; or tensor parallelism, which splits
                an attention's heads, not their gates.
        """
        parallel = kwargs.get("distributed_config") or {}
        asked = {**(parallel if isinstance(parallel, dict) else vars(parallel)), **kwargs}
        if asked.get("tp_plan") or (asked.get("tp_size") or 1) > 1:
            raise ValueError(
                "tensor parallelism (tp_plan, tp_size) splits the heads of attention without their forget gates: load "
                "the model with device_map, with FSDP or whole"
            )
        told = kwargs.pop("output_loading_info", False)
        model, loaded = super().from_pretrained(*args, output_loading_info=True, **kwargs)  # type: ignore[misc]
        _check_added(model, loaded["missing_keys"])
        return (model, loaded) if told else model

    def init_continuous_batching(self, *_: Any, **__: Any) -> Any:
        """Raises ValueError: continuous batching has a cache without gates."""
        raise ValueError(PAGED)

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        if requested_attention not in (None, "fox"):
            raise ValueError(
                f"attn_implementation={requested_attention!r} would silently ignore the forget gates; "
                'a converted model runs with attn_implementation="fox" (the default)'
            )
        return "fox"

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, AddedModule):
            for name, value in module.initial_values().items():
                init.copy_(getattr(module, name), value)  # leaves loaded tensors alone
        else:
            super()._init_weights(module)  # type: ignore[misc]

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        """Greedy decoding and sampling of `generate`, from a captured step where it can be; see `captured.decode`."""
        return decode(self, super()._sample, *args, **kwargs)  # type: ignore[misc]

    def set_annealed_tokens(self, tokens: int) -> None:
        """Moves the rotary dial of an annealing model to `tokens` training tokens; saved with the config."""
        self.config.fox["annealed_tokens"] = int(tokens)
        spec = FoxFields.read(self.config.fox)
        for module in self.modules():  # type: ignore[attr-defined]
            if isinstance(module, FoxMixin) and module.rotary_fade is not None:
                module.rotary_fade.set(spec)

    def calibrate_norms(self, batches: Iterable[torch.Tensor]) -> dict[str, list[float]]:
        """Sets the gains of added QK-norms and output norms from a text; see `pro.calibrate_norms`."""
        return calibrate_norms(self, batches)  # type: ignore[arg-type]

    def save_pretrained(self, save_directory: str | Path, *args: Any, **kwargs: Any) -> None:
        """As in transformers, and the remote code beside the weights."""
        self.config.auto_map = auto_map(self.config.model_type)
        kept: Any = getattr(self, "generation_config", None)
        try:
            self.generation_config = kept if kept is None else _savable(kept)
            super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        finally:
            self.generation_config = kept
        if kwargs.get("is_main_process", True):
            write_remote_code(Path(save_directory))


def _check_added(model: nn.Module, missing: Iterable[str]) -> None:
    """Raises ValueError where tensors were not in a checkpoint, or added ones came out of it as NaN or infinity."""
    lost = sorted(name for name in missing if set(name.split(".")) & set(NEW_MODULES))
    if lost:
        raise ValueError(
            f"the checkpoint lacks {len(lost)} of the tensors that its conversion added, such as {lost[0]}: it is "
            "incomplete and would run without them; download it, or convert its base, again"
        )
    others = sorted(missing)
    if others:
        raise ValueError(
            f"the checkpoint lacks {len(others)} of its model's tensors, such as {others[0]}: it would run with random "
            "numbers in their place; download it again, or save the whole model with its head"
        )
    for name, tensor in model.state_dict().items():
        if set(name.split(".")) & set(NEW_MODULES) and not tensor.is_meta and not bool(torch.isfinite(tensor).all()):
            raise ValueError(
                f"the checkpoint has NaN or infinity in {name}: take one from before, or train again with a lower "
                "learning rate"
            )


def _savable(config: Any) -> Any:
    """A generation config as it is or, where transformers refuses to save it, a copy without the fields it ignores.

    Published checkpoints have temperatures without do_sample, and -1 for no padding token; most versions of
    transformers then refuse to save the model at all.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(ValueError):
        config.save_pretrained(folder)
        return config
    config = copy.deepcopy(config)
    if not config.do_sample:
        for name in SAMPLING:
            setattr(config, name, None)
    if (config.pad_token_id or 0) < 0:
        config.pad_token_id = None
    return config


def write_remote_code(directory: Path) -> None:
    """Copies the flat model files into a checkpoint directory."""
    for name in REMOTE_FILES:
        shutil.copyfile(Path(__file__).parent / name, directory / name)


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
    if config.fox is None:
        raise ValueError("config.fox is missing: this is not a converted checkpoint (run `retrofox convert` first)")
    spec = FoxFields.read(config.fox)
    rotates_if, fades = ROTATES_IF.get(config.model_type.removeprefix("fox_")), Fades()
    for layer in model.layers:
        native = layer.self_attn
        attention = _attention_class(type(native))(config=config, layer_idx=native.layer_idx)
        fade = None
        if rotates_if is None or rotates_if(native):
            layer_types = getattr(config, "layer_types", None)
            layer_type = layer_types[native.layer_idx] if layer_types else None
            fade = RotaryFade(model.rotary_emb, config, layer_type, spec, native.layer_idx, fades)
        attention.add_fox(config, spec, fade)
        layer.self_attn = attention


_attention_classes: dict[type, type] = {}


def _attention_class(native: type) -> type:
    if native not in _attention_classes:
        forward: Any = inspect.unwrap(native.forward)  # type: ignore[attr-defined]
        body = {
            "__module__": __name__,
            "native_forward": forward,
            "unrotated_forward": with_rotary(forward, unrotated),
            "fused_forward": fused_forward(forward),
            "plain_forward": is_plain(forward),
        }
        _attention_classes[native] = type(f"Fox{native.__name__}", (FoxMixin, native), body)
    return _attention_classes[native]


class FoxModelMixin(FoxPreTrained):
    """Base of the inner models: the native forward, told where documents start."""

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: torch.Tensor | None = None,
        shards: Any = None,
        **kwargs: Any,
    ):
        """As the base model's forward; packed documents by restarting position_ids or by `cu_seqlens`.

        Tokens that a 2D attention mask hides don't decay what lies before them: their log f is 0.

        Args:
            past_key_values: the cache; `cache`, as transformers calls it from 5.24 on, says the same.
            position_ids: (B, T); where they restart, p[t + 1] <= p[t], a new document starts, unless there is a cache.
                Positions that skip forward stay in their document. None = counted from each document's start where
                `cu_seqlens` tells it.
            cu_seqlens: (N + 1,) int32, document starts over the flattened B * T tokens, row boundaries included;
                `cu_seq_lens_q` and `cu_seq_lens_k`, as transformers and TRL call them, say the same.
            shards: what this process holds of rows that several processes share, and how attention finds the rest
                (`retrofox.parallel.shards.Shards`); it knows the documents, position_ids count from their starts.

        Raises:
            ValueError: cu_seqlens together with a mask that hides tokens or a filled cache; cu_seq_lens that differ; a
                mask with a hole inside a packed document; shards with any of these.
        """
        if kwargs.get("output_attentions", getattr(self.config, "output_attentions", False)):
            raise ValueError("Forgetting Attention never forms attention weights: output_attentions must be False")
        cache = kwargs.pop("cache", past_key_values)
        refuse_paged(cache)
        past = 0 if cache is None else int(cache.get_seq_length())
        cu_seqlens = _told_documents(cu_seqlens, kwargs)
        source: Any = input_ids if input_ids is not None else inputs_embeds
        length = source.shape[1]
        hidden = _hidden_tokens(attention_mask, past, length)
        flat = attention_mask is None or (isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2)
        if cu_seqlens is not None and (past or hidden is not None or not flat):
            raise ValueError("cu_seqlens (packed documents) excludes a mask that hides tokens and a filled cache")
        if shards is not None:
            if attention_mask is not None or cu_seqlens is not None or cache is not None or use_cache:
                raise ValueError("rows shared between processes take position_ids only: no mask, cu_seqlens or cache")
            if position_ids is None:
                raise ValueError("rows shared between processes need position_ids, counted from each document's start")
            kwargs["shards"], use_cache = shards, False
            attention_mask = torch.empty(0, 0, 0, 0, dtype=torch.bool, device=position_ids.device)
        if cu_seqlens is None and flat and position_ids is not None and cache is None:
            cu_seqlens = _document_starts(position_ids, source.shape[0], hidden)
            if attention_mask is None:  # transformers takes positions that skip for documents where it gets no mask
                attention_mask = torch.ones(source.shape[:2], dtype=torch.bool, device=source.device)
        if position_ids is None and cu_seqlens is not None:
            position_ids = _positions_in_documents(cu_seqlens, *source.shape[:2])
        padded = isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2
        if cu_seqlens is None and position_ids is None and padded and self.config.fox["log_n"] is not None:
            # A rotary angle can count from the padding on, the logit scaling of a position can't.
            position_ids = (attention_mask.long().cumsum(1) - 1).clamp_min(0)[:, -source.shape[1] :]  # type: ignore
        if cu_seqlens is not None:
            # A 4D mask is taken as ready-made by every family; an empty one says that cu_seqlens tells it all.
            attention_mask = torch.empty(0, 0, 0, 0, dtype=torch.bool, device=cu_seqlens.device)
            kwargs["cu_seqlens"] = cu_seqlens.to(torch.int32)
        if hidden is not None:
            kwargs["hidden_tokens"] = hidden
        return super().forward(  # type: ignore[misc]
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **{CACHE: cache},
            **kwargs,
        )


def _told_documents(cu_seqlens: torch.Tensor | None, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """`cu_seqlens`, or what transformers' names for it say; these leave `kwargs`.

    Raises:
        ValueError: they differ, or queries and keys have documents of their own.
    """
    told = [x for x in (cu_seqlens, *(kwargs.pop(f"cu_seq_lens_{of}", None) for of in "qk")) if x is not None]
    for of in "qk":
        kwargs.pop(f"max_length_{of}", None)
    if any(not torch.equal(told[0], x.to(told[0])) for x in told[1:]):
        raise ValueError("cu_seqlens, cu_seq_lens_q and cu_seq_lens_k must name the same documents: give one of them")
    return told[0] if told else None


def _hidden_tokens(attention_mask: Any, past: int, length: int) -> torch.Tensor | None:
    """(B, T) bool: which of the newest T tokens a 2D mask hides; None where it hides none, or is no 2D mask."""
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 2:
        return None
    start = past if attention_mask.shape[1] >= past + length else attention_mask.shape[1] - length
    hidden = ~attention_mask[:, start : start + length].bool()
    return hidden if bool(hidden.any()) else None


def _document_starts(position_ids: torch.Tensor, batch: int, hidden: torch.Tensor | None) -> torch.Tensor | None:
    """cu_seqlens (N + 1,) int32 over flattened tokens where positions restart; None if rows are whole.

    Hidden tokens (B, T) beside documents become documents of their own, which nothing else sees.
    """
    position_ids = position_ids.expand(batch, -1)
    restart = position_ids[:, 1:] <= position_ids[:, :-1]
    if hidden is not None:
        restart = restart & ~hidden[:, 1:]
        text = (~hidden).cumsum(1)
        restart = restart & (text[:, :-1] > 0)  # a row's first token after its padding restarts nothing
    if not bool(restart.any()):
        return None
    if hidden is not None:
        ends = hidden[:, 1:] != hidden[:, :-1]
        inside = ends & ~hidden[:, 1:] & (text[:, :-1] > 0) & ~restart
        if bool(inside.any()):
            raise ValueError(
                "attention_mask hides tokens within a packed document: leave them out, or give a 4D attention mask"
            )
        restart = restart | ends
    starts = torch.nn.functional.pad(restart, (1, 0), value=True).flatten().nonzero()[:, 0]
    return torch.nn.functional.pad(starts, (0, 1), value=position_ids.numel()).to(torch.int32)


def _positions_in_documents(cu_seqlens: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """(B, T) int64: each token's place in its document."""
    token = torch.arange(batch * length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    document = torch.searchsorted(cu_seqlens, token, right=True) - 1
    return (token - cu_seqlens[document]).long().view(batch, length)


def make_classes(model_type: str) -> tuple[type, type]:
    """(Fox<Family>Model, Fox<Family>ForCausalLM) for a base model_type such as "llama"."""
    base_config = CONFIG_MAPPING[model_type]
    native_lm: Any = MODEL_FOR_CAUSAL_LM_MAPPING[base_config]
    native: Any = MODEL_MAPPING[base_config]
    prefix = SUPPORTED[model_type]
    config_class = getattr(configuration_fox, f"Fox{prefix}Config")
    checkpoint_names = get_checkpoint_conversion_mapping(model_type)
    if checkpoint_names is not None:  # how the base's checkpoints fit its modules (fused experts) holds here too
        register_checkpoint_conversion_mapping(config_class.model_type, checkpoint_names, overwrite=True)

    def init_model(self: Any, config: Any) -> None:
        native.__init__(self, config)
        _install(self, config)
        native.post_init(self)

    body = {"config_class": config_class, "__module__": __name__, "__init__": init_model}
    inner: Any = type(f"Fox{prefix}Model", (FoxModelMixin, native), body)

    def init_lm(self: Any, config: Any) -> None:
        native_lm.__init__(self, config)
        setattr(self, self.base_model_prefix, inner(config))
        native_lm.post_init(self)

    body = {"config_class": config_class, "__module__": __name__, "__init__": init_lm}
    return inner, type(f"Fox{prefix}ForCausalLM", (FoxPreTrained, native_lm), body)


def __getattr__(name: str) -> type:
    """Classes are made on first use; attentions are found by name where a pickled model is read again."""
    for model_type, prefix in SUPPORTED.items():
        if name == f"Fox{prefix.removesuffix('Text')}Attention":
            native: Any = MODEL_MAPPING[CONFIG_MAPPING[model_type]]
            return _attention_class(getattr(sys.modules[native.__module__], name.removeprefix("Fox")))
        if name in (f"Fox{prefix}Model", f"Fox{prefix}ForCausalLM"):
            inner, lm = make_classes(model_type)
            globals()[inner.__name__], globals()[lm.__name__] = inner, lm
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
