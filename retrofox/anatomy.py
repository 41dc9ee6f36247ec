"""Where the parts of a causal language model are: layers, attentions, head, and the logits read off them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

from retrofox.config_values import kv_heads_of
from retrofox.model import modeling_fox
from retrofox.model.configuration_fox import SUPPORTED
from retrofox.model.modeling_fox import FoxMixin

MODES = ("fox", "open", "shuffled", "original")
WINDOW_IN_CONFIG = ("mistral", "ministral3", "mixtral", "olmoe", "phi3", "starcoder2")
"""Families whose attention reads its sliding window from the config at each call, in every layer."""


def is_new_tensor(name: str) -> bool:
    """Whether a parameter name is one that a conversion adds (gates and Pro parts), not the base model's."""
    return any(part in modeling_fox.NEW_MODULES for part in name.split("."))


def lm_class(model_type: str) -> Any:
    """The Fox...ForCausalLM class of a base model_type such as "llama", known to transformers' Auto classes afterwards.

    Code that opens a converted directory by its path (TRL's reference models) then gets these classes and needs no
    trust_remote_code.
    """
    prefix = SUPPORTED[model_type]
    found = getattr(modeling_fox, f"Fox{prefix}ForCausalLM")
    _register(getattr(modeling_fox, f"Fox{prefix}Model"), found)
    return found


def _register(inner: Any, lm: Any) -> None:
    AutoConfig.register(lm.config_class.model_type, lm.config_class, exist_ok=True)
    AutoModel.register(lm.config_class, inner, exist_ok=True)
    AutoModelForCausalLM.register(lm.config_class, lm, exist_ok=True)


def on_meta(model_type: str, config: Any) -> Any:
    """A converted model without memory for its tensors, for their names and shapes."""
    with torch.device("meta"):
        return lm_class(model_type)(config)


def attentions(model: torch.nn.Module) -> Iterator[tuple[str, FoxMixin]]:
    """(name, module) of every converted attention, in layer order; ValueError where there is none."""
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


def sliding_window(attention: Any) -> int | None:
    """The sliding window in tokens with which a native attention calls its attention function."""
    if not getattr(attention, "is_sliding", True):
        return None
    if hasattr(attention, "sliding_window"):
        return attention.sliding_window
    in_config = attention.config.model_type.removeprefix("fox_") in WINDOW_IN_CONFIG
    return getattr(attention.config, "sliding_window", None) if in_config else None


def exempt_tokens(attention: Any) -> int:
    """First tokens of a document that never decay: `sink_tokens`, or 0 under a sliding window, which drops them."""
    return attention.sink_tokens if sliding_window(attention) is None else 0


def reach(attention: Any) -> int | None:
    """Tokens that a layer's queries see at most, themselves included, sink tokens aside; None where nothing bounds it.

    d tokens back a key of a bounded gate has decayed by d ln 2 / max_half_life nats at least, and is masked from the
    horizon on. One more token is room for rounding.
    """
    gate = attention.forget_gate
    least = 0.0 if gate is None or not gate.bounds else min(gate.bounds)
    if attention.horizon is None or least == 0.0:
        return sliding_window(attention)
    seen = math.ceil(attention.horizon / least) + 1
    return min(seen, sliding_window(attention) or seen)


def cached_heads(attention: Any) -> tuple[int, int]:
    """(heads whose keys a cache holds apart, channels of one's key and value); a latent (MLA) is one head for all.

    Older versions of transformers cache what the latent expands to.
    """
    config = attention.config
    if hasattr(attention, "expand_kv"):
        return 1, config.kv_lora_rank + config.qk_rope_head_dim
    return kv_heads_of(config), attention.head_dim + getattr(attention, "v_head_dim", attention.head_dim)


@contextlib.contextmanager
def attention_mode(model: torch.nn.Module, mode: str) -> Iterator[None]:
    """Runs every attention of a converted model in `mode` ("fox", "open", "shuffled", "original"), then restores."""
    assert mode in MODES, mode
    modules = [module for _, module in attentions(model)]
    before = [module.mode for module in modules]
    for module in modules:
        module.mode = mode
    try:
        yield
    finally:
        for module, old in zip(modules, before, strict=True):
            module.mode = old


def causal_lm(model: Any) -> Any:
    """The transformers model inside a peft model, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def decoder_layers(model: Any) -> list[Any]:
    """The decoder layers of a causal language model, in order; ValueError where they are not where LLaMA has them."""
    lm = causal_lm(model)
    layers = getattr(inner_model(lm), "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        raise ValueError(
            f"a {lm.config.model_type} model has no decoder layers where LLaMA has them: it can't be trained"
        )
    return list(layers)


def inner_model(model: PreTrainedModel) -> torch.nn.Module:
    """The model without its head: the module whose forward returns the last hidden state."""
    return getattr(model, model.base_model_prefix)


def logits_from_hidden(model: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
    """Applies the language-model head to hidden states as the model's own forward does.

    logits = cap(scale * W h), where scale and cap are the family's. A model that can't be converted may compute its
    logits otherwise.

    Args:
        hidden: (..., hidden_size), the last hidden state after the final norm, any slice of positions.

    Returns:
        (..., vocabulary) in the head's dtype.
    """
    head: Any = model.get_output_embeddings()
    logits, config = head(hidden.to(head.weight.dtype)), model.config
    if getattr(config, "logits_scaling", None) is not None:  # Granite
        logits = logits / config.logits_scaling
    if getattr(config, "logit_scale", None) is not None:  # Cohere
        logits = logits * config.logit_scale
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma
    return logits if cap is None else cap * torch.tanh(logits / cap)


def read_logits(model: PreTrainedModel, token_ids: torch.Tensor) -> Callable[[Any], torch.Tensor]:
    """Runs any causal LM once over whole texts; returns the function that reads float32 logits off it.

    The function takes an index into (B, T), such as (rows, positions) or (slice(None), slice(0, 64)), and gives
    (..., vocabulary). For the families that can be converted the head is applied to those positions only.

    Args:
        token_ids: (B, T) int64 on the model's device; padding, if any, stands at the end.
    """
    if model.config.model_type.removeprefix("fox_") in SUPPORTED:
        hidden = inner_model(model)(input_ids=token_ids, use_cache=False).last_hidden_state
        return lambda where: logits_from_hidden(model, hidden[where]).float()
    logits = model(input_ids=token_ids, use_cache=False).logits
    return lambda where: logits[where].float()


def is_converted(model: Any) -> bool:
    """Whether a transformers model carries forget gates."""
    return causal_lm(model).config.model_type.startswith("fox_")


LOGIT_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}
"""Bytes of float32 logits that exist at one time."""


def vocabulary_size(model: PreTrainedModel) -> int:
    """Rows of the language-model head: the number of tokens it scores."""
    head: Any = model.get_output_embeddings()
    return head.weight.shape[0]


def require_known_tokens(model: PreTrainedModel, largest: int) -> None:
    """Raises ValueError where the largest token id that a tokenizer gave lies outside a model's vocabulary."""
    vocabulary = vocabulary_size(model)
    if largest >= vocabulary:
        raise ValueError(
            f"token id {largest} lies outside the model's vocabulary of {vocabulary}: the tokenizer belongs to another "
            "model"
        )
