"""Loading unconverted models with their tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM

from retrofox.families import check_known, has_softcap
from retrofox.loading.configs import gguf_config, refuse_unread_tensors
from retrofox.loading.errors import opening
from retrofox.loading.shards import find
from retrofox.loading.source import read_config
from retrofox.loading.tokenizers import load_tokenizer


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
        ValueError: a file is damaged, or the model needs code of its own, which is not run.
    """
    path = Path(source)
    options: dict[str, Any]
    if str(source).endswith(".gguf"):
        where, options = str(path.parent), {"gguf_file": path.name, "config": gguf_config(source)}
    else:
        check_known(source, read_config(source, revision))
        where, options = str(source), {"revision": revision or "main", "trust_remote_code": False}
        if path.is_dir():
            find(path)  # says which file is missing or cut short
    with opening(source, stays=(OSError,)):
        if default_attention and "revision" in options:
            config = AutoConfig.from_pretrained(where, **options)
            config.output_attentions, config._attn_implementation = False, None
            options["config"] = config
        both: Any = AutoModelForCausalLM.from_pretrained(
            where, dtype=dtype or "auto", output_loading_info=True, **options
        )
        model, loaded = both
    if lost := sorted(loaded["missing_keys"]):
        raise ValueError(
            f"{source} lacks {len(lost)} of its model's tensors, such as {lost[0]}: it would run with random numbers "
            "in their place; download it again, or save the whole model with its head"
        )
    if "gguf_file" in options:
        refuse_unread_tensors(source, model)
    if has_softcap(model.config):
        model.set_attn_implementation("eager")
    if "gguf_file" in options and hasattr(model.config, "quantization_config"):
        delattr(model.config, "quantization_config")  # it was dequantised: the entry would only block saving
        vars(model).update(hf_quantizer=None, is_quantized=False)
    tokenizer = load_tokenizer(source, revision=revision)
    return (model if device is None else model.to(device)), tokenizer
