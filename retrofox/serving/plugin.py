"""The entry point `vllm.general_plugins`: vLLM calls `register` in each of its processes before it reads a config."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig
from vllm import ModelRegistry
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig
from vllm.platforms import current_platform

from retrofox.fox_spec import FoxSpec
from retrofox.model import configuration_fox
from retrofox.model.configuration_fox import SUPPORTED
from retrofox.serving.installed import wrong_vllm
from retrofox.serving.refusals import NATIVE, SERVED, Settings, refusal, rope_refusal


def register() -> None:
    """Makes converted models known to vLLM, those that it can't serve with the reason."""
    for base_type, prefix in SUPPORTED.items():
        config = getattr(configuration_fox, f"Fox{prefix}Config")
        AutoConfig.register(config.model_type, config, exist_ok=True)
        name = f"Fox{prefix}ForCausalLM"
        served = name if base_type in SERVED else f"Fox{SUPPORTED[SERVED[0]]}ForCausalLM"  # `Checks` then refuses it
        if name not in ModelRegistry.models:
            ModelRegistry.register_model(name, f"retrofox.serving.vllm_models:{served}")
        native = NATIVE.get(base_type, ("", ""))[1]
        MODELS_CONFIG_MAP[name] = _checks(MODELS_CONFIG_MAP.get(native, VerifyAndUpdateConfig))


def _checks(native: Any) -> Any:
    class Checks(native):
        """Says what can't be served while the configuration is made; the base's own changes come first."""

        @staticmethod
        def verify_and_update_config(vllm_config: Any) -> None:
            native.verify_and_update_config(vllm_config)
            check(vllm_config)

    return Checks


def check(vllm_config: Any) -> None:
    """Raises ValueError where a converted model can't run under this configuration of vLLM."""
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    config = model.hf_config
    spec = FoxSpec.from_dict(config.fox)
    settings = Settings(
        dtype=str(model.dtype).removeprefix("torch."),
        cache_dtype=cache.cache_dtype,
        tensor_parallel=parallel.tensor_parallel_size,
        context_parallel=max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size),
        speculative=vllm_config.speculative_config is not None,
        lora=vllm_config.lora_config is not None,
        microbatches=bool(parallel.enable_dbo),
        generates=model.runner_type == "generate",
        paged=current_platform.is_cuda(),
    )
    base_type = config.model_type.removeprefix("fox_")
    why = wrong_vllm() or refusal(base_type, spec, config.num_attention_heads, config.num_key_value_heads, settings)
    why = why or rope_refusal(config, spec)
    if why is not None:
        raise ValueError(f"retrofox can't serve {model.model}: {why}")
