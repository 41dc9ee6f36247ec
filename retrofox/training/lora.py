"""LoRA on the pretrained projections, gates and Pro parts trained in full beside them and saved in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from retrofox.anatomy import is_new_tensor, lm_class
from retrofox.config import LoraConfig
from retrofox.loading.adapter import WEIGHTS, base_of, float32_parts, peft_is_behind, with_adapter
from retrofox.loading.converted import load
from retrofox.loading.source import read_config
from retrofox.model.modeling_fox import NEW_MODULES


def adapted(source: Path, lora: LoraConfig, dtype: torch.dtype, device: torch.device) -> Any:
    """A converted model with adapters: a fresh one, or the one in `source` if that is an adapter directory.

    Args:
        dtype: of the base; what adapters on a quantised one compute in.
        device: where a quantised base goes, which can't be moved; others stay on the CPU.

    Raises:
        ValueError: the base is not converted, a target names no linear layer, quantize without bitsandbytes or a GPU.
    """
    if (source / "adapter_config.json").is_file():
        return with_adapter(_base(base_of(source), lora, dtype, device), source, trainable=True)
    # An absolute path: the adapter must find its base from any directory.
    where = str(source.resolve()) if source.is_dir() else str(source)
    return add_adapters(_base(where, lora, dtype, device), lora, where)


def add_adapters(base: Any, lora: LoraConfig, source: str) -> Any:
    """A converted model with fresh adapters on its projections, its gates and Pro parts trained in full."""
    from peft import LoraConfig as PeftLoraConfig  # seconds to import
    from peft import get_peft_model

    config = PeftLoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        use_dora=lora.dora,
        target_modules=target_modules(base, lora),
        modules_to_save=new_modules(base),
    )
    with peft_is_behind():
        model: Any = get_peft_model(base, config)
    model.peft_config["default"].base_model_name_or_path = source
    return float32_parts(model)


def _base(source: str, lora: LoraConfig, dtype: torch.dtype, device: torch.device) -> Any:
    model = load(source, dtype=dtype) if lora.quantize is None else _quantized(source, dtype, device)
    model.config.use_cache = False
    model.config._name_or_path = source
    return model


def _quantized(source: str, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import BitsAndBytesConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=["lm_head", *NEW_MODULES],
    )
    family = lm_class(read_config(source)["model_type"].removeprefix("fox_"))
    model = family.from_pretrained(source, dtype=dtype, quantization_config=quantization, device_map={"": device})
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # bitsandbytes 0.50: evaluation on such a CPU packs weights into a form that has no backward afterwards.
            module.support_avx512bf16_for_cpu = False
    return model


def target_modules(model: nn.Module, config: LoraConfig) -> list[str]:
    """Names of the linear layers that get adapters; ValueError for the head, a gate, or no linear layer."""
    linear = {
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not is_new_tensor(name) and module is not model.get_output_embeddings()  # type: ignore[operator]
    }
    if config.targets == "all-linear":
        return sorted(linear)
    unknown = [name for name in config.targets if name not in linear]
    if unknown:
        raise ValueError(
            f"lora.targets: {unknown} are no linear layers to adapt; there are {', '.join(sorted(linear))}"
        )
    return list(config.targets)


def new_modules(model: nn.Module) -> list[str]:
    """Names of the modules a conversion added and that hold parameters: they are trained in full and saved."""
    names = {part for name, _ in model.named_parameters() for part in name.split(".")}
    return sorted(names & set(NEW_MODULES))


def assert_gates_saved(directory: Path, model: Any) -> None:
    """Opens the adapter file just written: every gate and Pro part that `model` trains in full is there, float32."""
    with safe_open(directory / WEIGHTS, "pt") as file:
        kept = {name for name in file.keys() if file.get_slice(name).get_dtype() == "F32"}  # noqa: SIM118, not a dict
    for name, _ in model.named_parameters():
        saved = name.replace(".modules_to_save.default", "")
        if saved != name and saved not in kept:
            raise RuntimeError(f"{directory / WEIGHTS} lacks {saved} in float32: the trained gates would be lost")
