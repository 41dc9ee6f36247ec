"""Loading what is not converted: base models with their tokenizers, and the configs of what is to be converted."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from retrofox.families import check_supported
from retrofox.model import configuration_fox
from retrofox.model.configuration_fox import SUPPORTED
from retrofox.source import check_source, read_config, reading_gguf, refuse_adapter, understood

logger = logging.getLogger(__name__)
UNREADABLE = (ValueError, OSError, ImportError, KeyError, TypeError, AttributeError)
"""What transformers raises at tokenizer files that are damaged, need other libraries, or need code of their own."""


def load_base(
    source: str | Path,
    *,
    dtype: Any = None,
    device: Any = None,
    revision: str | None = None,
    default_attention: bool = False,
):
    """(model, tokenizer) of an unconverted model: Hub id, directory or .gguf file (dequantised); tokenizer or None.

    Args:
        default_attention: run transformers' default attention without returning its weights, whatever the config says.

    Raises:
        FileNotFoundError: nothing there.
        ValueError: the source is an adapter or quantised.
    """
    path = Path(source)
    options: dict[str, Any]
    if str(source).endswith(".gguf"):
        if not path.is_file():
            raise FileNotFoundError(f"{source}: no such file")
        where, options = str(path.parent), {"gguf_file": path.name}
    else:
        read_config(source, revision)
        where, options = str(source), {"revision": revision or "main"}
    with reading_gguf(source) if "gguf_file" in options else contextlib.nullcontext():
        if default_attention and "revision" in options:
            config = AutoConfig.from_pretrained(where, **options)
            config.output_attentions, config._attn_implementation = False, None
            options["config"] = config
        model = AutoModelForCausalLM.from_pretrained(where, dtype=dtype or "auto", **options)
    if has_softcap(model.config):
        model.set_attn_implementation("eager")
    if "gguf_file" in options and hasattr(model.config, "quantization_config"):
        delattr(model.config, "quantization_config")  # it was dequantised: the entry would only block saving
        vars(model).update(hf_quantizer=None, is_quantized=False)
    tokenizer = load_tokenizer(source, revision=revision)
    return (model if device is None else model.to(device)), tokenizer


def has_softcap(config: Any) -> bool:
    """Whether a base model caps its attention logits: transformers before 5.23 drops the cap in sdpa, its default."""
    return getattr(config, "attn_logit_softcapping", None) is not None


def load_tokenizer(source: str | Path, revision: str | None = None) -> Any:
    """The tokenizer of a Hub id, directory or .gguf file; None where a directory holds none that opens.

    Code beside a tokenizer is not run: such a tokenizer doesn't open. A warning says so.
    """
    path = Path(source)
    if str(source).endswith(".gguf"):
        with reading_gguf(path):
            return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    if path.is_dir() and not any(path.glob("tokenizer*")):
        return None
    values = {} if path.is_dir() and not (path / "config.json").is_file() else read_config(source, revision)
    model_type = values.get("model_type", "").removeprefix("fox_")
    if model_type in SUPPORTED:  # else transformers would ask whether to trust the code beside the tokenizer
        config_class = getattr(configuration_fox, f"Fox{SUPPORTED[model_type]}Config")
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    options: dict[str, Any] = {"revision": revision or "main", "trust_remote_code": False}
    try:
        return AutoTokenizer.from_pretrained(str(source), **options)
    except Exception as error:
        # At files it can't read, the tokenizers library raises bare Exceptions.
        if not path.is_dir() or not (type(error) is Exception or isinstance(error, UNREADABLE)):
            raise
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        logger.warning("the tokenizer in %s can't be opened (%s): going on without it", source, why)
        return None


def base_config(source: str | Path, revision: str | None = None) -> Any:
    """The transformers config of a source that is a directory or Hub id, refusing what can't be converted."""
    refuse_adapter(source)
    values = read_config(source, revision)
    check_source(source, values)
    check_supported(values)
    with understood(f"config.json of {source}"):
        return AutoConfig.from_pretrained(str(source), revision=revision or "main")
