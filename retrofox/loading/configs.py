"""Configs of unconverted models, supported or not, before a weight is read.

Of .gguf files, what transformers' reader drops is recovered here, or refused by its name in the file. A key of the file
that transformers neither reads nor this module knows could change the model, and so could a tensor.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
    read_field,
)

from retrofox.families import check_known
from retrofox.loading.errors import opening
from retrofox.loading.source import read_config

Values = Mapping[str, Any]
FAMILIES = ("llama", "qwen2", "qwen3")
"""Families whose files are read."""
READ = {
    "attention.key_length", "attention.value_length", "attention.scale", "attention.layer_norm_epsilon",
    "rope.dimension_count", "rope.scale_linear", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.finetuned", "tensor_data_layout", "size_label", "vocab_size",
    "context_length", "block_count",
}  # fmt: skip
"""Keys that are read here, or change nothing."""
NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale", "expert_weights_scale"), 1),
    **dict.fromkeys(("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor"), 1),
    **dict.fromkeys(("attention.clamp_kqv", "attention.sliding_window", "expert_count", "expert_used_count"), 0),
    **dict.fromkeys(("attention.causal", "use_parallel_residual"), True),
}
"""Keys that are not read, with the value that changes nothing."""
REQUIRED = ("attention.head_count_kv", "attention.layer_norm_rms_epsilon", "context_length")
"""Keys without which transformers takes a default of its own, and leaves queries and keys of Llamas permuted."""


def any_config(source: str | Path, revision: str | None = None) -> Any:
    """The transformers config of an unconverted model, supported or not: Hub id, directory or .gguf file.

    Raises:
        FileNotFoundError: nothing there.
        ValueError: its file is damaged, or the model needs code of its own, which is not run.
    """
    if str(source).endswith(".gguf"):
        return gguf_config(source)
    check_known(source, read_config(source, revision))
    with opening(f"config.json of {source}"):
        return AutoConfig.from_pretrained(str(source), revision=revision or "main", trust_remote_code=False)


def gguf_config(file: str | Path) -> Any:
    """The transformers config of a .gguf file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file is damaged, of another family, or holds a setting that can't be expressed, by name.
    """
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"{file}: no such file")
    with opening(file, stays=(OSError,)):
        config, architecture, values, names = _header(path)
    if config.model_type not in FAMILIES:
        raise _refuse(file, "general.architecture", architecture)
    _refuse_unknown(file, config.model_type, values)
    head = int(values.get("attention.key_length", config.hidden_size // config.num_attention_heads))
    if hasattr(config, "head_dim"):
        config.head_dim = head
    if config.model_type == "llama":
        config.attention_bias, config.mlp_bias = "blk.0.attn_q.bias" in names, "blk.0.ffn_gate.bias" in names
    for key, computed in (("attention.scale", head**-0.5), ("rope.dimension_count", head)):
        if not math.isclose(values.get(key, computed), computed, rel_tol=1e-5):
            raise _refuse(file, key, values[key])
    config.rope_parameters = _rope(file, values, sorted(name for name in names if name.startswith("rope_")))
    return config


def refuse_unread_tensors(file: str | Path, model: Any) -> None:
    """Raises ValueError, by name, where a .gguf file holds tensors that transformers' reader left out of its model."""
    _, architecture, _, names = _header(Path(file))
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=model.config.to_dict())
    known = {name.removesuffix(".weight") for name in get_gguf_hf_weights_map(model, processor)}
    lost = sorted(name for name in names if name.removesuffix(".weight") not in known and not name.startswith("rope_"))
    if lost:
        raise ValueError(
            f"{file}: {len(lost)} of its tensors, such as {lost[0]}, have no place in transformers' "
            f"{model.config.model_type}: convert the model that the file was made from"
        )


def _header(path: Path) -> tuple[Any, str, Values, frozenset[str]]:
    """transformers' config of a .gguf file, its architecture, that one's keys, names of tensors."""
    about = path.stat()
    return copy.deepcopy(_read_header(path.absolute(), about.st_size, about.st_ctime_ns))  # callers change the config


@functools.lru_cache(maxsize=2)
def _read_header(path: Path, size: int, changed: int) -> tuple[Any, str, Values, frozenset[str]]:
    """Once for a file: it takes seconds, mostly for the tokenizer's words."""
    from gguf import GGUFReader

    config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    reader = GGUFReader(path)
    architecture = read_field(reader, "general.architecture")[0]
    values = {
        key.removeprefix(f"{architecture}."): _value(read_field(reader, key))
        for key in reader.fields
        if key.startswith(f"{architecture}.")
    }
    return config, architecture, values, frozenset(tensor.name for tensor in reader.tensors)


def _value(items: Sequence[Any]) -> Any:
    return items[0] if len(items) == 1 else list(items)


def _refuse(file: str | Path, key: str, value: Any) -> ValueError:
    return ValueError(
        f"{file}: {key} = {value} can't be read from a .gguf file: convert the model that the file was made from"
    )


def _refuse_unknown(file: str | Path, model_type: str, values: Values) -> None:
    """Raises ValueError for a key that could change the model in a way unknown here."""
    for key in REQUIRED:
        if key not in values:
            raise _refuse(file, key, "missing")
    read = GGUF_CONFIG_MAPPING[model_type]
    for key, value in values.items():
        known = key in READ or read.get(key) is not None
        if not known and not (key in NEUTRAL and value == NEUTRAL[key]):
            raise _refuse(file, key, value)


def _rope(file: str | Path, values: Values, tensors: Sequence[str]) -> dict[str, Any]:
    """RoPE's base. Any scaling is refused: by keys, or by `tensors` that hold factors of the frequencies (Llama 3)."""
    factor = float(values.get("rope.scaling.factor", values.get("rope.scale_linear", 1.0)))
    kind = values.get("rope.scaling.type", "linear")
    if kind != "none" and (kind != "linear" or factor != 1):
        raise _refuse(file, "rope.scaling.type", f"{kind}, with factor {factor:g}")
    if tensors:
        raise _refuse(file, tensors[0], "factors of RoPE's frequencies")
    return {"rope_type": "default", "rope_theta": float(values.get("rope.freq_base", 10_000.0))}
